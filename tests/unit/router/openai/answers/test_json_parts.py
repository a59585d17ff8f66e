"""JSON in parts is the JSON of the whole, and is sent in portions between which others have their turn."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message

from router.openai.answers.json_parts import (
    PORTION_BYTES,
    PORTION_SECONDS,
    KeptTexts,
    Parts,
    PartsWriter,
    list_parts,
    object_parts,
)
from tests.fuzzing import fuzzed

PLAIN = st.none() | st.integers(-9, 9) | st.text(max_size=3)
VALUES: st.SearchStrategy[Any] = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", min_size=1), inner, max_size=3)
)  # fmt: skip


def in_parts(value: Any, draw: Iterator[bool]) -> Any:
    """The same with some of its objects and lists as parts."""
    if not isinstance(value, dict | list) or not next(draw):
        return value
    if isinstance(value, dict):
        return object_parts({name: in_parts(each, draw) for name, each in value.items()})
    return list_parts(in_parts(each, draw) for each in value)


@fuzzed
@given(VALUES, st.lists(st.booleans(), min_size=1, max_size=20))
def test_parts_join_to_the_json_of_the_whole(value: Any, choices: list[bool]) -> None:
    draw = iter(choices * 50)
    made = list_parts([in_parts(value, draw), 1])
    assert json.loads(b"".join(made)) == [value, 1]


def test_texts_that_are_kept_are_made_once() -> None:
    made = []

    def texts() -> Iterator[bytes]:
        for number in range(3):
            made.append(number)
            yield b"%d" % number

    kept = KeptTexts(texts())
    assert [b"".join(kept) for _ in range(3)] == [b"012"] * 3
    assert made == [0, 1, 2]


async def sent(parts: Parts, gone: asyncio.Future[None], writer: PartsWriter) -> list[Message]:
    messages: list[Message] = []

    async def send(message: Message) -> None:
        messages.append(message)

    await writer.send(send, gone, parts)
    return messages


def test_a_small_answer_is_one_message() -> None:
    async def scenario() -> None:
        nobody = asyncio.get_running_loop().create_future()
        messages = await sent(object_parts({"a": list_parts([1])}), nobody, PartsWriter())
        assert [message["type"] for message in messages] == ["http.response.start", "http.response.body"]
        assert messages[1]["body"] == b'{"a":[1]}'
        assert "more_body" not in messages[1]

    asyncio.run(scenario())


def test_others_have_their_turn_between_portions_and_no_portion_is_large() -> None:
    async def scenario() -> None:
        turns = 0

        def texts() -> Iterator[bytes]:
            for _ in range(50):
                yield b"x" * PORTION_BYTES

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        nobody = asyncio.get_running_loop().create_future()
        messages = await sent(Parts(texts()), nobody, PartsWriter())
        task.cancel()
        assert turns >= 49
        assert max(len(message.get("body", b"")) for message in messages) == PORTION_BYTES
        assert sum(len(message.get("body", b"")) for message in messages) == 50 * PORTION_BYTES

    asyncio.run(scenario())


def test_a_portion_ends_when_it_has_taken_its_time_and_answers_take_turns() -> None:
    async def scenario() -> None:
        order: list[str] = []

        def slow(name: str) -> Iterator[bytes]:
            for _ in range(4):
                order.append(name)
                until = time.monotonic() + PORTION_SECONDS
                while time.monotonic() < until:
                    pass
                yield b"x"

        nobody, writer = asyncio.get_running_loop().create_future(), PartsWriter()
        both = [sent(Parts(slow(name)), nobody, writer) for name in "ab"]
        for messages in await asyncio.gather(*both):
            assert b"".join(message.get("body", b"") for message in messages) == b"xxxx"
            assert len(messages) >= 5
        assert "aaa" not in "".join(order)
        assert "bbb" not in "".join(order)

    asyncio.run(scenario())


def test_nothing_more_is_made_for_a_client_that_has_gone() -> None:
    async def scenario() -> None:
        gone = asyncio.get_running_loop().create_future()
        made = 0

        def texts() -> Iterator[bytes]:
            nonlocal made
            while True:
                made += 1
                if made == 3:
                    gone.set_result(None)
                yield b"x" * PORTION_BYTES

        await asyncio.wait_for(sent(Parts(texts()), gone, PartsWriter()), 10)
        assert made <= 4

    asyncio.run(scenario())
