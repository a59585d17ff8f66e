"""Fields that change how a prompt is made and how tokens become text, through OpenAI's own client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from router.text.tokenizer import Tokenizer
from tests.unit.router.scripted_workers import MODEL, RunningRouter, Script
from tests.unit.router.tiny_model import CONTEXT_LEN, END_ID, SPECIAL, byte_fallback, write_folder

TEXT = "the quick brown fox"
USER = {"role": "user", "content": "hi"}
PAD_ID = SPECIAL.index("<|pad|>")


@pytest.fixture
def router(router: RunningRouter) -> RunningRouter:
    output = (PAD_ID, *router.tokenizer.encode(TEXT, add_special_tokens=False), END_ID)
    router.workers.script = Script(output=lambda _: output)
    return router


def complete(client: openai.OpenAI, **extra: Any) -> Any:
    return client.completions.create(model=MODEL, prompt="fox", max_tokens=99, extra_body=extra).choices[0]


def chat(client: openai.OpenAI, *messages: dict[str, Any], **extra: Any) -> Any:
    asked: Any = list(messages) or [USER]
    return client.chat.completions.create(model=MODEL, messages=asked, extra_body=extra)


def test_a_stop_string_may_stay_in_the_text_and_is_named(client: openai.OpenAI) -> None:
    cut = complete(client, stop=["brown"])
    assert (cut.text, cut.finish_reason, cut.stop_reason) == ("the quick ", "stop", "brown")
    for name in ("include_stop_str_in_output", "no_stop_trim"):
        kept = complete(client, stop=["brown"], **{name: True})
        assert (kept.text, kept.stop_reason) == ("the quick brown", "brown")


def test_a_stop_token_is_named_and_may_stay_in_the_text(
    client: openai.OpenAI, router: RunningRouter, tokenizer: Tokenizer
) -> None:
    output = tokenizer.encode(TEXT, add_special_tokens=False)
    router.workers.script = Script(output=lambda _: output)
    last = output[-1]
    cut = complete(client, stop_token_ids=[last])
    assert cut.stop_reason == last
    assert cut.text == TEXT.removesuffix(tokenizer.decode([last]))
    assert complete(client, stop_token_ids=[last], include_stop_str_in_output=True).text == TEXT


def test_an_end_by_the_model_has_no_other_reason(client: openai.OpenAI) -> None:
    assert complete(client).stop_reason is None


def test_special_tokens_are_spelled_out_when_asked_for(client: openai.OpenAI) -> None:
    assert complete(client).text == TEXT
    assert complete(client, skip_special_tokens=False).text == f"<|pad|>{TEXT}"
    kept = complete(client, skip_special_tokens=False, include_stop_str_in_output=True)
    assert kept.text == f"<|pad|>{TEXT}<|end|>"


def test_an_end_that_is_ignored_is_a_token_like_others(client: openai.OpenAI, router: RunningRouter) -> None:
    router.workers.ends = ()
    try:
        text = complete(client, skip_special_tokens=False, ignore_eos=True).text
    finally:
        router.workers.ends = (END_ID,)
    assert text == f"<|pad|>{TEXT}<|end|>"


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_come_with_their_text(client: openai.OpenAI, tokenizer: Tokenizer, stream: bool) -> None:
    expected = [PAD_ID, *tokenizer.encode(TEXT, add_special_tokens=False), END_ID]
    if not stream:
        assert complete(client, return_token_ids=True).token_ids == expected
        return
    answer: Any = client.completions.create(
        model=MODEL, prompt="fox", max_tokens=99, stream=True, extra_body={"return_token_ids": True}
    )
    choices = [choice for chunk in answer for choice in chunk.choices]
    found = [token_id for choice in choices for token_id in getattr(choice, "token_ids", None) or []]
    assert found == expected


def test_a_prompt_is_truncated_on_the_side_that_is_named(
    client: openai.OpenAI, router: RunningRouter, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode(TEXT)
    client.completions.create(model=MODEL, prompt=TEXT, extra_body={"truncate_prompt_tokens": 3})
    assert router.last_prefill.token_ids == ids[-3:]
    right = {"truncate_prompt_tokens": 3, "truncation_side": "right"}
    client.completions.create(model=MODEL, prompt=TEXT, extra_body=right)
    assert router.last_prefill.token_ids == ids[:3]


def test_a_prompt_beyond_the_context_may_be_truncated(client: openai.OpenAI, router: RunningRouter) -> None:
    long = [5] * (2 * CONTEXT_LEN)
    client.completions.create(model=MODEL, prompt=long, extra_body={"truncate_prompt_tokens": 20})
    assert router.last_prefill.token_ids == (5,) * 20
    with pytest.raises(openai.BadRequestError, match="context"):
        client.completions.create(
            model=MODEL, prompt=[5] * (5 * CONTEXT_LEN), extra_body={"truncate_prompt_tokens": 20}
        )


def test_the_last_message_is_continued(client: openai.OpenAI, router: RunningRouter) -> None:
    begun = {"role": "assistant", "content": "It is"}
    chat(client, USER, begun, continue_final_message=True, add_generation_prompt=False)
    assert router.prompt.endswith("<|start|>assistant\nIt is")
    with pytest.raises(openai.BadRequestError, match="add_generation_prompt must be false"):
        chat(client, USER, begun, continue_final_message=True, add_generation_prompt=True)


def test_a_message_that_is_continued_keeps_the_space_behind_it(tmp_path: Path) -> None:
    """Decoders as Llama 2's and Mistral's leave out the space of a text's first word."""
    folder = write_folder(
        tmp_path / "model", chat_template="{% for message in messages %}{{ message.content }}{% endfor %}"
    )
    tokenizer = byte_fallback()
    tokenizer.save(str(folder / "tokenizer.json"))
    word = tokenizer.get_vocab()["▁the"]
    begun = [USER, {"role": "assistant", "content": "In"}]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"continue_final_message": True, "add_generation_prompt": False},
        "/v1/messages": {},
    }
    with RunningRouter(folder) as router:
        router.workers.script = Script(output=lambda _: (word,) * 2)
        for path, fields in bodies.items():
            answer = router.http.post(path, json={"messages": begun, "max_tokens": 2} | fields).json()
            message = answer["choices"][0]["message"] if "choices" in answer else answer
            content = message["content"]
            assert (content if isinstance(content, str) else content[0]["text"]) == " the the"
        whole = router.http.post("/v1/chat/completions", json={"messages": [USER], "max_tokens": 2}).json()
        assert whole["choices"][0]["message"]["content"] == "the the"


