"""The one writer of a request's state on a worker.

Each role has a table of its own (`prefill/lifecycle.py`, `decode/lifecycle.py`); this follows it, for every part of the
role's scheduler. It does not know what a request holds in a state: the part that acts on the request gives the event.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Generic, cast

from shared.batch.req import Req
from shared.primitives.errors import InvariantError
from shared.primitives.state_table import Event, State, StateName, StateTable


class RequestStates(Generic[State, Event]):
    """Advances requests along a table, and counts how often each of its rows was taken."""

    def __init__(self, table: StateTable[State, Event]):
        self._table = table
        self.taken: Counter[tuple[State, Event]] = Counter()
        # set by a process that logs every step of a request
        self.on_step: Callable[[Req, StateName, StateName], None] | None = None

    def advance(self, req: Req, event: Event) -> None:
        """Follow the table; raises `InvariantError`, naming request, state and event, where it has no row."""
        before = cast(State, req.state)
        try:
            req.state = self._table.next(before, event)
        except InvariantError as error:
            raise InvariantError(f"request {req.rid}: {error}") from None
        self.taken[before, event] += 1
        if self.on_step is not None:
            self.on_step(req, before, event)


def check_states(held: Mapping[State, Iterable[Req]], live: Iterable[Req]) -> None:
    """Prove that what the parts of a scheduler hold agrees with the states of its live requests.

    `held` are the requests by the state in which the part that holds them keeps them. Raises `InvariantError` for one
    that is held in another state than its own, held twice, live and held nowhere, or held and not live any more.
    """
    place: dict[Req, State] = {}
    for state, reqs in held.items():
        for req in reqs:
            if req.state is not state or req in place:
                raise InvariantError(f"request {req.rid} is {_word(req)}, but held as {state.value}")
            place[req] = state
    present = set(live)
    lost = [f"{req.rid} ({_word(req)})" for req in present if req not in place]
    if lost:
        raise InvariantError(f"requests that no part of the scheduler holds: {sorted(lost)}")
    forgotten = [f"{req.rid} ({_word(req)})" for req in place if req not in present]
    if forgotten:
        raise InvariantError(f"requests that are forgotten, but still held: {forgotten}")


def _word(req: Req) -> str:
    return str(req.state.value) if req.state else "in no state"
