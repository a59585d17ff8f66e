"""Answers of /v1/messages, whole and as events: blocks, reasons, usage, trouble on the way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx2
import pytest

from router.text.tokenizer import Tokenizer
from tests.unit.router.openai.messages.asking import (
    HEADERS,
    THINKS,
    TOOL,
    body,
    built,
    events,
    post,
    refusal,
    shown,
    stable,
    whole,
)
from tests.unit.router.openai.tools.test_tools_over_http import CALL, CONTEXT_LEN, LIMITS, says
from tests.unit.router.scripted_workers import MODEL, RunningRouter, Script
from tests.waiting import until

TEXTS = {
    "text": "Héllo 日本 🙂🦊, the quick brown fox.",
    "thoughts": "So.\n</think>\n\nthe fox",
    "thoughts and calls": f"So.\n</think>\n\nI look:\n\n{CALL}\n{CALL.replace('Paris', 'Zürich 🙂')}",
    "a call without arguments": '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>',
    "nothing": "",
}


@pytest.mark.parametrize("row", [1, 7, 1000], ids="{} tokens a message".format)
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_a_stream_is_the_answer_that_is_not_streamed(
    served: RunningRouter, tokenizer: Tokenizer, text: str, row: int
) -> None:
    says(served, tokenizer, text, row=row)
    thinking = THINKS if "</think>" in text else None
    answer = whole(served, tools=[TOOL], thinking=thinking)
    assert stable(built(events(served, tools=[TOOL], thinking=thinking))) == stable(answer)


def test_thoughts_text_and_calls_are_blocks(served: RunningRouter, tokenizer: Tokenizer) -> None:
    says(served, tokenizer, TEXTS["thoughts and calls"])
    answer = whole(served, tools=[TOOL], thinking=THINKS)
    thinking, text, *calls = answer["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "So.")
    assert thinking["signature"]
    assert text == {"type": "text", "text": "I look:"}
    assert [call["input"] for call in calls] == [{"city": "Paris"}, {"city": "Zürich 🙂"}]
    assert {call["name"] for call in calls} == {"weather"}
    assert len({call["id"] for call in calls}) == 2
    assert answer["stop_reason"] == "tool_use"


@pytest.mark.parametrize("asked", [None, {"type": "disabled"}, {"type": "adaptive", "display": "omitted"}])
def test_thoughts_that_were_not_asked_for_are_no_block(
    served: RunningRouter, tokenizer: Tokenizer, asked: Any
) -> None:
    says(served, tokenizer, f"<think>\n{TEXTS['thoughts']}")
    answer = whole(served, thinking=asked)
    assert answer["content"] == [{"type": "text", "text": "the fox"}]
    assert built(events(served, thinking=asked))["content"] == answer["content"]
    begins = shown(served, tokenizer).endswith("<think>\n")
    assert begins == (asked is not None and asked["type"] == "adaptive")


def test_text_behind_a_call_is_a_block_of_its_own_in_a_stream(
    served: RunningRouter, tokenizer: Tokenizer
) -> None:
    says(served, tokenizer, f"I look:\n{CALL}\nDone.")
    kinds = [block["type"] for block in built(events(served, tools=[TOOL]))["content"]]
    assert kinds == ["text", "tool_use", "text"]
    texts = [block["text"] for block in whole(served, tools=[TOOL])["content"] if block["type"] == "text"]
    assert len(texts) == 1
    assert texts[0].startswith("I look:")
    assert texts[0].endswith("Done.")


def test_an_input_that_was_cut_is_what_came_of_it(served: RunningRouter, tokenizer: Tokenizer) -> None:
    says(served, tokenizer, CALL[: CALL.index("Paris") + 3], end=False)
    tokens = len(tokenizer.encode(CALL[: CALL.index("Paris") + 3], False))
    answer = whole(served, tools=[TOOL], max_tokens=tokens)
    assert answer["content"][0]["input"] == {}
    assert answer["stop_reason"] == "max_tokens"


def test_arguments_that_are_no_object_are_kept(served: RunningRouter, tokenizer: Tokenizer) -> None:
    says(served, tokenizer, '<tool_call>\n{"name": "weather", "arguments": {"city": nowhere}}\n</tool_call>')
    (call,) = whole(served, tools=[TOOL])["content"]
    assert call["input"] == {"INVALID_JSON": '{"city": nowhere}'}


def test_it_says_why_it_ended(served: RunningRouter, tokenizer: Tokenizer) -> None:
    def reason(**fields: Any) -> tuple[str, str | None]:
        answer = whole(served, **fields)
        streamed = built(events(served, **fields))
        told = (answer["stop_reason"], answer["stop_sequence"])
        assert told == (streamed["stop_reason"], streamed["stop_sequence"])
        return told

    assert reason() == ("end_turn", None)
    assert reason(stop_sequences=["zebra", "fo"]) == ("stop_sequence", "fo")
    says(served, tokenizer, "the fox" * 20, end=False)
    assert reason(max_tokens=4) == ("max_tokens", None)


def test_more_output_than_the_context_leaves_is_cut_where_it_ends(served: RunningRouter) -> None:
    served.workers.script = Script(endless=True)
    answer = whole(served, max_tokens=10 * CONTEXT_LEN)
    assert answer["stop_reason"] == "model_context_window_exceeded"
    usage = answer["usage"]
    assert usage["input_tokens"] + usage["output_tokens"] == CONTEXT_LEN
    prompt_len = len(served.workers.prefills[-1].token_ids)
    assert whole(served, max_tokens=CONTEXT_LEN - prompt_len)["stop_reason"] == "max_tokens"


def test_usage_tells_cached_tokens_apart(served: RunningRouter) -> None:
    answer = whole(served)
    prompt_len = len(served.workers.prefills[-1].token_ids)
    assert answer["usage"]["cache_read_input_tokens"] == 0
    assert answer["usage"]["input_tokens"] == prompt_len
    served.workers.cached_tokens = 5
    try:
        answer, found = whole(served), events(served)
    finally:
        served.workers.cached_tokens = 0
    assert answer["usage"]["cache_read_input_tokens"] == 5
    assert answer["usage"]["input_tokens"] == prompt_len - 5
    assert found[0]["message"]["usage"]["input_tokens"] == prompt_len
    assert built(found)["usage"] == answer["usage"]


def test_an_answer_follows_a_schema(served: RunningRouter, tokenizer: Tokenizer) -> None:
    says(served, tokenizer, "{}")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
    asked = {"type": "json_schema", "schema": schema}
    for fields in ({"output_config": {"format": asked}}, {"output_format": asked}):
        assert whole(served, **fields)["content"][0]["text"] == "{}"
        grammar = served.workers.prefills[-1].params.grammar
        assert grammar is not None
        assert '"a"' in grammar.text


def test_a_stream_that_is_interrupted_says_so(folder: Path, tokenizer: Tokenizer) -> None:
    output = tokenizer.encode("the fox", add_special_tokens=False)
    with RunningRouter(folder, limits=LIMITS, worker_return_seconds=0.1) as router:
        router.workers.script = Script(output=lambda _: output, stalled=True)
        asked = body(stream=True)
        with httpx2.stream("POST", f"{router.url}/v1/messages", json=asked, timeout=20) as answer:
            lines = answer.iter_lines()
            assert next(lines) == "event: message_start"
            router.call(router.workers.lose_decode)
            rest = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert rest[-1]["type"] == "error"
    assert rest[-1]["error"]["type"] == "overloaded_error"


def test_a_silent_stream_pings(folder: Path, tokenizer: Tokenizer) -> None:
    output = tokenizer.encode("the fox", add_special_tokens=False)
    with RunningRouter(folder, limits=LIMITS, keepalive_seconds=0.05) as router:
        router.workers.script = Script(output=lambda _: output, stalled=True)
        asked = body(stream=True)
        with httpx2.stream("POST", f"{router.url}/v1/messages", json=asked, timeout=20) as answer:
            pings = (line for line in answer.iter_lines() if line == "event: ping")
            assert [next(pings), next(pings), next(pings)] == ["event: ping"] * 3, "one of them opened it"


def test_a_client_that_hangs_up_ends_its_request(served: RunningRouter, tokenizer: Tokenizer) -> None:
    output = tokenizer.encode("the fox", add_special_tokens=False)
    served.workers.script = Script(output=lambda _: output, stalled=True)
    asked = body(stream=True)
    before = len(served.workers.cancelled)
    with httpx2.stream("POST", f"{served.url}/v1/messages", json=asked, timeout=20) as answer:
        next(answer.iter_lines())
    until(lambda: len(served.workers.cancelled) > before, 10, "cancelled")


def test_a_stream_that_is_to_be_resumed_is_refused(served: RunningRouter) -> None:
    headers = HEADERS | {"x-segue-resumable": "true"}
    answer = httpx2.post(f"{served.url}/v1/messages", json=body(stream=True), headers=headers, timeout=20)
    assert answer.status_code == 400
    assert "X-Segue-Resumable" in answer.json()["error"]["message"]


def test_an_idempotency_key_makes_the_seed(served: RunningRouter) -> None:
    headers = HEADERS | {"idempotency-key": "one"}
    seeds = set()
    for _ in range(2):
        httpx2.post(f"{served.url}/v1/messages", json=body(), headers=headers, timeout=20)
        seeds.add(served.workers.prefills[-1].params.seed)
    assert len(seeds) == 1
    answer = httpx2.post(f"{served.url}/v1/messages", json=body(top_k=2), headers=headers, timeout=20)
    assert (answer.status_code, answer.json()["error"]["type"]) == (422, "invalid_request_error")


def test_models_have_the_fields_of_both_apis(served: RunningRouter) -> None:
    listed = httpx2.get(f"{served.url}/v1/models").json()
    (model,) = listed["data"]
    assert (listed["object"], listed["has_more"], listed["last_id"]) == ("list", False, MODEL)
    assert (model["object"], model["type"], model["display_name"]) == ("model", "model", MODEL)
    assert model["max_input_tokens"] == CONTEXT_LEN
    assert httpx2.get(f"{served.url}/v1/models/{MODEL}").json() == model
    missing = httpx2.get(f"{served.url}/v1/models/other", headers=HEADERS)
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")


def test_errors_have_anthropics_types(served: RunningRouter) -> None:
    assert refusal(served, 404, model="other")["type"] == "not_found_error"
    assert refusal(served, 404, path="/v1/messages/batches")["type"] == "not_found_error"
    assert "1024" in refusal(served, stop_sequences=["x" * 2000])["message"]
    long = [{"role": "user", "content": "x🙂" * CONTEXT_LEN}]
    error = refusal(served, messages=long)
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith("prompt is too long")
    wrong = httpx2.get(f"{served.url}/v1/messages")
    assert (wrong.status_code, wrong.json()["type"]) == (405, "error")
    assert post(served).headers["request-id"]
