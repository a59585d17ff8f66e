"""/v1/responses through OpenAI's own client; the types of the `openai` package judge every event and every answer."""

from __future__ import annotations

import inspect
import json
import warnings
from functools import cache
from typing import Any

import openai
import pytest
from openai.resources.responses import Responses
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from router.openai.fields.table import fields_of
from router.openai.responses.fields import ResponsesFields
from router.text.tokenizer import Tokenizer
from tests.unit.router.openai.tools.agents import CALL, CITY_MODEL, CONTEXT_LEN
from tests.unit.router.scripted_workers import MODEL, RunningRouter, Script
from tests.unit.router.tiny_model import TinyModel

OF_THE_CLIENT = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
TOOL: Any = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}
TEXTS = {
    "text": "Héllo 日本 🙂🦊, the quick brown fox.",
    "thoughts": "<think>\nSo.\n</think>\n\nthe fox",
    "a call": f"<think>\nSo.\n</think>\n\nI look:\n\n{CALL}\n{CALL.replace('Paris', 'Zürich 🙂')}",
    "nothing": "",
}
VARYING = ("id", "item_id", "created_at", "sequence_number", "call_id")


@pytest.fixture
def model() -> TinyModel:
    return CITY_MODEL


@pytest.fixture
def router(router: RunningRouter) -> RunningRouter:
    router.says(TEXTS["text"])
    return router


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": "How is it in Paris?", "max_output_tokens": 400} | fields


def whole(router: RunningRouter, **fields: Any) -> dict[str, Any]:
    answer = router.http.post("/v1/responses", json=body(**fields))
    assert answer.status_code == 200, answer.text
    checked(Response, answer.json())
    return dict(answer.json())


def events(router: RunningRouter, **fields: Any) -> list[dict[str, Any]]:
    """All events of a stream, each judged by the `openai` package."""
    answer = router.http.post("/v1/responses", json=body(stream=True, **fields))
    assert answer.status_code == 200, answer.text
    found = []
    for block in answer.text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        checked(ResponseStreamEvent, event)
        found.append(event)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


