"""How many tokens of an answer are thoughts, as clients are told: whole and streamed, whatever tokens come together."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.text.tokenizer import Tokenizer
from tests.unit.router.openai.tools.agents import CALL, CITY_TEMPLATE, CONTEXT_LEN, WEATHER
from tests.unit.router.scripted_workers import MODEL, RunningRouter
from tests.unit.router.tiny_model import TinyModel

OPEN, CLOSE = "<think>", "</think>"
TEXTS = {
    "thoughts before the answer": "<think>\nWhat is <b>? The quick brown fox.\n</think>\n\nthe lazy dog",
    "thoughts that begin in the prompt": "So the fox, </b> or not.\n</think>\n\nthe lazy dog",
    "thoughts that are cut off": "<think>The quick brown </thi",
    "thoughts, and a call": f"<think>quick</think>{CALL}",
    "none": "the quick brown fox",
}


@pytest.fixture(params=[(), (OPEN, CLOSE)], ids=["marks of many tokens", "marks are tokens"])
def model(request: pytest.FixtureRequest) -> TinyModel:
    return TinyModel(CITY_TEMPLATE, CONTEXT_LEN, marks=request.param)


def thought_tokens(tokenizer: Tokenizer, text: str, *, begun: bool) -> int:
    """Tokens with a character between the marks; the text is ASCII, so each token has its own characters."""
    begin = 0 if begun else text.find(OPEN) + len(OPEN) if OPEN in text else len(text)
    end = text.find(CLOSE) if CLOSE in text else len(text)
    count = at = 0
    for token_id in tokenizer.encode(text, add_special_tokens=False):
        length = len(tokenizer.decode_all([token_id]))
        count += at < end and at + length > begin
        at += length
    assert at == len(text)
    return count


def usage_of(router: RunningRouter, path: str, **body: Any) -> dict[str, Any]:
    answer = router.http.post(f"/v1/{path}", json={"model": MODEL, **body})
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        return dict(answer.json()["usage"])
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    last = json.loads(events[-1])
    return dict(last["response"]["usage"] if "response" in last else last["usage"])


@pytest.mark.parametrize("row", [1, 3, 1000], ids="{} tokens a message".format)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_the_usage_of_a_chat_has_its_thoughts(
    router: RunningRouter, text: str, stream: bool, row: int
) -> None:
    router.says(text, end=not text.endswith("</thi"), row=row)
    begun = text.startswith("So")
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "fox"}], "tools": [WEATHER]}
    asked |= {
        "max_tokens": len(router.tokenizer.encode(text, add_special_tokens=False)) + (text[-4:] != "/thi")
    }
    asked |= {"stream": stream, "enable_thinking": begun} | ({"n": 2} if row == 3 else {})
    asked |= {"stream_options": {"include_usage": True}} if stream else {}
    told = usage_of(router, "chat/completions", **asked)["completion_tokens_details"]["reasoning_tokens"]
    assert told == thought_tokens(router.tokenizer, text, begun=begun) * asked.get("n", 1)
    assert bool(told) == (text != TEXTS["none"])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_the_usage_of_a_response_has_its_thoughts(router: RunningRouter, stream: bool) -> None:
    text = TEXTS["thoughts before the answer"]
    router.says(text)
    told = usage_of(router, "responses", input="fox", stream=stream)["output_tokens_details"]
    assert told == {"reasoning_tokens": thought_tokens(router.tokenizer, text, begun=False)}
    assert told["reasoning_tokens"] > 5


@pytest.mark.parametrize(
    ("field", "counted"),
    [("include_reasoning", True), ("separate_reasoning", False)],
    ids=["hidden", "in content"],
)
def test_thoughts_that_are_not_shown_count_and_those_that_are_content_do_not(
    router: RunningRouter, field: str, counted: bool
) -> None:
    text = TEXTS["thoughts before the answer"]
    router.says(text)
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "fox"}], field: False}
    told = usage_of(router, "chat/completions", **asked)["completion_tokens_details"]["reasoning_tokens"]
    assert told == (thought_tokens(router.tokenizer, text, begun=False) if counted else 0)
