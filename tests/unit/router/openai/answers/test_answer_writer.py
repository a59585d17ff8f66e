"""When the client of a stream gets a comment: after silence, whatever comes meanwhile that it does not get."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest

from router.access.byte_budget import ByteBudget
from router.config import RouterConfig
from router.core.effects import Usage
from router.openai.answers.answer_bytes import AskedAnswer, HeldBytes
from router.openai.answers.answer_writer import DONE, AnswerWriter
from router.openai.answers.openai_objects import COMMENT, CompletionObjects, ObjectHead
from router.openai.answers.response_stream import ResponseStream, TextDelta
from router.openai.answers.resumable_streams import ChoicePlace, StreamMarks
from router.request_context import RequestContext
from tests.unit.router.request_contexts import NoConnection

KEEPALIVE = 1.0
TOKEN_SECONDS = 0.014


class ClockedStream(ResponseStream):
    """One piece behind each of some gaps, in seconds, on a clock that moves only while the writer waits."""

    def __init__(self, gaps: list[float]):
        super().__init__(1, 1 << 20, lambda: None)
        self.now = 0.0
        self._gaps = gaps
        self._next_at = 0.0

    async def take(self, silence_seconds: float | None) -> list[TextDelta]:
        if not self._gaps:
            return await super().take(None)
        gap = self._gaps[0]
        self._next_at = self._next_at or self.now + gap
        if silence_seconds is not None and self.now + silence_seconds < self._next_at:
            self.now += silence_seconds
            return []
        self.now, self._next_at = self._next_at, 0.0
        del self._gaps[0]
        self.put(TextDelta(0, "x"))
        if not self._gaps:
            self.end(0, Usage(1, 1, 0))
        return await super().take(None)


def written(answer: ClockedStream, had: int, monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, bytes]]:
    """What a client that has the first `had` pieces gets, and when."""
    sent: list[tuple[float, bytes]] = []

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            sent.append((answer.now, message["body"]))

    async def write() -> None:
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: answer.now)
        with ByteBudget(1 << 20, "full", "bytes").hold("tenant") as holding:
            asked = AskedAnswer(
                prompts=[1],
                choices=1,
                output_tokens=1,
                limited=True,
                likeliest=-1,
                echoes=False,
                echo_likeliest=-1,
                scored_likeliest=-1,
                stream=True,
                typed=False,
            )
            writer = AnswerWriter(
                RouterConfig(served_model_name="m", keepalive_seconds=KEEPALIVE),
                RequestContext(NoConnection(), rid="r"),
                CompletionObjects(
                    ObjectHead(
                        answer_id="a", created=0, model="m", system_fingerprint=None, chunk_usage=False
                    )
                ),
                HeldBytes(holding, asked, 1 << 20),
                usage_chunk=False,
                marks=StreamMarks("ticket", [ChoicePlace(had)]),
            )
            await writer._stream({"type": "http"}, send, answer)

    asyncio.run(write())
    return sent


def test_pieces_that_the_client_has_make_no_comments_but_after_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pieces = 200
    sent = written(ClockedStream([TOKEN_SECONDS] * pieces), pieces - 1, monkeypatch)
    assert sent[0] == (TOKEN_SECONDS, b""), "the headers do not wait"
    assert [body for _, body in sent[1:-2]] == [COMMENT] * int(pieces * TOKEN_SECONDS / KEEPALIVE)
    silences = [late - early for (early, _), (late, _) in pairwise(sent[:-2])]
    assert silences == pytest.approx([KEEPALIVE] * len(silences), abs=TOKEN_SECONDS)
    assert min(silences) > 0.99 * KEEPALIVE
    assert b'"text":"x"' in sent[-2][1]
    assert sent[-1][1] == DONE


def test_a_stream_that_stands_still_gets_a_comment_each_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = written(ClockedStream([1.0, 3.5 * KEEPALIVE]), 0, monkeypatch)
    comments = [at for at, body in sent if body == COMMENT]
    assert comments == pytest.approx([1.0 + KEEPALIVE, 1.0 + 2 * KEEPALIVE, 1.0 + 3 * KEEPALIVE])
