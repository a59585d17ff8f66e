"""Commands whose grammar is not compiled yet wait here, between the links and the loop.

So neither scheduler nor loop knows of grammars: a request comes to them when its matcher can be copied in microseconds.
What cannot be compiled is answered here. Other commands pass at once, with one exception: a `DrainAck` says that all
that its router had sent has arrived, so it waits for what waits of that router.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from shared.links.events import LinkEvent, PeerDown, PeerUp, Received
from shared.scheduling.event_loop import WorkerEndpoint
from shared.wire.grammar import Grammar
from shared.wire.messages import Cancel, Decode, DrainAck, Failed, Hello, Message, Prefill, Refused, Serve

POLL_SECONDS = 0.001  # between two looks at what is compiled
WAITING_GRAMMARS_MAX = 64  # requests that wait for a compile; those beyond go to another worker

GRAMMAR_CODE = "grammar_too_complex"


class Preparing(Protocol):
    """What compiles grammars beside the steps."""

    def prepare(self, grammar: Grammar) -> None:
        """Begin, unless that is done; returns at once."""

    def ready(self, grammar: Grammar) -> bool:
        """Whether it has ended, well or not."""

    def error(self, grammar: Grammar) -> str:
        """Why a grammar that is ready cannot be used; empty if it can."""


class GrammarGate:
    """A worker's end of its links, behind which every grammar is ready."""

    def __init__(self, links: WorkerEndpoint, grammars: Preparing):
        self._links = links
        self._grammars = grammars
        self._waiting: list[Received] = []  # in the order they came
        self._hellos: dict[str, Hello] = {}

    @property
    def waiting(self) -> int:
        """Commands that wait."""
        return len(self._waiting)

    def send(self, peer: str, message: Message) -> None:
        """Pass it on."""
        self._links.send(peer, message)

    def receive(self, timeout_seconds: float) -> list[LinkEvent]:
        """What has come and need not wait, and what has waited long enough."""
        timeout_seconds = min(timeout_seconds, POLL_SECONDS) if self._waiting else timeout_seconds
        events = self._links.receive(timeout_seconds)
        passing = [event for event in events if self._passes(event)]
        return [*passing, *self._released()] if self._waiting else passing

    def _passes(self, event: LinkEvent) -> bool:
        """Whether an event that has just come goes on at once; it waits otherwise, or is answered."""
        match event:
            case PeerUp(peer, hello):
                self._hellos[peer] = hello
            case PeerDown(peer, _):
                self._hellos.pop(peer, None)
                self._waiting = [held for held in self._waiting if held.peer != peer]
            case Received(_, Cancel(rid, attempt)):
                self._forget(rid, attempt)
            case Received(peer, DrainAck()) if any(held.peer == peer for held in self._waiting):
                self._waiting.append(event)
                return False
            case Received(_, Prefill() | Decode() | Serve() as command) if command.params.grammar is not None:
                self._forget(command.rid, command.attempt - 1)
                return self._may_pass(event, command, command.params.grammar)
        return True

    def _may_pass(self, event: Received, command: Prefill | Decode | Serve, grammar: Grammar) -> bool:
        if len(self._waiting) >= WAITING_GRAMMARS_MAX:
            detail = "too many requests wait for their grammar to be compiled"
            self.send(event.peer, Refused(command.rid, command.attempt, "no_room", detail))
            return False
        self._grammars.prepare(grammar)
        if not self._grammars.ready(grammar):
            self._waiting.append(event)
            return False
        return self._is_sound(event.peer, command, grammar)

    def _is_sound(self, peer: str, command: Prefill | Decode | Serve, grammar: Grammar) -> bool:
        """Whether the grammar of a request could be compiled; its router is told if not."""
        error = self._grammars.error(grammar)
        if not error:
            return True
        hello = self._hellos.get(peer)
        if hello is not None and hello.reads(Failed):
            message = f"the grammar cannot be compiled: {error}"
            self.send(peer, Failed(command.rid, command.attempt, 400, GRAMMAR_CODE, message))
        else:
            self.send(
                peer, Refused(command.rid, command.attempt, "internal", "its grammar cannot be compiled")
            )
        return False

    def _released(self) -> Sequence[LinkEvent]:
        """What need not wait any more, in the order it came."""
        released, kept = list[LinkEvent](), list[Received]()
        for held in self._waiting:
            match held.message:
                case Prefill() | Decode() | Serve() as command if command.params.grammar is not None:
                    if not self._grammars.ready(command.params.grammar):
                        kept.append(held)
                    elif self._is_sound(held.peer, command, command.params.grammar):
                        released.append(held)
                case _ if any(other.peer == held.peer for other in kept):
                    kept.append(held)
                case _:
                    released.append(held)
        self._waiting = kept
        return released

    def _forget(self, rid: str, attempt: int) -> None:
        """Drop the waiting command of a request, if it is of this attempt or an older one."""

        def is_other(message: Message) -> bool:
            return not (
                isinstance(message, Prefill | Decode | Serve)
                and message.rid == rid
                and message.attempt <= attempt
            )

        if self._waiting:
            self._waiting = [held for held in self._waiting if is_other(held.message)]
