"""Answers of /v1/messages, whole and as events: blocks, reasons, usage, trouble on the way."""

from __future__ import annotations

import json
from typing import Any

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
    stable,
    whole,
)
from tests.unit.router.openai.tools.agents import CALL, CONTEXT_LEN
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
def test_a_stream_is_the_answer_that_is_not_streamed(router: RunningRouter, text: str, row: int) -> None:
    router.says(text, row=row)
    thinking = THINKS if "</think>" in text else None
    answer = whole(router, tools=[TOOL], thinking=thinking)
    assert stable(built(events(router, tools=[TOOL], thinking=thinking))) == stable(answer)


def test_thoughts_text_and_calls_are_blocks(router: RunningRouter) -> None:
    router.says(TEXTS["thoughts and calls"])
    answer = whole(router, tools=[TOOL], thinking=THINKS)
    thinking, text, *calls = answer["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "So.")
    assert thinking["signature"]
    assert text == {"type": "text", "text": "I look:"}
    assert [call["input"] for call in calls] == [{"city": "Paris"}, {"city": "Zürich 🙂"}]
    assert {call["name"] for call in calls} == {"weather"}
    assert len({call["id"] for call in calls}) == 2
    assert answer["stop_reason"] == "tool_use"


@pytest.mark.parametrize("asked", [None, {"type": "disabled"}, {"type": "adaptive", "display": "omitted"}])
def test_thoughts_that_were_not_asked_for_are_no_block(router: RunningRouter, asked: Any) -> None:
    router.says(f"<think>\n{TEXTS['thoughts']}")
    answer = whole(router, thinking=asked)
    assert answer["content"] == [{"type": "text", "text": "the fox"}]
    assert built(events(router, thinking=asked))["content"] == answer["content"]
    begins = router.prompt.endswith("<think>\n")
    assert begins == (asked is not None and asked["type"] == "adaptive")


def test_text_behind_a_call_is_a_block_of_its_own_in_a_stream(router: RunningRouter) -> None:
    router.says(f"I look:\n{CALL}\nDone.")
    kinds = [block["type"] for block in built(events(router, tools=[TOOL]))["content"]]
    assert kinds == ["text", "tool_use", "text"]
    texts = [block["text"] for block in whole(router, tools=[TOOL])["content"] if block["type"] == "text"]
    assert len(texts) == 1
    assert texts[0].startswith("I look:")
    assert texts[0].endswith("Done.")


def test_an_input_that_was_cut_is_what_came_of_it(router: RunningRouter, tokenizer: Tokenizer) -> None:
    router.says(CALL[: CALL.index("Paris") + 3], end=False)
    tokens = len(tokenizer.encode(CALL[: CALL.index("Paris") + 3], False))
    answer = whole(router, tools=[TOOL], max_tokens=tokens)
    assert answer["content"][0]["input"] == {}
    assert answer["stop_reason"] == "max_tokens"


def test_arguments_that_are_no_object_are_kept(router: RunningRouter) -> None:
    router.says('<tool_call>\n{"name": "weather", "arguments": {"city": nowhere}}\n</tool_call>')
    (call,) = whole(router, tools=[TOOL])["content"]
    assert call["input"] == {"INVALID_JSON": '{"city": nowhere}'}


def test_it_says_why_it_ended(router: RunningRouter) -> None:
    def reason(**fields: Any) -> tuple[str, str | None]:
        answer = whole(router, **fields)
        streamed = built(events(router, **fields))
        told = (answer["stop_reason"], answer["stop_sequence"])
        assert told == (streamed["stop_reason"], streamed["stop_sequence"])
        return told

    assert reason() == ("end_turn", None)
    assert reason(stop_sequences=["zebra", "fo"]) == ("stop_sequence", "fo")
    router.says("the fox" * 20, end=False)
    assert reason(max_tokens=4) == ("max_tokens", None)


def test_more_output_than_the_context_leaves_is_cut_where_it_ends(router: RunningRouter) -> None:
    router.workers.script = Script(endless=True)
    answer = whole(router, max_tokens=10 * CONTEXT_LEN)
    assert answer["stop_reason"] == "model_context_window_exceeded"
    usage = answer["usage"]
    assert usage["input_tokens"] + usage["output_tokens"] == CONTEXT_LEN
    prompt_len = len(router.last_prefill.token_ids)
    assert whole(router, max_tokens=CONTEXT_LEN - prompt_len)["stop_reason"] == "max_tokens"


def test_usage_tells_cached_tokens_apart(router: RunningRouter) -> None:
    answer = whole(router)
    prompt_len = len(router.last_prefill.token_ids)
    assert answer["usage"]["cache_read_input_tokens"] == 0
    assert answer["usage"]["input_tokens"] == prompt_len
    router.workers.cached_tokens = 5
    try:
        answer, found = whole(router), events(router)
    finally:
        router.workers.cached_tokens = 0
    assert answer["usage"]["cache_read_input_tokens"] == 5
    assert answer["usage"]["input_tokens"] == prompt_len - 5
    assert found[0]["message"]["usage"]["input_tokens"] == prompt_len
    assert built(found)["usage"] == answer["usage"]


def test_an_answer_follows_a_schema(router: RunningRouter) -> None:
    router.says("{}")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
    asked = {"type": "json_schema", "schema": schema}
    for fields in ({"output_config": {"format": asked}}, {"output_format": asked}):
        assert whole(router, **fields)["content"][0]["text"] == "{}"
        grammar = router.last_prefill.params.grammar
        assert grammar is not None
        assert '"a"' in grammar.text


def test_a_stream_that_is_interrupted_says_so(router: RunningRouter) -> None:
    output = router.tokenizer.encode("the fox", add_special_tokens=False)
    with RunningRouter(router.folder, limits=router.workers.limits, worker_return_seconds=0.1) as own:
        own.workers.script = Script(output=lambda _: output, stalled=True)
        asked = body(stream=True)
        with own.http.stream("POST", "/v1/messages", json=asked) as answer:
            lines = answer.iter_lines()
            assert next(lines) == "event: message_start"
            own.call(own.workers.lose_decode)
            rest = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert rest[-1]["type"] == "error"
    assert rest[-1]["error"]["type"] == "overloaded_error"


def test_a_silent_stream_pings(router: RunningRouter) -> None:
    output = router.tokenizer.encode("the fox", add_special_tokens=False)
    with RunningRouter(router.folder, limits=router.workers.limits, keepalive_seconds=0.05) as own:
        own.workers.script = Script(output=lambda _: output, stalled=True)
        asked = body(stream=True)
        with own.http.stream("POST", "/v1/messages", json=asked) as answer:
            pings = (line for line in answer.iter_lines() if line == "event: ping")
            assert [next(pings), next(pings), next(pings)] == ["event: ping"] * 3, "one of them opened it"


def test_a_client_that_hangs_up_ends_its_request(router: RunningRouter) -> None:
    output = router.tokenizer.encode("the fox", add_special_tokens=False)
    router.workers.script = Script(output=lambda _: output, stalled=True)
    asked = body(stream=True)
    before = len(router.workers.cancelled)
    with router.http.stream("POST", "/v1/messages", json=asked) as answer:
        next(answer.iter_lines())
    until(lambda: len(router.workers.cancelled) > before, 10, "cancelled")


def test_a_stream_that_is_to_be_resumed_is_refused(router: RunningRouter) -> None:
    headers = HEADERS | {"x-segue-resumable": "true"}
    answer = router.http.post("/v1/messages", json=body(stream=True), headers=headers)
    assert answer.status_code == 400
    assert "X-Segue-Resumable" in answer.json()["error"]["message"]


def test_an_idempotency_key_makes_the_seed(router: RunningRouter) -> None:
    headers = HEADERS | {"idempotency-key": "one"}
    seeds = set()
    for _ in range(2):
        router.http.post("/v1/messages", json=body(), headers=headers)
        seeds.add(router.last_prefill.params.seed)
    assert len(seeds) == 1
    answer = router.http.post("/v1/messages", json=body(top_k=2), headers=headers)
    assert (answer.status_code, answer.json()["error"]["type"]) == (422, "invalid_request_error")


def test_models_have_the_fields_of_both_apis(router: RunningRouter) -> None:
    listed = router.http.get("/v1/models").json()
    (model,) = listed["data"]
    assert (listed["object"], listed["has_more"], listed["last_id"]) == ("list", False, MODEL)
    assert (model["object"], model["type"], model["display_name"]) == ("model", "model", MODEL)
    assert model["max_input_tokens"] == CONTEXT_LEN
    assert router.http.get(f"/v1/models/{MODEL}").json() == model
    missing = router.http.get("/v1/models/other", headers=HEADERS)
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")


def test_errors_have_anthropics_types(router: RunningRouter) -> None:
    assert refusal(router, 404, model="other")["type"] == "not_found_error"
    assert refusal(router, 404, path="/v1/messages/batches")["type"] == "not_found_error"
    assert "1024" in refusal(router, stop_sequences=["x" * 2000])["message"]
    long = [{"role": "user", "content": "x🙂" * CONTEXT_LEN}]
    error = refusal(router, messages=long)
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith("prompt is too long")
    wrong = router.http.get("/v1/messages")
    assert (wrong.status_code, wrong.json()["type"]) == (405, "error")
    assert post(router).headers["request-id"]
