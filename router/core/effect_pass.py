"""Carrying out a core's effects: one pass that the router's shell and the simulation's routers share.

All effects are carried out in order, in one go: one `Generated` message with a hundred rows is one wakeup. A sink may
call the core back while effects are carried out (`cancel`, `stop`); what follows is carried out by the same pass.
An effect that raises does not keep the others from being carried out: they concern other requests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from router.core.dispatch import RouterCore
from router.core.effects import EndSession, NewTokens, Outcome, PromptScored, RequestEnded, RouterEffect
from shared.batch.effects import Note, Send
from shared.wire.messages import Message
from shared.wire.sampled import Logprobs


class EffectSink(Protocol):
    """What effects become in a process: one method an effect."""

    def send(self, peer: str, message: Message) -> None: ...

    def note(self, note: Note) -> None: ...

    def tokens(self, rid: str, index: int, token_ids: tuple[int, ...], logprobs: Logprobs) -> None: ...

    def scored(self, rid: str, logprobs: Logprobs) -> None: ...

    def ended(self, rid: str, outcome: Outcome) -> None: ...

    def paired(self) -> None: ...

    def end_session(self, peer: str, reason: str) -> None: ...


class EffectPass:
    """Takes effects out of `core` and gives them to `sink`; then `set_timer` gets the core's next deadline."""

    def __init__(self, core: RouterCore, sink: EffectSink, set_timer: Callable[[float | None], None]):
        self._core = core
        self._sink = sink
        self._set_timer = set_timer
        self._running = False

    def run(self) -> None:
        """Call after every input of the core. Within a pass it does nothing: that pass carries out all effects.

        Raises the first error of an effect, once all effects are carried out and the timer is set.
        """
        if self._running:
            return
        self._running = True
        failures: list[Exception] = []
        while effects := self._core.take_effects():
            for effect in effects:
                try:
                    self._carry_out(effect)
                except Exception as failure:
                    failures.append(failure)
        self._running = False
        self._set_timer(self._core.next_deadline())
        if failures:
            raise failures[0]

    def _carry_out(self, effect: RouterEffect) -> None:
        if isinstance(effect, NewTokens):  # by far the most frequent first
            self._sink.tokens(effect.rid, effect.index, effect.token_ids, effect.logprobs)
        elif isinstance(effect, Send):
            self._sink.send(effect.peer, effect.message)
        elif isinstance(effect, Note):
            self._sink.note(effect)
        elif isinstance(effect, PromptScored):
            self._sink.scored(effect.rid, effect.logprobs)
        elif isinstance(effect, RequestEnded):
            self._sink.ended(effect.rid, effect.outcome)
        elif isinstance(effect, EndSession):
            self._sink.end_session(effect.peer, effect.reason)
        else:
            self._sink.paired()
