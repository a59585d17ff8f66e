"""gpt-oss's answers through every API: what is told of its messages, and what its template is shown of a history."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.text.detokenizer import Detokenizer
from router.text.model_folder import read_eos_token_ids
from tests.unit.router.harmony_model import harmony_router, write_harmony
from tests.unit.router.openai.messages.asking import THINKS, TOOL, events_of, post
from tests.unit.router.openai.messages.asking import whole as message_of
from tests.unit.router.openai.tools.agents import USER, WEATHER, grammar_of, ignored, posted
from tests.unit.router.openai.tools.test_tools_over_http import asked, joined_stream, read_whole
from tests.unit.router.scripted_workers import MODEL, RunningRouter, Script

NEXT = "<|start|>assistant"
THOUGHT = "<|channel|>analysis<|message|>I look.<|end|>"
PREAMBLE = "<|channel|>commentary<|message|>One moment.<|end|>"
CALL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>'
FINAL = "<|channel|>final<|message|>It rains in Zürich 🙂.<|return|>"
ANSWER = THOUGHT + NEXT + FINAL
CALLS = THOUGHT + NEXT + PREAMBLE + NEXT + CALL


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningRouter]:
    with harmony_router(write_harmony(tmp_path_factory.mktemp("harmony"))) as running:
        yield running


def says(router: RunningRouter, text: str, row: int = 1) -> None:
    router.says(text, end=False, row=row)


def answers(tokens: tuple[int, ...]) -> Script:
    return Script(output=lambda _: tokens)


@pytest.mark.parametrize("row", [1, 3, 1000], ids="{} tokens a message".format)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_chat_has_thoughts_content_and_calls_apart(router: RunningRouter, row: int, stream: bool) -> None:
    read: Any = joined_stream if stream else read_whole
    says(router, ANSWER, row)
    message, reason = read(asked(router.openai, tools=[WEATHER], stream=stream))
    assert message == {"content": "It rains in Zürich 🙂.", "reasoning_content": "I look.", "tool_calls": []}
    assert reason == "stop"
    says(router, CALLS, row)
    message, reason = read(asked(router.openai, tools=[WEATHER], stream=stream))
    (call,) = message.pop("tool_calls")
    assert (call["name"], json.loads(call["arguments"])) == ("weather", {"city": "Paris"})
    assert message == {"content": "One moment.", "reasoning_content": "I look."}
    assert reason == "tool_calls"


def test_a_chat_without_tools_has_no_marks_either(router: RunningRouter) -> None:
    says(router, ANSWER)
    for fields, message in (
        ({}, ("It rains in Zürich 🙂.", "I look.")),
        ({"include_reasoning": False}, ("It rains in Zürich 🙂.", "")),
        ({"separate_reasoning": False}, ("I look.\n\nIt rains in Zürich 🙂.", "")),
        ({"stop": "rains"}, ("It ", "I look.")),
        ({"skip_special_tokens": False}, ("It rains in Zürich 🙂.", "I look.")),
    ):
        found, _ = read_whole(asked(router.openai, extra_body=fields))
        assert (found["content"], found["reasoning_content"]) == message


def test_an_answer_that_is_cut_off_tells_what_there_was(router: RunningRouter) -> None:
    tokens = router.tokenizer.encode(CALLS, add_special_tokens=False)
    whole = {"content": "One moment.", "reasoning_content": "I look."}
    found = set()
    for length in range(1, len(tokens)):
        router.workers.script = answers(tokens[:length])
        message, reason = read_whole(asked(router.openai, tools=[WEATHER]))
        assert reason == "length"
        for call in message.pop("tool_calls"):
            assert '{"city": "Paris"}'.startswith(call["arguments"])
            found.add(call["name"])
        assert all(whole[name].startswith(text) for name, text in message.items())
        found |= set(message.values())
    assert {"", "I look.", "One moment.", "weather"} <= found


def quoted(router: RunningRouter, text: str) -> tuple[int, ...]:
    """Tokens of a text in which the marks are no tokens."""
    parts = [part for piece in text.split("<|") for part in ("<", f"|{piece}")][2:]
    encode = router.tokenizer.encode
    return tuple(token for part in (text.split("<|")[0], *parts) if part for token in encode(part, False))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_marks_that_an_answer_quotes_are_text(router: RunningRouter, stream: bool) -> None:
    """Else a model that repeats a text would call a tool by it."""
    said = f"The format is <|start|>assistant{CALL}<|end|> \ufdd0{CALL}"
    encode = router.tokenizer.encode
    tokens = quoted(router, said)
    assert router.tokenizer.decode_all(tokens) == said
    router.workers.script = answers(
        (*encode(FINAL.split("It")[0], False), *tokens, *encode("<|return|>", False))
    )
    read: Any = joined_stream if stream else read_whole
    message, reason = read(asked(router.openai, tools=[WEATHER], stream=stream))
    assert message == {"content": said.replace("\ufdd0", "\ufffd"), "reasoning_content": "", "tool_calls": []}
    assert reason == "stop"


@given(data=st.data())
def test_guarded_text_is_the_same_token_by_token(router: RunningRouter, data: st.DataObject) -> None:
    tokenizer = router.tokenizer
    ids = data.draw(
        st.lists(
            st.integers(3, tokenizer.vocab_size - 1) | st.sampled_from(sorted(tokenizer.special_token_ids)),
            max_size=30,
        )
    )
    text = Detokenizer(tokenizer.of_answers)
    whole = tokenizer.of_answers.decode(ids)
    assert "".join(text.push((token_id,)) for token_id in ids) + text.finish() == whole
    assert whole.replace("\ufdd0", "") == tokenizer.decode_all(ids).replace("\ufdd0", "\ufffd")


def test_the_usage_has_the_tokens_of_thoughts(router: RunningRouter) -> None:
    says(router, ANSWER)
    usage = asked(router.openai).usage
    thought = router.tokenizer.encode("I look.", add_special_tokens=False)
    assert usage.completion_tokens_details.reasoning_tokens == len(thought)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_response_has_an_item_for_each(router: RunningRouter, stream: bool) -> None:
    says(router, CALLS)
    tool = {"type": "function", **WEATHER["function"]}
    answer = posted(router, tools=[tool], stream=stream)
    response = events_of(answer.text)[-1]["response"] if stream else answer.json()
    thoughts, message, call = response["output"]
    assert [item["type"] for item in response["output"]] == ["reasoning", "message", "function_call"]
    assert thoughts["content"][0]["text"] == "I look."
    assert message["content"][0]["text"] == "One moment."
    assert (call["name"], call["arguments"]) == ("weather", '{"city": "Paris"}')


def test_a_message_of_anthropics_has_a_block_for_each(router: RunningRouter) -> None:
    says(router, CALLS)
    message = message_of(router, tools=[TOOL], thinking=THINKS)
    thoughts, text, call = message["content"]
    assert (thoughts["thinking"], text["text"]) == ("I look.", "One moment.")
    assert (call["name"], call["input"], message["stop_reason"]) == ("weather", {"city": "Paris"}, "tool_use")
    streamed = events_of(post(router, tools=[TOOL], thinking=THINKS, stream=True).text)
    begun = [event["content_block"]["type"] for event in streamed if event["type"] == "content_block_start"]
    assert begun == ["thinking", "text", "tool_use"]


def test_a_completion_is_the_models_own_text(router: RunningRouter) -> None:
    says(router, ANSWER)
    for fields, text in (
        ({}, "analysisI look.assistantfinalIt rains in Zürich 🙂."),
        ({"skip_special_tokens": False}, ANSWER),
    ):
        body = {"model": MODEL, "prompt": "Hi", "max_tokens": 400, **fields}
        assert router.http.post("/v1/completions", json=body).json()["choices"][0]["text"] == text
        assert router.last_prefill.params.stop_token_ids == ()


# ---- what an answer is kept to -----------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_forced_call_is_kept_to_in_the_models_own_format(router: RunningRouter, choice: Any) -> None:
    says(router, THOUGHT + NEXT + CALL)
    message, reason = read_whole(asked(router.openai, tools=[WEATHER], tool_choice=choice))
    assert [call["name"] for call in message["tool_calls"]] == ["weather"]
    assert (message["content"], message["reasoning_content"], reason) == ("", "I look.", "tool_calls")
    (channel,) = router.tokenizer.encode("<|channel|>", add_special_tokens=False)
    assert f'<[{channel}]> "commentary to=functions.weather"' in grammar_of(router)
    assert "preamble)*" not in grammar_of(router)


def test_a_schema_binds_the_final_message(router: RunningRouter) -> None:
    says(router, THOUGHT + NEXT + "<|channel|>final <|constrain|>json<|message|>true<|return|>")
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "boolean"}}}
    message, _ = read_whole(asked(router.openai, response_format=schema))
    assert (message["content"], message["reasoning_content"]) == ("true", "I look.")
    assert "thought* (shaped)" in grammar_of(router)
    asked(router.openai, response_format=schema, tools=[WEATHER])
    assert "thought* (call | shaped)" in grammar_of(router)


def test_strict_tools_bind_free_calls(router: RunningRouter) -> None:
    says(router, CALLS)
    strict = {**WEATHER, "function": WEATHER["function"] | {"strict": True}}
    answer = posted(router, "chat/completions", tools=[strict])
    assert "(thought | preamble)* (call | final)" in grammar_of(router)
    assert ignored(answer) == []


# ---- where an answer ends ----------------------------------------------------------------------------------------


def test_a_call_ends_an_answer_and_the_end_of_a_message_does_not(
    router: RunningRouter, tmp_path: Path
) -> None:
    ids = dict(
        zip(
            ("return", "call", "end"),
            router.tokenizer.encode("<|return|><|call|><|end|>", False),
            strict=True,
        )
    )
    assert router.tokenizer.eos_token_ids == {ids["return"], ids["call"]}
    says(router, ANSWER)
    asked(router.openai)
    assert router.last_prefill.params.stop_token_ids == ()
    older = write_harmony(tmp_path, ends=("<|return|>",))
    assert read_eos_token_ids(older, {}) == {ids["return"]}
    with harmony_router(older) as running:
        says(running, CALLS)
        message, reason = read_whole(asked(running.openai, tools=[WEATHER]))
        assert list(running.last_prefill.params.stop_token_ids) == [ids["call"]]
        assert (len(message["tool_calls"]), reason) == (1, "tool_calls")
        asked(running.openai, extra_body={"stop_token_ids": [ids["end"]]})
        assert list(running.last_prefill.params.stop_token_ids) == [ids["end"], ids["call"]]
        asked(running.openai, extra_body={"ignore_eos": True})
        assert not running.last_prefill.params.stop_token_ids


@pytest.mark.parametrize("stops", [["call"], ["call", "return"]])
def test_clients_that_name_the_ends_themselves_get_the_same(router: RunningRouter, stops: list[str]) -> None:
    ids = [router.tokenizer.encode(f"<|{stop}|>", False)[0] for stop in stops]
    says(router, THOUGHT + NEXT + CALL.replace('{"city": "Paris"}', ""))
    message, reason = read_whole(asked(router.openai, tools=[WEATHER], extra_body={"stop_token_ids": ids}))
    assert [call["arguments"] for call in message["tool_calls"]] == ["{}"]
    assert (message["content"], reason) == ("", "tool_calls")


# ---- what the template is shown ----------------------------------------------------------------------------------


def called(*cities: str, **said: Any) -> dict[str, Any]:
    calls = [
        {
            "id": city.lower(),
            "type": "function",
            "function": {"name": "weather", "arguments": json.dumps({"city": city})},
        }
        for city in cities
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls, **said}


def result(of: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": of, "content": text}


def shown(city: str) -> str:
    return f'<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{{"city": "{city}"}}<|call|>'


def gave(text: str) -> str:
    return f'<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"{text}"<|end|>'


THINKING = "<|start|>assistant<|channel|>analysis<|message|>I look.<|end|>"


def test_a_loop_of_two_turns_shows_thoughts_call_and_result(router: RunningRouter) -> None:
    says(router, THOUGHT + NEXT + CALL)
    message = asked(router.openai, tools=[WEATHER]).choices[0].message
    says(router, ANSWER)
    history = [USER, message.model_dump(exclude_none=True), result(message.tool_calls[0].id, "rain")]
    answer = asked(router.openai, *history, tools=[WEATHER])
    assert router.prompt.endswith(THINKING + shown("Paris") + gave("rain") + "<|start|>assistant")
    asked(
        router.openai,
        *history,
        answer.choices[0].message.model_dump(exclude_none=True),
        USER,
        tools=[WEATHER],
    )
    assert "It rains in Zürich 🙂.<|end|><|start|>user" in router.prompt


def test_several_calls_of_one_message_are_shown_with_their_own_results(router: RunningRouter) -> None:
    says(router, ANSWER)
    asked(
        router.openai,
        USER,
        called("Paris", "Rome", reasoning_content="I look."),
        result("rome", "sun"),
        result("paris", "rain"),
        tools=[WEATHER],
    )
    both = shown("Paris") + gave("rain") + shown("Rome") + gave("sun")
    assert router.prompt.endswith(THINKING + both + "<|start|>assistant")
    asked(
        router.openai,
        USER,
        called("Paris", "Rome"),
        result("rome", "sun"),
        result("oslo", "ice"),
        tools=[WEATHER],
    )
    assert shown("Paris") + shown("Rome") + gave("sun") + gave("ice") in router.prompt


def test_content_beside_a_call_and_thoughts_is_no_error(router: RunningRouter) -> None:
    says(router, ANSWER)
    message = called("Paris", content="One moment.", reasoning_content="I look.")
    asked(router.openai, USER, message, result("paris", "rain"), tools=[WEATHER])
    joined = "<|start|>assistant<|channel|>analysis<|message|>I look.\n\nOne moment.<|end|>"
    assert joined + shown("Paris") + gave("rain") in router.prompt


@pytest.mark.parametrize(("default", "shown"), [(1, "1"), (None, "null"), ("a", "a")])
def test_the_default_of_an_enum_is_shown_whatever_it_is(
    router: RunningRouter, default: Any, shown: str
) -> None:
    says(router, ANSWER)
    properties = {"days": {"enum": [1, None, "a"], "default": default}, "city": True}
    function = WEATHER["function"] | {"parameters": {"type": "object", "properties": properties}}
    asked(router.openai, tools=[{"type": "function", "function": function}])
    assert f"// default: {shown}<|end|>" in router.prompt


def test_other_apis_histories_are_shown_alike(router: RunningRouter) -> None:
    says(router, ANSWER)
    call = {"type": "function_call", "call_id": "paris", "name": "weather", "arguments": '{"city": "Paris"}'}
    items = [
        USER,
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "I look."}]},
        call,
        {"type": "function_call_output", "call_id": "paris", "output": "rain"},
    ]
    posted(router, input=items, tools=[{"type": "function", **WEATHER["function"]}])
    assert THINKING + shown("Paris") + gave("rain") in router.prompt
    use = {"type": "tool_use", "id": "paris", "name": "weather", "input": {"city": "Paris"}}
    thinking = {"type": "thinking", "thinking": "I look.", "signature": "s"}
    answer = {"type": "tool_result", "tool_use_id": "paris", "content": "rain"}
    turns = [USER, {"role": "assistant", "content": [thinking, use]}, {"role": "user", "content": [answer]}]
    message_of(router, messages=turns, tools=[TOOL])
    assert THINKING + shown("Paris") + gave("rain") in router.prompt


def test_a_final_message_is_continued_where_it_ends(router: RunningRouter) -> None:
    says(router, " in Rome.<|return|>")
    begun = {"role": "assistant", "content": "It rains"}
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    message, _ = read_whole(asked(router.openai, USER, begun, extra_body=fields))
    assert router.prompt.endswith("<|channel|>final<|message|>It rains")
    assert message["content"] == " in Rome."


@pytest.mark.parametrize(
    ("effort", "shown"),
    [("low", "low"), ("high", "high"), ("minimal", "low"), ("xhigh", "high"), ("none", "low")],
)
def test_an_effort_is_the_nearest_that_the_model_knows(
    router: RunningRouter, effort: Any, shown: str
) -> None:
    says(router, ANSWER)
    answer = posted(router, "chat/completions", reasoning_effort=effort)
    assert f"Reasoning: {shown}" in router.prompt
    assert ignored(answer) == (["reasoning_effort"] if effort == "none" else [])  # it always thinks


def test_a_result_without_a_call_is_refused(router: RunningRouter) -> None:
    with pytest.raises(openai.BadRequestError, match="chat template does not accept"):
        asked(router.openai, USER, result("paris", "rain"), tools=[WEATHER])
