"""Plays the router between one prefill and one decode worker: hands requests over and streams their tokens.

`whole`: the decode worker gets them with their prompts.

It asserts what a router relies on: no token lost or doubled, no message of an attempt that is over. Faults, limits and
placement are the real router's business; text too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared.links.events import Received
from shared.wire.messages import (
    Decode,
    Finished,
    FinishReason,
    Generated,
    Hello,
    Joined,
    Load,
    Message,
    Prefill,
    Prefilled,
    Refused,
    Release,
    Serve,
)
from shared.wire.sampling_params import SamplingParams
from tests.doubles.memory_links import MemoryLinks


@dataclass(frozen=True)
class DeskRequest:
    """What a client asks for; its seed is its name."""

    prompt: tuple[int, ...]
    params: SamplingParams

    @property
    def rid(self) -> str:
        """Its name on the wire."""
        return f"request-{self.params.seed}"


@dataclass(slots=True)
class DeskStream:
    """A request as the router sees it; `handed_over` is the last `Decode` of the attempt."""

    request: DeskRequest
    token_ids: list[int]  # prompt and output
    attempt: int
    handed_over: Decode | None = None
    finish: FinishReason | None = None
    pages: tuple[int, ...] = ()  # of the last baton
    prefill_cached_tokens: int = 0
    decode_cached_tokens: int = 0

    @property
    def output_len(self) -> int:
        """Tokens of output so far, across attempts."""
        return len(self.token_ids) - len(self.request.prompt)

    def command(self, kind: type[Prefill] | type[Serve]) -> Prefill | Serve:
        """The command that begins this attempt."""
        request = self.request
        return kind(request.rid, self.attempt, tuple(self.token_ids), len(request.prompt), request.params)


class Desk:
    """The router's end of both links, and the streams."""

    def __init__(self, prefill: MemoryLinks, decode: MemoryLinks, *, whole: bool = False) -> None:
        self.links = MemoryLinks(Hello(session=1, role="router", uid="router", epoch=1))
        self.links.link(prefill)
        self.links.link(decode)
        self._prefill, self._decode = prefill.name, decode.name
        self.streams: dict[str, DeskStream] = {}
        self._whole = whole
        self._no_room: list[str] = []

    def submit(self, request: DeskRequest, output: Sequence[int] = (), attempt: int = 1) -> None:
        """Begin a request, or go on with one that has `output` already."""
        stream = DeskStream(request, [*request.prompt, *output], attempt)
        self.streams[request.rid] = stream
        self._begin(stream)

    def turn(self) -> None:
        """Hear everything, and answer."""
        waiting, self._no_room = self._no_room, []
        for rid in waiting:
            stream = self.streams[rid]
            if stream.handed_over is None:
                self._begin(stream)
            else:
                self._hand_over(stream)
        for event in self.links.receive(0.0):
            if isinstance(event, Received):
                self._on_message(event.message)

    def _on_message(self, message: Message) -> None:
        match message:
            case Prefilled():
                self._on_prefilled(message)
            case Joined(rid, attempt):
                self._stream(rid, attempt).decode_cached_tokens = message.cached_tokens
            case Generated(rows):
                for row in rows:
                    self._append(self._stream(row.rid, row.attempt), row.index, row.token_ids)
            case Finished(rid, attempt, output_len, reason):
                stream = self._stream(rid, attempt)
                assert stream.output_len == output_len
                stream.finish = reason
            case Refused(rid, attempt, reason):
                self._on_refused(self._stream(rid, attempt), message)
            case Load():
                pass
            case _:
                raise AssertionError(f"unexpected {message}")

    def _on_prefilled(self, message: Prefilled) -> None:
        stream = self._stream(message.rid, message.attempt)
        self._append(stream, message.index, message.token_ids)
        stream.prefill_cached_tokens = message.cached_tokens
        stream.finish = message.finish
        if message.baton is None:
            return
        stream.pages = message.baton.pages
        request = stream.request
        stream.handed_over = Decode(
            request.rid,
            stream.attempt,
            tuple(stream.token_ids),
            len(request.prompt),
            request.params,
            message.baton,
        )
        self._hand_over(stream)

    def _begin(self, stream: DeskStream) -> None:
        if self._whole:
            self.links.send(self._decode, stream.command(Serve))
        else:
            self.links.send(self._prefill, stream.command(Prefill))

    def _hand_over(self, stream: DeskStream) -> None:
        assert stream.handed_over is not None
        self.links.send(self._decode, stream.handed_over)

    def _append(self, stream: DeskStream, index: int, token_ids: tuple[int, ...]) -> None:
        assert index == stream.output_len, "a token was lost or doubled"
        if stream.handed_over is not None and len(stream.token_ids) == len(stream.handed_over.token_ids):
            self.links.send(self._prefill, Release(stream.request.rid, stream.attempt))
        stream.token_ids.extend(token_ids)

    def _on_refused(self, stream: DeskStream, refused: Refused) -> None:
        if refused.reason == "no_room":
            self._no_room.append(refused.rid)
            return
        assert refused.reason == "stale", refused
        stream.attempt += 1
        stream.handed_over = None
        self._begin(stream)

    def _stream(self, rid: str, attempt: int) -> DeskStream:
        stream = self.streams[rid]
        assert stream.attempt == attempt
        return stream