def test_a_chat_may_end_without_a_generation_prompt(client: openai.OpenAI, router: RunningRouter) -> None:
    chat(client, add_generation_prompt=False)
    assert router.prompt == "<|start|>user\nhi<|end|>\n"


@pytest.mark.parametrize("name", ["messages", "chat_template", "tokenize", "add_generation_prompt", "tools"])
def test_variables_of_the_server_are_not_the_clients_to_set(client: openai.OpenAI, name: str) -> None:
    with pytest.raises(openai.BadRequestError, match="set by the server"):
        chat(client, chat_template_kwargs={name: "x"})


@pytest.mark.parametrize("row", [1, 4])
def test_no_stop_string_ends_a_text_before_min_tokens(
    client: openai.OpenAI, router: RunningRouter, tokenizer: Tokenizer, row: int
) -> None:
    router.says("the fox, the fox, the fox", row=row)
    twice = len(tokenizer.encode("the fox, the fox", add_special_tokens=False))
    late = complete(client, stop=["fox"], min_tokens=twice)
    assert (late.text, late.finish_reason, late.stop_reason) == ("the fox, the fox, the ", "stop", "fox")
    begun_before = complete(client, stop=["fox"], min_tokens=twice - 1)
    assert begun_before.text == "the fox, the ", "it may begin among the first tokens"
    assert complete(client, stop=["fox"]).text == "the "
