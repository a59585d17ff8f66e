"""Requests to /v1/messages as Anthropic's clients send them, and events, checked for the order that they rely on."""

from __future__ import annotations

import json
from typing import Any

import httpx2

from tests.unit.router.scripted_workers import MODEL, RunningRouter

HEADERS = {"anthropic-version": "2023-06-01", "x-api-key": "none"}
TOOL: Any = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
THINKS = {"type": "enabled", "budget_tokens": 1024}
QUESTION = {"role": "user", "content": "How is it in Paris?"}


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 400, "messages": [QUESTION]} | fields


def text(words: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": words} | fields


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def post(router: RunningRouter, path: str = "/v1/messages", **fields: Any) -> httpx2.Response:
    return router.http.post(path, json=body(**fields), headers=HEADERS)


def whole(router: RunningRouter, **fields: Any) -> dict[str, Any]:
    answer = post(router, **fields)
    assert answer.status_code == 200, answer.text
    message = dict(answer.json())
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", MODEL)
    assert message["id"].startswith("msg_")
    return message


def refusal(router: RunningRouter, status: int = 400, **fields: Any) -> dict[str, Any]:
    answer = post(router, **fields)
    assert answer.status_code == status, answer.text
    told = answer.json()
    assert set(told) == {"type", "error", "request_id"}
    assert told["type"] == "error"
    assert told["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]
    assert set(told["error"]) == {"type", "message"}
    return dict(told["error"])


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream, each named by its type."""
    found = []
    for block in text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def events(router: RunningRouter, **fields: Any) -> list[dict[str, Any]]:
    answer = post(router, stream=True, **fields)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return events_of(answer.text)


def built(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The message as a client builds it; asserts that one block is open at a time, and that all are closed."""
    assert [event["type"] for event in found[:2]] == ["message_start", "ping"]
    assert [event["type"] for event in found[-2:]] == ["message_delta", "message_stop"]
    message: dict[str, Any] = dict(found[0]["message"])
    inputs, is_open = "", False
    for event in found[2:-2]:
        if event["type"] == "content_block_start":
            assert not is_open
            assert event["index"] == len(message["content"])
            message["content"].append(dict(event["content_block"]))
            inputs, is_open = "", True
            continue
        assert is_open
        assert event["index"] == len(message["content"]) - 1
        block = message["content"][-1]
        if event["type"] == "content_block_stop":
            is_open = False
            if block["type"] == "tool_use":
                block["input"] = json.loads(inputs or "{}")
            continue
        match event["delta"]:
            case {"type": "text_delta", "text": text} if block["type"] == "text":
                block["text"] += text
            case {"type": "thinking_delta", "thinking": text} if block["type"] == "thinking":
                block["thinking"] += text
            case {"type": "signature_delta", "signature": text} if block["type"] == "thinking":
                block["signature"] += text
            case {"type": "input_json_delta", "partial_json": text} if block["type"] == "tool_use":
                inputs += text
            case other:
                raise AssertionError(f"{other} in {block['type']}")
    assert not is_open
    ended = found[-2]
    return {**message, **ended["delta"], "usage": message["usage"] | ended["usage"]}


def stable(message: dict[str, Any]) -> dict[str, Any]:
    """Without what differs between two answers to one request."""
    content = [
        {name: value for name, value in block.items() if name not in ("id", "signature")}
        for block in message["content"]
    ]
    return {name: value for name, value in message.items() if name != "id"} | {"content": content}
