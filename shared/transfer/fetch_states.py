"""The states of a fetch, as a table. A pair that is not in it raises; what the events cost is not known here.

    reading_pages ──done──► reading_word ──held──► landed
          │                     │    └─────gone──► stale
          └──failed, timed out, abandoned──► given_up ──done, fenced──► ended

A fetch that was given up has told its owner so (`Failed`, unless the owner abandoned it) and owes one `Ended`.
"""

from __future__ import annotations

from enum import Enum

from shared.errors import InvariantError


class State(Enum):
    READING_PAGES = "reading_pages"
    READING_WORD = "reading_word"
    GIVEN_UP = "given_up"
    LANDED = "landed"
    STALE = "stale"
    ENDED = "ended"


class Event(Enum):
    PAGES_DONE = "pages_done"
    WORD_HELD = "word_held"
    WORD_GONE = "word_gone"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    ABANDONED = "abandoned"
    READ_DONE = "read_done"  # of a fetch that was given up
    FENCED = "fenced"


TRANSITIONS: dict[State, dict[Event, State]] = {
    State.READING_PAGES: {
        Event.PAGES_DONE: State.READING_WORD,
        Event.FAILED: State.GIVEN_UP,
        Event.TIMED_OUT: State.GIVEN_UP,
        Event.ABANDONED: State.GIVEN_UP,
    },
    State.READING_WORD: {
        Event.WORD_HELD: State.LANDED,
        Event.WORD_GONE: State.STALE,
        Event.FAILED: State.GIVEN_UP,
        Event.TIMED_OUT: State.GIVEN_UP,
        Event.ABANDONED: State.GIVEN_UP,
    },
    State.GIVEN_UP: {
        Event.FAILED: State.GIVEN_UP,
        Event.ABANDONED: State.GIVEN_UP,
        Event.READ_DONE: State.ENDED,
        Event.FENCED: State.ENDED,
    },
    State.LANDED: {},
    State.STALE: {},
    State.ENDED: {},
}


def advance(state: State, event: Event) -> State:
    """The next state; `InvariantError` for a pair that is not in the table."""
    try:
        return TRANSITIONS[state][event]
    except KeyError:
        raise InvariantError(f"a fetch in state {state.value} met {event.value}") from None
