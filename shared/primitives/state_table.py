"""State machines as data: what a state does with an event is a row of a table, and a pair that has no row raises.

One class serves every lifecycle: a request at the router (`router/core/requests/lifecycle.py`), a request on a worker
(`prefill/lifecycle.py`, `decode/lifecycle.py`), a fetch (`shared/transfer/fetches.py`) and the drain of a router
(`router/core/drain.py`). The table does not know what a state holds or what an event costs. It has no conditions: the
caller decides which event has happened. The pictures in docs/request-life.md are made by `diagram()`. The idea is
h11's (`_state.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Generic, TypeVar

from shared.primitives.errors import InvariantError


class StateName(Enum):
    """The name of a state, an event or a place; its value is what logs show. As a key it is as fast as any object.

    Enum's own hash is a function in Python, and tables and counts of such names are looked up at each turn.
    """

    __hash__ = object.__hash__


State = TypeVar("State", bound=StateName)
Event = TypeVar("Event", bound=StateName)


class StateTable(Generic[State, Event]):
    """`rows[state][event]` is the next state; the first state of `rows` is where a life begins.

    `noun` names what has the states, for errors. Values of both enums are the words of logs, metrics and pictures.
    """

    def __init__(self, noun: str, rows: Mapping[State, Mapping[Event, State]]):
        self.rows = rows
        self.start = next(iter(rows))
        self.ended = frozenset(state for state, row in rows.items() if not row)
        self._noun = noun

    def next(self, state: State, event: Event) -> State:
        """The state after `event`; raises `InvariantError` where the table has no row."""
        following = self.rows[state].get(event)
        if following is None:
            raise InvariantError(f"a {state.value} {self._noun} cannot meet {event.value}")
        return following

    def diagram(self) -> str:
        """The table as a mermaid state diagram; events that lead the same way share an arrow."""
        lines = ["stateDiagram-v2", f"    [*] --> {self.start.value}"]
        for state, row in self.rows.items():
            for target in self.rows:
                events = [event.value for event, to in row.items() if to is target]
                if events:
                    lines.append(f"    {state.value} --> {target.value}: {' | '.join(events)}")
        lines += [f"    {state.value} --> [*]" for state in self.rows if state in self.ended]
        return "\n".join(lines) + "\n"
