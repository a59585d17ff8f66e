"""The shell around the router core: it carries effects out and decides nothing.

One object on the event loop owns the core, the links and the timer. Whatever happens (a client's request, events of
links, a deadline) goes into the core with the loop's time; then all effects are carried out in order, in one go: one
`Generated` message with a hundred rows is one wakeup. A listener may call `cancel` or `stop` while effects are being
carried out; what follows from that is carried out by the same pass.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Protocol

import structlog

from router.core.dispatch import RouterCore
from router.core.effects import ClientRequest, Effect, NewTokens, Outcome, RequestEnded, Send
from shared.links.events import LinkEvent
from shared.messages import Message

log = structlog.get_logger(__name__)


class RouterLinksEnd(Protocol):
    """The side of `shared.links.sockets.RouterLinks` that the shell needs."""

    def receive(self, timeout_seconds: float) -> list[LinkEvent]: ...

    def send(self, peer: str, message: Message) -> None: ...


class TokenSink(Protocol):
    """Who hears of one request; `ended` is the last call."""

    def tokens(self, token_ids: tuple[int, ...]) -> None: ...

    def ended(self, outcome: Outcome) -> None: ...


class RouterShell:
    """Owns the core. All methods but `links_ready` belong to the event loop's thread."""

    def __init__(self, core: RouterCore, links: RouterLinksEnd):
        self._core = core
        self._links = links
        self._loop = asyncio.get_running_loop()
        self._listeners: dict[str, TokenSink] = {}
        self._pumping = False
        self._timer: asyncio.TimerHandle | None = None

    def submit(self, request: ClientRequest, listener: TokenSink) -> None:
        """Hand a request to the core. `listener` may hear its end before this returns."""
        self._listeners[request.rid] = listener
        self._core.submit(request, self._loop.time())
        self._pump()

    def cancel(self, rid: str) -> None:
        """Nobody wants this request any more; a no-op if it has ended."""
        if rid in self._listeners:
            self._core.cancel(rid, self._loop.time())
            self._pump()

    def stop(self, rid: str) -> None:
        """A stop string was found in the output; a no-op if the request has ended."""
        if rid in self._listeners:
            self._core.stop(rid, self._loop.time())
            self._pump()

    def debug(self, rid: str) -> dict[str, object] | None:
        """What the core knows about a request, or None."""
        return self._core.debug(rid)

    def context_len(self, model: str) -> int | None:
        """Tokens, prompt and output together, that the workers have told they serve; None: not told yet."""
        return self._core.fleet.context_len(model)

    def links_ready(self) -> None:
        """There is something to receive; called on the link thread."""
        with contextlib.suppress(RuntimeError):  # the loop was closed: nobody is left to tell
            self._loop.call_soon_threadsafe(self._receive)

    def close(self) -> None:
        """Stop the timer; the links are closed by who opened them."""
        if self._timer:
            self._timer.cancel()

    def _receive(self) -> None:
        now = self._loop.time()
        for event in self._links.receive(0):
            self._core.link(event, now)
        self._pump()

    def _pump(self) -> None:
        if self._pumping:
            return
        self._pumping = True
        try:
            while effects := self._core.drain():
                for effect in effects:
                    self._carry_out(effect)
        finally:
            self._pumping = False
        self._set_timer()

    def _carry_out(self, effect: Effect) -> None:
        if isinstance(effect, Send):
            self._links.send(effect.peer, effect.message)
        elif isinstance(effect, NewTokens):
            if listener := self._listeners.get(effect.rid):
                listener.tokens(effect.token_ids)
        elif isinstance(effect, RequestEnded) and (listener := self._listeners.pop(effect.rid, None)):
            listener.ended(effect.outcome)

    def _set_timer(self) -> None:
        deadline = self._core.next_deadline()
        if self._timer and self._timer.when() == deadline:
            return
        if self._timer:
            self._timer.cancel()
        self._timer = self._loop.call_at(deadline, self._tick) if deadline is not None else None

    def _tick(self) -> None:
        self._timer = None
        self._core.tick(self._loop.time())
        self._pump()
