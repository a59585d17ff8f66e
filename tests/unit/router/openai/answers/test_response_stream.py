"""How long the writer of a stream waits for the next piece."""

from __future__ import annotations

import asyncio
import gc
import weakref

from router.openai.answers.response_stream import PIECE_BYTES, ResponseStream, TextDelta

SILENCE = 0.05
PIECES = 3


def stream() -> ResponseStream:
    return ResponseStream(1, 1 << 20, lambda: None)


async def seconds_of_silence(answer: ResponseStream) -> float:
    loop = asyncio.get_running_loop()
    began = loop.time()
    assert await answer.take(SILENCE) == []
    return loop.time() - began


def test_each_wait_is_as_long_as_it_was_asked_for_whatever_came_before() -> None:
    async def listen() -> None:
        answer = stream()
        for number in range(PIECES):
            asyncio.get_running_loop().call_later(SILENCE * 0.7, answer.put, TextDelta(0, str(number)))
            (piece,) = await answer.take(SILENCE * 20)
            assert piece.text == str(number)
            answer.written([piece])
            assert await seconds_of_silence(answer) >= SILENCE * 0.99
        answer.close()

    asyncio.run(listen())


def test_a_writer_that_was_away_when_the_alarm_rang_is_not_told_of_silence() -> None:
    async def listen() -> None:
        answer = stream()
        asyncio.get_running_loop().call_soon(answer.put, TextDelta(0, "a"))
        pieces = await answer.take(SILENCE)  # sets the alarm
        away = asyncio.Event()
        asyncio.get_running_loop().call_later(2 * SILENCE, away.set)
        await away.wait()  # its write blocks, and meanwhile the alarm rings
        answer.written(pieces)
        assert await seconds_of_silence(answer) >= SILENCE * 0.99
        answer.close()

    asyncio.run(listen())


def test_a_stream_that_is_over_is_not_kept_by_its_alarm() -> None:
    async def listen() -> None:
        answer = stream()
        asyncio.get_running_loop().call_soon(answer.put, TextDelta(0, "a"))
        await answer.take(1000.0)
        answer.close()
        known = weakref.ref(answer)
        del answer
        await asyncio.sleep(0)
        gc.collect()
        assert known() is None

    asyncio.run(listen())


def _taken_by(answer: ResponseStream) -> list[TextDelta]:
    """What the writer takes, whose write then does not return."""
    return asyncio.run(answer.take(None))


def test_echoes_that_come_while_one_is_written_cut_no_answer() -> None:
    """Those of many choices come one after the other, faster than any client reads."""
    answer, ends = ResponseStream(64, 1 << 20, lambda: None), []
    for index in range(64):
        answer.put(TextDelta(index, "a" * 30_000, echo=True))
        if not index:
            ends += _taken_by(answer)
    assert answer.backlog_bytes > 4 << 20
    assert not answer.cut
    answer.written(ends)
    answer.written(_taken_by(answer))
    assert answer.backlog_bytes == 0


def test_echoes_read_or_unread_leave_the_bound_of_what_a_model_writes() -> None:
    answer = ResponseStream(2, 1 << 20, lambda: None)
    answer.put(TextDelta(0, "a" * 300_000, echo=True))
    answer.written(_taken_by(answer))
    answer.put(TextDelta(0, "a" * 300_000, echo=True))
    _taken_by(answer)
    size = 0
    while not answer.cut:
        assert size <= 1 << 20
        answer.put(TextDelta(1, "b" * 1000))
        size += 4 * 1000 + PIECE_BYTES
    assert size > 1 << 20
