"""How many tokens of an answer are thoughts, as clients are told: whole and streamed, whatever tokens come together."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

from router.text.tokenizer import Tokenizer
from tests.unit.router.openai.tools.test_tools_over_http import (
    CALL,
    CONTEXT_LEN,
    LIMITS,
    TEMPLATE,
    WEATHER,
    says,
)
from tests.unit.router.scripted_workers import MODEL, RunningRouter
from tests.unit.router.tiny_model import write_folder

OPEN, CLOSE = "<think>", "</think>"
TEXTS = {
    "thoughts before the answer": "<think>\nWhat is <b>? The quick brown fox.\n</think>\n\nthe lazy dog",
    "thoughts that begin in the prompt": "So the fox, </b> or not.\n</think>\n\nthe lazy dog",
    "thoughts that are cut off": "<think>The quick brown </thi",
    "thoughts, and a call": f"<think>quick</think>{CALL}",
    "none": "the quick brown fox",
}


@dataclass
class Served:
    """A router, and how its model writes the marks of thoughts."""

    router: RunningRouter
    tokenizer: Tokenizer


@pytest.fixture(scope="module", params=[(), (OPEN, CLOSE)], ids=["marks of many tokens", "marks are tokens"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder: Path = tmp_path_factory.mktemp("thoughts")
    write_folder(folder, chat_template=TEMPLATE, context_len=CONTEXT_LEN, marks=request.param)
    with RunningRouter(folder, limits=LIMITS) as running:
        yield Served(running, Tokenizer(folder, template_seconds_max=5))


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


def usage_of(served: Served, path: str, **body: Any) -> dict[str, Any]:
    answer = httpx2.post(f"{served.router.url}/v1/{path}", json={"model": MODEL, **body}, timeout=20)
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        return dict(answer.json()["usage"])
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    last = json.loads(events[-1])
    return dict(last["response"]["usage"] if "response" in last else last["usage"])


@pytest.mark.parametrize("row", [1, 3, 1000], ids="{} tokens a message".format)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_the_usage_of_a_chat_has_its_thoughts(served: Served, text: str, stream: bool, row: int) -> None:
    says(served.router, served.tokenizer, text, end=not text.endswith("</thi"), row=row)
    begun = text.startswith("So")
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "fox"}], "tools": [WEATHER]}
    asked |= {
        "max_tokens": len(served.tokenizer.encode(text, add_special_tokens=False)) + (text[-4:] != "/thi")
    }
    asked |= {"stream": stream, "enable_thinking": begun} | ({"n": 2} if row == 3 else {})
    asked |= {"stream_options": {"include_usage": True}} if stream else {}
    told = usage_of(served, "chat/completions", **asked)["completion_tokens_details"]["reasoning_tokens"]
    assert told == thought_tokens(served.tokenizer, text, begun=begun) * asked.get("n", 1)
    assert bool(told) == (text != TEXTS["none"])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_the_usage_of_a_response_has_its_thoughts(served: Served, stream: bool) -> None:
    text = TEXTS["thoughts before the answer"]
    says(served.router, served.tokenizer, text)
    told = usage_of(served, "responses", input="fox", stream=stream)["output_tokens_details"]
    assert told == {"reasoning_tokens": thought_tokens(served.tokenizer, text, begun=False)}
    assert told["reasoning_tokens"] > 5


@pytest.mark.parametrize(
    ("field", "counted"),
    [("include_reasoning", True), ("separate_reasoning", False)],
    ids=["hidden", "in content"],
)
def test_thoughts_that_are_not_shown_count_and_those_that_are_content_do_not(
    served: Served, field: str, counted: bool
) -> None:
    text = TEXTS["thoughts before the answer"]
    says(served.router, served.tokenizer, text)
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "fox"}], field: False}
    told = usage_of(served, "chat/completions", **asked)["completion_tokens_details"]["reasoning_tokens"]
    assert told == (thought_tokens(served.tokenizer, text, begun=False) if counted else 0)
