"""What messages that become one message cost, however many they are."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from router.openai.fields.ignored import Ignored
from router.openai.messages.blocks import NULL
from router.openai.messages.history import read_history
from router.openai.prompts.chat_messages import without_late_system
from router.openai.responses.fields import chat_messages
from router.text.chat_template import Message

Json = dict[str, Any]

ASTRAL = "\N{GRINNING FACE}"  # a text with one in it takes four bytes for each character
WORDS = "twenty letters, and "


def of_messages(message: Json) -> Callable[[int], Callable[[], list[Any]]]:
    """Reads a Messages request that has one message `count` times."""

    def given(count: int) -> Callable[[], list[Any]]:
        raw = msgspec.Raw(msgspec.json.encode([message] * count))
        return lambda: read_history(raw, NULL, 131_072, Ignored()).messages

    return given


def block(kind: str, **fields: Any) -> Callable[[int], Callable[[], list[Any]]]:
    return of_messages({"role": "assistant", "content": [{"type": kind, **fields}]})


def late_system(count: int) -> Callable[[], list[Any]]:
    late = {"role": "system", "content": WORDS + ASTRAL}
    chat: list[Message] = [{"role": "user", "content": ASTRAL}, *[late] * count]
    return lambda: without_late_system(chat)


def responses(**fields: Any) -> Callable[[int], Callable[[], list[Any]]]:
    def given(count: int) -> Callable[[], list[Any]]:
        raw = msgspec.Raw(msgspec.json.encode([fields] * count))
        return lambda: chat_messages(raw, None, 131_072, Ignored())

    return given


WAYS = {
    "texts of a user": (10_000, of_messages({"role": "user", "content": WORDS + ASTRAL})),
    "texts of an assistant": (10_000, block("text", text=WORDS + ASTRAL)),
    "thoughts": (10_000, block("thinking", thinking=WORDS + ASTRAL)),
    "calls": (20_000, block("tool_use", id="a", name=ASTRAL, input={})),
    "late system messages": (10_000, late_system),
    "calls of responses": (
        20_000,
        responses(type="function_call", call_id="a", name=ASTRAL, arguments="{}"),
    ),
}


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Keep Python's collector away: what it costs grows in steps."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize(("count", "way"), WAYS.values(), ids=WAYS)
def test_four_times_as_many_messages_do_not_cost_eight_times_as_much(
    count: int, way: Callable[[int], Callable[[], list[Any]]]
) -> None:
    """What grows with the square of their number costs sixteen times as much."""

    def seconds(work: Callable[[], list[Any]]) -> float:
        began = time.thread_time()
        assert len(work()) == 1, "they become one message"
        return time.thread_time() - began

    few, many = way(count // 2), way(2 * count)
    assert min(seconds(many) for _ in range(3)) <= 8 * min(seconds(few) for _ in range(3))
