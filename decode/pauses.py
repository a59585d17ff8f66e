"""Tells routers which of their requests do not run for lack of pages: at once, and again while it lasts.

`Paused` is a sign of life, so a router does not take a stream for forgotten that waits for its turn, and can say why
its client sees a pause. It goes behind the tokens that came before. Older routers do not know it and get none.
"""

from __future__ import annotations

from collections.abc import Iterable

from decode.output_buffer import OutputBuffer
from shared.batch.effects import Send, WorkerEffect
from shared.batch.req import Req
from shared.scheduling.router_sessions import RouterSessions
from shared.wire.messages import Paused

REPEAT_SECONDS = 5.0


class Pauses:
    """When the router of each paused request is told again. `now` in seconds."""

    def __init__(self, sessions: RouterSessions, output_buffer: OutputBuffer, effects: list[WorkerEffect]):
        self._sessions = sessions
        self._output_buffer = output_buffer
        self._effects = effects
        self._due: dict[Req, float] = {}

    def tell(self, paused: Iterable[Req], now: float) -> None:
        """Send what is due of `paused`, all that are retracted now."""
        paused = list(paused)
        if not (paused or self._due):
            return
        due = {
            req: self._due.get(req, now) for req in paused if self._sessions.understands(req.router, Paused)
        }
        for req in [req for req, at in due.items() if now >= at]:
            due[req] = now + REPEAT_SECONDS
            self._effects.extend(self._output_buffer.flush_of([req]))
            self._effects.append(Send(req.router, Paused(req.rid, req.attempt, "retracted")))
        self._due = due

    def next_deadline(self) -> float | None:
        """When somebody is to be told again; None: nobody is paused."""
        return min(self._due.values(), default=None)
