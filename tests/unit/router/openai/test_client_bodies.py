"""What well-known clients send by default is served, and what of it is passed over is named: `tests/clients/bodies`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.router.openai.tools.agents import TEMPLATE
from tests.unit.router.scripted_workers import FEATURES, MODEL, RunningRouter
from tests.unit.router.tiny_model import TinyModel

SWITCH = (
    "{% if add_generation_prompt and enable_thinking %}<think>\n{% endif %}"  # as Qwen's template has one
)
CONTEXT_LEN = 64_000  # Claude Code leaves 32,000 tokens for an answer
FOLDER = Path(__file__).parents[3] / "clients" / "bodies"
BODIES: dict[str, dict[str, Any]] = {
    file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted(FOLDER.glob("*.json"))
}
KEYS = ["client", "version", "source", "path", "ignored", "body"]
ENDS = {  # the last line of a stream that came to its end
    "/v1/chat/completions": "data: [DONE]",
    "/v1/completions": "data: [DONE]",
    "/v1/responses": 'data: {"type":"response.completed"',
    "/v1/messages": 'data: {"type":"message_stop"}',
}


@pytest.fixture
def model() -> TinyModel:
    return TinyModel(TEMPLATE + SWITCH, CONTEXT_LEN, (*FEATURES, "grammar"))


@pytest.mark.parametrize("name", BODIES)
def test_what_a_client_sends_by_default_is_served(router: RunningRouter, name: str) -> None:
    said = BODIES[name]
    router.says("the fox")
    answer = router.http.post(said["path"], json=said["body"])
    assert answer.status_code == 200, answer.text
    assert answer.headers.get("x-segue-ignored", "") == said["ignored"]
    if said["body"].get("stream"):
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.text.rstrip().rpartition("\n")[2].startswith(ENDS[said["path"].partition("?")[0]])
    else:
        assert answer.json().get("error") is None


@pytest.mark.parametrize("name", BODIES)
def test_a_body_says_whose_it_is(name: str) -> None:
    said = BODIES[name]
    assert list(said) == KEYS
    assert all(isinstance(said[key], str) for key in KEYS[:-1])
    assert said["client"]
    assert said["version"]
    assert said["source"]
    assert said["body"]["model"] == MODEL


def test_there_are_bodies() -> None:
    assert len({said["client"].partition(",")[0] for said in BODIES.values()}) >= 30
