"""The shell around the router core: it carries effects out and decides nothing.

One object on the event loop owns the core, the links and the timer. Whatever happens (a client's request, events of
links, a deadline) goes into the core with the loop's time; then one pass carries all effects out.

What may raise, and what then happens:

    a sink        its request ends with 500 and is cancelled; the others do not notice
    a worker's    message: the core drops that worker, and its session ends (`router.core.worker_events.worker_faults`)
    core, links   the shell is *broken*: the effects decided so far are carried out, `on_broken` ends the process,
                  and no input reaches the core any more, because its state cannot be trusted
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from typing import Protocol

from router.core.dispatch import RouterCore
from router.core.effect_pass import EffectPass
from router.core.effects import ClientRequest, Outcome, RequestFailed
from router.core.fleet.workers import Backend
from shared.batch.effects import Note
from shared.links.events import RouterSideLinks
from shared.links.inbox import EVENTS_A_TAKE
from shared.process.logs import describe_failure, write_note
from shared.wire.messages import Message
from shared.wire.sampled import Logprobs

FAILED = RequestFailed(500, "the router failed; its log says where")
OnBroken = Callable[[BaseException], None]


class TokenSink(Protocol):
    """Receives the output of one request, and before it what its prompt scores; `ended` is the last call."""

    def tokens(self, token_ids: tuple[int, ...], logprobs: Logprobs) -> None: ...

    def scored(self, logprobs: Logprobs) -> None: ...

    def ended(self, outcome: Outcome) -> None: ...


class RouterShell:
    """Owns the core. All methods but `links_ready` belong to the event loop's thread, and none raises.

    `on_paired` is called once, when a prefill and a decode worker are up that can serve together. `on_broken` is called
    once, with the error, in a turn of the loop of its own.
    """

    def __init__(
        self,
        core: RouterCore,
        links: RouterSideLinks,
        on_paired: Callable[[], None] = lambda: None,
        on_broken: OnBroken = lambda _: None,
    ):
        self._core = core
        self._links = links
        self._loop = asyncio.get_running_loop()
        self._sinks: dict[str, TokenSink] = {}
        self._timer: asyncio.Handle | None = None
        # remembered here: uvloop's handle of a deadline that is due has no `when`
        self._timer_at: float | None = None
        self._pass = EffectPass(core, self, self._set_timer)
        self._on_broken = on_broken
        self._broken = False
        self.paired = on_paired
        self.watch_notes: Callable[[Note], None] | None = None  # who looks on; must not raise

    # ---- inputs ------------------------------------------------------------------------------------------------

    def submit(self, request: ClientRequest, sink: TokenSink) -> None:
        """Hand a request to the core. Its end may reach `sink` before this returns."""
        if self._broken:
            sink.ended(FAILED)
            return
        self._sinks[request.rid] = sink
        self._input(partial(self._core.submit, request))

    def cancel(self, rid: str) -> None:
        """The client does not want this request any more; a no-op if it has ended."""
        if rid in self._sinks:
            self._input(partial(self._core.cancel, rid))

    def stop(self, rid: str) -> None:
        """A stop string was found in the output; a no-op if the request has ended."""
        if rid in self._sinks:
            self._input(partial(self._core.stop, rid))

    def links_ready(self) -> None:
        """There is something to receive; called on the link thread."""
        with contextlib.suppress(RuntimeError):  # the loop was closed
            self._loop.call_soon_threadsafe(self._receive)

    def start_draining(self) -> None:
        """The router ends soon."""
        self._core.start_draining()

    def debug(self, rid: str) -> dict[str, object] | None:
        """What the core knows about a request, or None."""
        return self._core.debug(rid)

    def context_len(self, model: str) -> int | None:
        """Tokens, prompt and output together, that the workers serve; None while no worker has named them."""
        return self._core.fleet.context_len(model)

    def backends(self) -> frozenset[Backend]:
        """What computes for clients now, by fingerprints."""
        return self._core.fleet.backends

    def close(self) -> None:
        """Stop the timer; the links are closed by their owner."""
        if self._timer:
            self._timer.cancel()

    # ---- effects: the pass calls these -------------------------------------------------------------------------

    def send(self, peer: str, message: Message) -> None:
        """Give a message to the links."""
        self._links.send(peer, message)

    def note(self, note: Note) -> None:
        """Write a log line."""
        write_note(note, "router.core")
        if self.watch_notes is not None:
            self.watch_notes(note)

    def tokens(self, rid: str, index: int, token_ids: tuple[int, ...], logprobs: Logprobs) -> None:
        """Give tokens to the request's sink, in order."""
        del index
        if sink := self._sinks.get(rid):
            try:
                sink.tokens(token_ids, logprobs)
            except BaseException as error:  # a tokenizer's panic is no Exception
                self._give_up(rid, sink, error)

    def scored(self, rid: str, logprobs: Logprobs) -> None:
        """Tell the request's sink how likely its prompt is, in order."""
        if sink := self._sinks.get(rid):
            try:
                sink.scored(logprobs)
            except BaseException as error:
                self._give_up(rid, sink, error)

    def ended(self, rid: str, outcome: Outcome) -> None:
        """Tell the request's sink its end."""
        if sink := self._sinks.pop(rid, None):
            try:
                sink.ended(outcome)
            except BaseException as error:
                self._give_up(rid, sink, error)

    def end_session(self, peer: str, reason: str) -> None:
        """End the session with a worker that the core has dropped."""
        self._links.end_session(peer, reason)

    def _give_up(self, rid: str, sink: TokenSink, error: BaseException) -> None:
        """The answer to this request cannot be written: end it here and at its workers."""
        self.note(Note("answer.failed", {"rid": rid, **describe_failure(error)}, "error"))
        self._sinks.pop(rid, None)
        self._input(partial(self._core.cancel, rid))
        sink.ended(FAILED)

    # ---- what drives the core ----------------------------------------------------------------------------------

    def _input(self, act: Callable[[float], None]) -> None:
        """Give the core one input and carry out what it has decided, also when it raises in the middle."""
        if self._broken:
            return
        try:
            try:
                act(self._loop.time())
            finally:
                self._pass.run()
        except BaseException as error:
            self._break(error)

    def _break(self, error: BaseException) -> None:
        if not self._broken:
            self._broken = True
            self._loop.call_soon(self._on_broken, error)

    def _receive(self) -> None:
        self._input(self._take_events)

    def _take_events(self, now: float) -> None:
        """Some of what has come; then clients have a turn, and the links are read again until nothing is left.

        They call `links_ready` only when something comes that nothing waits before; fewer than they give at a time are
        the last ones.
        """
        events = self._links.receive(0)
        for event in events:
            self._core.link(event, now)
        self._core.settle(now)
        if len(events) >= EVENTS_A_TAKE:
            self._loop.call_soon(self._receive)

    def _set_timer(self, deadline: float | None) -> None:
        if self._timer and self._timer_at == deadline:
            return
        if self._timer:
            self._timer.cancel()
        self._timer_at = deadline
        self._timer = self._loop.call_at(deadline, self._tick) if deadline is not None else None

    def _tick(self) -> None:
        self._timer = None
        self._input(self._core.tick)
