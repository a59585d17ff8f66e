"""The states of a fetch, as a table. A pair that is not in it raises; what the events cost is not known here.

    reading_pages ──done──► reading_word ──held──► landed
          │                     │    └─────gone──► stale
          └──failed, timed out, abandoned──► given_up ──done, fenced──► ended

A fetch that was given up has told its owner so (`Failed`, unless the owner abandoned it) and owes one `Ended`.
"""

from __future__ import annotations

from enum import Enum

from shared.errors import InvariantError


class FetchState(Enum):
    READING_PAGES = "reading_pages"
    READING_WORD = "reading_word"
    GIVEN_UP = "given_up"
    LANDED = "landed"
    STALE = "stale"
    ENDED = "ended"


class ReadEvent(Enum):
    PAGES_DONE = "pages_done"
    WORD_HELD = "word_held"
    WORD_GONE = "word_gone"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    ABANDONED = "abandoned"
    READ_DONE = "read_done"  # of a fetch that was given up
    FENCED = "fenced"


TRANSITIONS: dict[FetchState, dict[ReadEvent, FetchState]] = {
    FetchState.READING_PAGES: {
        ReadEvent.PAGES_DONE: FetchState.READING_WORD,
        ReadEvent.FAILED: FetchState.GIVEN_UP,
        ReadEvent.TIMED_OUT: FetchState.GIVEN_UP,
        ReadEvent.ABANDONED: FetchState.GIVEN_UP,
    },
    FetchState.READING_WORD: {
        ReadEvent.WORD_HELD: FetchState.LANDED,
        ReadEvent.WORD_GONE: FetchState.STALE,
        ReadEvent.FAILED: FetchState.GIVEN_UP,
        ReadEvent.TIMED_OUT: FetchState.GIVEN_UP,
        ReadEvent.ABANDONED: FetchState.GIVEN_UP,
    },
    FetchState.GIVEN_UP: {
        ReadEvent.FAILED: FetchState.GIVEN_UP,
        ReadEvent.ABANDONED: FetchState.GIVEN_UP,
        ReadEvent.READ_DONE: FetchState.ENDED,
        ReadEvent.FENCED: FetchState.ENDED,
    },
    FetchState.LANDED: {},
    FetchState.STALE: {},
    FetchState.ENDED: {},
}


def advance(state: FetchState, event: ReadEvent) -> FetchState:
    """The next state; `InvariantError` for a pair that is not in the table."""
    try:
        return TRANSITIONS[state][event]
    except KeyError:
        raise InvariantError(f"a fetch in state {state.value} met {event.value}") from None
