"""Mistakes about what peers of another version understand: see `mutations`."""

from __future__ import annotations

from router.core.fleet.workers import Worker
from shared.scheduling.router_sessions import RouterSessions
from shared.wire.messages import Hello, Message
from tests.simulation.mistakes.mutation import Mutation, Patch, into

MISTAKES: dict[str, Mutation] = {}
_mistake = into(MISTAKES)


@_mistake("versions", "a router sends a new message to a worker that does not understand it")
def _workers_understand_all() -> list[Patch]:
    def understands(self: Worker, message: type[Message]) -> bool:
        del self, message
        return True

    return [(Worker, "understands", understands)]


@_mistake("versions", "a worker sends a new message to a router that does not understand it")
def _routers_understand_all() -> list[Patch]:
    def understands(self: RouterSessions, router: str, message: type[Message]) -> bool:
        del self, router, message
        return True

    return [(RouterSessions, "understands", understands)]


@_mistake("versions", "every peer is taken for one of this version")
def _all_are_new() -> list[Patch]:
    def reads(self: Hello, message: type[Message]) -> bool:
        del self, message
        return True

    return [(Hello, "reads", reads)]
