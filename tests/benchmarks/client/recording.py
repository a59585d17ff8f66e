"""What arrived on one stream and when, and what it meant. Pure: no I/O, no clock.

While a server is measured the client only keeps pieces of bytes with their times; they are taken apart here after the
last one of the scenario came. An event has the time of the piece that completed it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from tests.benchmarks.client.errors import BenchError

DATA = b"data:"
DONE = b"[DONE]"


@dataclass(slots=True)
class Recording:
    """Bytes of one answer as they came; times are those of `time.perf_counter`."""

    output_tokens_asked: int
    sent: float = 0.0  # seconds
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    cut: bool = False  # the client hung up: there is neither an end nor a usage


@dataclass(frozen=True, slots=True)
class RecordedStream:
    """One answer, understood; times in seconds, of one clock with those of all other streams."""

    sent: float
    times: tuple[float, ...]  # of each event with text, and of the one that gives the reason of the end
    prompt_tokens: int = 0  # by the server's count, as the next two; 0 when the client hung up
    cached_tokens: int = 0
    output_tokens: int = 0
    cut: bool = False

    @property
    def first(self) -> float:
        """When the first token came."""
        return self.times[0]

    @property
    def last(self) -> float:
        """When the last token came."""
        return self.times[-1]


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _Details | None = None


class _Choice(msgspec.Struct):
    text: str = ""
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw | None = None


_decoder = msgspec.json.Decoder(_Chunk)


def understand(recording: Recording) -> RecordedStream:
    """The stream in a recording. Raises BenchError when it failed, broke off, or has not as many tokens as asked."""
    times: list[float] = []
    usage, done = None, False
    for time, data in _events(recording.pieces):
        if data == DONE:
            done = True
            continue
        chunk = _decode(data)
        usage = chunk.usage or usage
        if any(choice.text or choice.finish_reason for choice in chunk.choices):
            times.append(time)
    if recording.cut:
        return RecordedStream(recording.sent, tuple(times), cut=True)
    if not done or not times:
        raise BenchError(f"a stream broke off after {len(times)} events; the server's log may say why")
    if usage is None:
        raise BenchError("the server tells no usage at the end of a stream: it must know stream_options")
    if usage.completion_tokens != recording.output_tokens_asked:
        raise BenchError(
            f"a stream ended after {usage.completion_tokens} of {recording.output_tokens_asked} tokens: "
            "the server must know ignore_eos, and its context must be long enough"
        )
    cached = (usage.prompt_tokens_details and usage.prompt_tokens_details.cached_tokens) or 0
    return RecordedStream(recording.sent, tuple(times), usage.prompt_tokens, cached, usage.completion_tokens)


def _decode(data: bytes) -> _Chunk:
    try:
        chunk = _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise BenchError(f"the server sent an event that is no chunk ({error}): {data[:200]!r}") from None
    if chunk.error is not None:
        raise BenchError(f"a stream failed: {bytes(chunk.error).decode()[:300]}")
    return chunk


def _events(pieces: list[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """The data of each server-sent event; one line each in all servers known, so lines are enough."""
    rest = b""
    for time, piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(DATA):
                yield time, line[len(DATA) :].strip()
