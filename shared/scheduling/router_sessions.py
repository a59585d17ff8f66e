"""The routers that have a session with this worker, and the messages that both roles handle alike.

It knows which routers are connected, pushes the worker's load to them, sends `Draining` and takes in their `DrainAck`s,
passes `Renew` and `Release` on to the leases, and ends leases that were not renewed. A scheduler
gives it every link event first and handles what comes back: the commands of its own role, and a session's end, at
which the requests of that router end.

`Load` is pushed at once to a router that has just come, and to all when there is a request where none was: a router
takes a worker that reports none for one that has lost what it was given. Otherwise it is pushed when it changed, to
each router at most every `load_seconds`, and to one at a time:

    router-0 ──┬───────┬─────►       all that hear of the same free pages at once ask for them at once, and
    router-1 ──┼───┬───┼───┬─►       all but one are refused; the next one's load tells what the last one took
             load_seconds

A router tells a decode worker the pages of what it has begun for it elsewhere (`Foreseen`), and the load of each router
has the sum of what the others have told.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from shared.batch.effects import Send, WorkerEffect
from shared.batch.req import Req
from shared.kv.leases import LeaseTable
from shared.links.events import LinkEvent, PeerDown, PeerUp, Received
from shared.wire.bounds import COUNT_MAX
from shared.wire.messages import (
    DrainAck,
    Draining,
    Failed,
    Foreseen,
    Hello,
    Load,
    Message,
    Refused,
    Release,
    Renew,
)


class RouterSessions:
    """The routers with a session. Effects are appended in the order of their causes."""

    def __init__(
        self, leases: LeaseTable, load: Callable[[], Load], load_seconds: float, effects: list[WorkerEffect]
    ):
        self.draining = False  # the worker accepts no new requests
        self._leases = leases
        self._load = load
        self._load_seconds = load_seconds
        self._effects = effects
        self._hellos: dict[str, Hello] = {}
        # The load that each router knows; whoever was told first is the first to be told again.
        self._sent: dict[str, Load | None] = {}
        self._foreseen: dict[str, int] = {}  # pages, by the router that has told them
        self._next_push = 0.0
        self._idle = True  # no request was in the last load that was pushed
        self._acknowledged: set[str] = set()  # routers that send nothing new

    def on_link(self, event: LinkEvent, now: float) -> LinkEvent | None:
        """Handle what both roles handle alike; returns the event if the scheduler has to act on it, too."""
        match event:
            case PeerUp(router, hello):
                self._add(router, hello)
            case PeerDown(router, _):
                self._remove(router)
                return event
            case Received(_, Renew() | Release() as command):
                self._leases.on_command(command, now)
            case Received(router, Foreseen(pages)):
                self._foreseen[router] = pages
            case Received(router, DrainAck()):
                self._acknowledged.add(router)
            case _:
                return event
        return None

    def understands(self, router: str, message: type[Message]) -> bool:
        """Whether such a message may be sent to this router; if not, do as was done before the message existed.

        `Failed` is one.
        """
        return router in self._hellos and self._hellos[router].reads(message)

    def fail(self, req: Req, why: str) -> None:
        """Tell the router of a request that it cannot be served anywhere; an older router tries it elsewhere."""
        message: Message = Failed(req.rid, req.attempt, 400, "grammar_too_complex", why)
        if not self.understands(req.router, Failed):
            message = Refused(req.rid, req.attempt, "internal", "what it asks for cannot be sampled")
        self._effects.append(Send(req.router, message))

    def start_draining(self) -> None:
        """Accept no new requests from now on. All routers are sent `Draining`, those that connect later too."""
        self.draining = True
        self._effects.extend(Send(router, Draining()) for router in self._sent)

    @property
    def drained(self) -> bool:
        """True once every connected router has acknowledged the drain and no lease is left."""
        return self._acknowledged >= self._sent.keys() and not self._leases

    def tick(self, now: float) -> None:
        """End the leases that were not renewed in time; push the load if it is due."""
        self._leases.expire(now)
        if self._sent and (now >= self._next_push or self._idle):
            load = self._load()
            if now >= self._next_push or not _is_idle(load):
                self._push(load)
                self._next_push = now + self._load_seconds / len(self._sent)
                self._idle = _is_idle(load)

    @property
    def pages_foreseen(self) -> int:
        """Pages of what all routers have begun and not sent yet; -1: there is only one router, or none."""
        return sum(self._foreseen.values()) if len(self._sent) > 1 else -1

    def next_deadline(self) -> float | None:
        """When the next lease expires or a changed load is due, in seconds of the worker's clock."""
        expiry, load = self._leases.next_expiry(), self._load()
        told = all(sent == self._load_for(router, load) for router, sent in self._sent.items())
        push = None if told else self._next_push
        return min((deadline for deadline in (expiry, push) if deadline is not None), default=None)

    def _add(self, router: str, hello: Hello) -> None:
        self._hellos[router] = hello
        self._sent[router] = None
        self._next_push = 0.0
        if self.draining:
            self._effects.append(Send(router, Draining()))

    def _remove(self, router: str) -> None:
        self._hellos.pop(router, None)
        self._sent.pop(router, None)
        self._foreseen.pop(router, None)
        self._acknowledged.discard(router)
        self._leases.forget_router(router)

    def _push(self, load: Load) -> None:
        """To the routers that have just come, or else to the one that was told first; to all at the first request."""
        loads = {router: self._load_for(router, load) for router in self._sent}
        due = [router for router, sent in self._sent.items() if sent != loads[router]]
        if not self._idle or _is_idle(load):
            due = [router for router in due if self._sent[router] is None] or due[:1]
        for router in due:
            del self._sent[router]
            self._sent[router] = loads[router]
            self._effects.append(Send(router, loads[router]))

    def _load_for(self, router: str, load: Load) -> Load:
        """What a router is told: of the pages that are foreseen, those of the others."""
        if load.pages_foreseen <= 0:
            return load
        others = load.pages_foreseen - self._foreseen.get(router, 0)
        return replace(load, pages_foreseen=min(others, COUNT_MAX))


def _is_idle(load: Load) -> bool:
    return not (load.queued or load.running)