@cache
def adapter(kind: Any) -> TypeAdapter[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pydantic's, of annotations in the package
        return TypeAdapter(kind)


def checked(kind: Any, value: dict[str, Any]) -> None:
    adapter(kind).validate_python(value)


def refusal(router: RunningRouter, **fields: Any) -> dict[str, Any]:
    answer = router.http.post("/v1/responses", json=body(**fields))
    assert answer.status_code == 400, answer.text
    return dict(answer.json()["error"])


def stable(value: Any) -> Any:
    """Without what differs between two answers to one request."""
    if isinstance(value, list):
        return [stable(one) for one in value]
    if isinstance(value, dict):
        return {name: stable(one) for name, one in value.items() if name not in VARYING}
    return value


def built(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output as a client builds it of deltas alone."""
    items: list[dict[str, Any]] = []
    for event in found:
        kind = event["type"]
        if kind == "response.output_item.added":
            items.append({"type": event["item"]["type"], "text": ""})
        elif kind.endswith(".delta"):
            items[event["output_index"]]["text"] += event["delta"]
    return items


def texts(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "type": item["type"],
            "text": item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"],
        }
        for item in output
    ]


@pytest.mark.parametrize("row", [1, 7, 1000], ids="{} tokens a message".format)
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_a_stream_is_the_answer_that_is_not_streamed(router: RunningRouter, text: str, row: int) -> None:
    router.says(text, row=row)
    answer = whole(router, tools=[TOOL])
    found = events(router, tools=[TOOL])
    assert found[-1]["type"] == "response.completed"
    assert stable(found[-1]["response"]) == stable(answer)
    assert built(found) == texts(answer["output"])
    done = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    assert sorted(done, key=lambda item: item["id"]) == sorted(
        found[-1]["response"]["output"], key=lambda item: item["id"]
    )


def test_an_answer_has_its_text_and_says_that_nothing_is_stored(
    client: openai.OpenAI, router: RunningRouter
) -> None:
    answer = client.responses.create(
        model=MODEL, input="hi", instructions="Be brief.", metadata={"a": "b"}, store=True
    )
    assert answer.output_text == TEXTS["text"]
    assert answer.status == "completed"
    assert answer.id.startswith("resp_")
    assert answer.to_dict()["store"] is False
    assert answer.metadata == {"a": "b"}
    assert answer.usage is not None
    assert answer.usage.input_tokens == len(router.last_prefill.token_ids)
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert "<|start|>system\nBe brief.<|end|><|start|>user\nhi<|end|>" in router.prompt


def test_the_clients_own_stream_joins_to_the_text(client: openai.OpenAI) -> None:
    with client.responses.stream(model=MODEL, input="hi") as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert "".join(deltas) == TEXTS["text"]
        assert stream.get_final_response().output_text == TEXTS["text"]


def test_an_answer_that_reached_its_limit_is_incomplete(router: RunningRouter) -> None:
    router.says(TEXTS["text"], end=False)
    answer = whole(router, max_output_tokens=4)
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["status"] for item in answer["output"]] == ["incomplete"]
    assert events(router, max_output_tokens=4)[-1]["type"] == "response.incomplete"


def test_a_conversation_with_tools_comes_back_whole(
    client: openai.OpenAI, router: RunningRouter, tokenizer: Tokenizer
) -> None:
    router.says(TEXTS["a call"])
    first = client.responses.create(model=MODEL, input="How is it in Paris?", tools=[TOOL])
    calls = [item for item in first.output if item.type == "function_call"]
    assert [json.loads(call.arguments)["city"] for call in calls] == ["Paris", "Zürich 🙂"]
    result = {"type": "function_call_output", "call_id": calls[0].call_id, "output": "<|end|> rain"}
    said: Any = first.to_dict()["output"]
    items: Any = [{"role": "user", "content": "How is it in Paris?"}, *said, result]
    router.says("It rains.")
    second = client.responses.create(model=MODEL, input=items, tools=[TOOL])
    assert second.output_text == "It rains."
    shown = router.prompt
    assert "<weather Paris><weather Zürich 🙂><|end|>" in shown
    assert f"<|end|> rain of {calls[0].call_id}" in shown
    ends = router.last_prefill.token_ids.count(tokenizer.encode("<|end|>", False)[0])
    assert ends == shown.count("<|end|>") - 1, "what a tool says is text"


def test_logprobs_come_with_their_text(router: RunningRouter) -> None:
    router.says("the fox")
    answer = whole(router, top_logprobs=2, include=["message.output_text.logprobs"])
    entries = answer["output"][0]["content"][0]["logprobs"]
    assert "".join(entry["token"] for entry in entries if entry["token"] != "<|end|>") == "the fox"
    assert {len(entry["top_logprobs"]) for entry in entries} == {2}
    found = events(router, top_logprobs=2)
    streamed = [
        one for event in found for one in event.get("logprobs", []) if event["type"].endswith("delta")
    ]
    assert streamed == entries


def test_a_schema_is_a_grammar(router: RunningRouter) -> None:
    router.says("{}")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
    asked = {"format": {"type": "json_schema", "name": "a", "schema": schema, "strict": True}}
    answer = whole(router, text=asked)
    assert answer["text"]["format"]["schema"] == schema
    grammar = router.last_prefill.params.grammar
    assert grammar is not None
    assert '"a"' in grammar.text


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an earlier response": ({"previous_response_id": "resp_1"}, "previous_response_id"),
    "a conversation": ({"conversation": "conv_1"}, "conversation"),
    "a stored prompt": ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    "the background": ({"background": True}, "background"),
    "a forced tool of the server": (
        {"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}},
        "tool_choice",
    ),
    "a slip within a tool": (
        {"tools": [{"type": "function", "name": "f", "parametres": {}}]},
        "tools[0].parametres",
    ),
    "an item of the server": ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    "an image": (
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        "input[0].content[0].type",
    ),
    "no items": ({"input": []}, "input"),
    "a number": ({"input": 5}, "input"),
    "an item without a role": ({"input": [{"content": "hi"}]}, "input[0].role"),
    "a result without its call": (
        {"input": [{"type": "function_call_output", "output": "x"}]},
        "input[0].call_id",
    ),
    "no output": ({"max_output_tokens": 0}, "max_output_tokens"),
    "a field of chats": ({"messages": [{"role": "user", "content": "hi"}]}, "messages"),
    "a slip": ({"tempreature": 1}, "tempreature"),
}


@pytest.mark.parametrize(("fields", "param"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_served_is_refused_by_its_own_name(
    router: RunningRouter, fields: dict[str, Any], param: str
) -> None:
    heard = len(router.workers.prefills)
    error = refusal(router, **fields)
    assert error["param"] == param
    assert param in error["message"]
    assert len(router.workers.prefills) == heard


def test_penalties_and_stop_strings_are_those_of_chats(router: RunningRouter) -> None:
    router.says("the fox and the dog")
    answer = router.http.post(
        "/v1/responses", json=body(stop="fox", presence_penalty=0.5, frequency_penalty=-1)
    )
    assert answer.status_code == 200, answer.text
    assert "x-segue-ignored" not in answer.headers
    (message,) = answer.json()["output"]
    assert message["content"][0]["text"] == "the "
    params = router.last_prefill.params
    assert (params.presence_penalty, params.frequency_penalty) == (0.5, -1)


def test_a_header_has_the_names_of_this_path(router: RunningRouter) -> None:
    router.says(TEXTS["text"])
    asked = body(reasoning={"effort": "high"}, enable_thinking=False)
    answer = router.http.post("/v1/responses", json=asked)
    assert answer.headers["x-segue-ignored"] == "reasoning.effort"


SWITCHES: dict[str, Any] = {
    "enable_thinking": {"enable_thinking": True},
    "thinking": {"thinking": {"type": "enabled"}},
    "chat_template_kwargs": {"chat_template_kwargs": {"enable_thinking": True}},
}


@pytest.mark.parametrize("switch", SWITCHES.values(), ids=SWITCHES)
def test_thoughts_have_the_switches_of_chats(router: RunningRouter, switch: dict[str, Any]) -> None:
    router.says("So.\n</think>\n\nthe fox")
    thoughts, message = whole(router, **switch)["output"]
    assert router.prompt.endswith("<think>\n")
    assert (thoughts["content"][0]["text"], message["content"][0]["text"]) == ("So.", "the fox")
    answer = router.http.post("/v1/responses", json=body(enable_thinking=False))
    assert answer.status_code == 200
    assert "x-segue-ignored" not in answer.headers
    assert not router.prompt.endswith("<think>\n")


def test_what_an_assistant_and_a_tool_said_may_be_empty_or_a_refusal(router: RunningRouter) -> None:
    router.says(TEXTS["text"])
    call = {"type": "function_call", "call_id": "1", "name": "weather", "arguments": '{"city": "Paris"}'}
    history = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "I will not."}]},
        {"role": "user", "content": "why"},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": []},
        call,
        {"type": "function_call_output", "call_id": "1", "output": None},
    ]
    whole(router, input=history)
    shown = router.prompt
    assert "<|start|>assistant\nI will not.<|end|>" in shown
    assert "<|start|>assistant\n<|end|>" in shown
    assert "<|start|>tool\n of 1<|end|>" in shown


def test_more_items_than_the_context_could_hold_are_not_read(router: RunningRouter) -> None:
    error = refusal(router, input=[{}] * (5 * CONTEXT_LEN))
    assert (error["param"], error["code"]) == ("input", "context_length_exceeded")


def test_a_stream_that_is_interrupted_says_so(router: RunningRouter) -> None:
    output = router.tokenizer.encode("the fox", add_special_tokens=False)
    with RunningRouter(router.folder, limits=router.workers.limits, worker_return_seconds=0.1) as own:
        own.workers.script = Script(output=lambda _: output, stalled=True)
        with own.http.stream("POST", "/v1/responses", json=body(stream=True), timeout=20) as answer:
            lines = answer.iter_lines()
            assert next(lines) == "event: response.created"
            own.call(own.workers.lose_decode)
            rest = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    for event in rest:
        checked(ResponseStreamEvent, event)
    assert [event["type"] for event in rest[-2:]] == ["error", "response.failed"]
    assert rest[-1]["response"]["status"] == "failed"


def test_an_answer_repeats_the_tools_that_a_model_can_call_by_the_fields_that_they_have(
    router: RunningRouter,
) -> None:
    lookup = {"type": "custom", "name": "lookup", "format": {"type": "text"}, "color": "red"}
    tools = [TOOL | {"color": [["red"]]}, {"type": "web_search", "x": 1}, {"type": "function", "name": "f"}]
    inner = {"type": "namespace", "name": "crm", "description": "All", "tools": [lookup]}
    answer = whole(router, tools=[*tools, lookup, inner], tool_choice="none")
    del lookup["color"]
    bare = {"type": "function", "name": "f", "description": None, "parameters": None, "strict": False}
    found = answer["tools"]
    assert found[:3] == [{"description": None, "strict": False} | TOOL, bare, lookup]
    assert found[3] | {"tools": []} == inner | {"tools": []}


def test_an_event_is_one_line_however_the_body_is_written(router: RunningRouter) -> None:
    router.says(TEXTS["text"])
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": TOOL["name"]}]}
    asked = json.dumps(body(stream=True, tools=[TOOL], tool_choice=allowed), indent=2)
    headers = {"content-type": "application/json"}
    answer = router.http.post("/v1/responses", content=asked, headers=headers)
    lines = answer.text.split("\n")
    assert {line.partition(":")[0] for line in lines} == {"event", "data", ""}
    created = json.loads(lines[1].removeprefix("data: "))
    assert created["response"]["tool_choice"] == allowed


def test_a_stream_that_is_to_be_resumed_is_refused(router: RunningRouter) -> None:
    headers = {"x-segue-resumable": "true"}
    asked = body(stream=True)
    answer = router.http.post("/v1/responses", json=asked, headers=headers)
    assert answer.status_code == 400
    assert "X-Segue-Resumable" in answer.json()["error"]["message"]


def test_the_served_fields_of_the_table_are_those_of_the_struct() -> None:
    served = {name for name, field in fields_of("responses").items() if field.state == "served"}
    assert served == set(ResponsesFields.__struct_fields__)


def test_the_table_has_every_parameter_of_the_openai_package() -> None:
    parameters = set(inspect.signature(Responses.create).parameters) - OF_THE_CLIENT
    assert parameters - set(fields_of("responses")) == set()
