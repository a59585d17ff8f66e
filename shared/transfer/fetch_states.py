"""The states of a fetch, as a table; the class `StateTable` raises for a pair that is not in it.

    checking_peer ──known──► reading_pages ──done──► reading_word ──held──► landed
          │                        │                     │    └─────gone──► stale
          ├────────────────────────┴─────────────────────┤
          │                                              └──refused──► failed
          └──read failed, timed out, abandoned──► given_up ──read done, fenced──► ended

`failed` is for a fetch of which nothing is under way: it was refused, or the peer's known page had other bytes. A
fetch in `given_up` has sent its owner `FetchFailed` (unless the owner abandoned it) and owes one `FetchEnded`. The
table does not know which reads an event ends.
"""

from __future__ import annotations

from shared.primitives.state_table import StateName, StateTable


class FetchState(StateName):
    CHECKING_PEER = "checking_peer"
    READING_PAGES = "reading_pages"
    READING_WORD = "reading_word"
    GIVEN_UP = "given_up"
    LANDED = "landed"
    STALE = "stale"
    FAILED = "failed"
    ENDED = "ended"


class ReadEvent(StateName):
    PEER_KNOWN = "peer_known"  # its known page has the right bytes, or need not be read
    PAGES_DONE = "pages_done"
    WORD_HELD = "word_held"
    WORD_GONE = "word_gone"
    REFUSED = "refused"  # with no read under way
    READ_FAILED = "failed"
    TIMED_OUT = "timed_out"
    ABANDONED = "abandoned"
    READ_DONE = "read_done"  # of a fetch that was given up
    FENCED = "fenced"


_LOST = {
    ReadEvent.REFUSED: FetchState.FAILED,
    ReadEvent.READ_FAILED: FetchState.GIVEN_UP,
    ReadEvent.TIMED_OUT: FetchState.GIVEN_UP,
    ReadEvent.ABANDONED: FetchState.GIVEN_UP,
}

FETCH_STATES = StateTable[FetchState, ReadEvent](
    "fetch",
    {
        FetchState.CHECKING_PEER: {ReadEvent.PEER_KNOWN: FetchState.READING_PAGES, **_LOST},
        FetchState.READING_PAGES: {ReadEvent.PAGES_DONE: FetchState.READING_WORD, **_LOST},
        FetchState.READING_WORD: {
            ReadEvent.WORD_HELD: FetchState.LANDED,
            ReadEvent.WORD_GONE: FetchState.STALE,
            **_LOST,
        },
        FetchState.GIVEN_UP: {
            ReadEvent.READ_FAILED: FetchState.GIVEN_UP,
            ReadEvent.ABANDONED: FetchState.GIVEN_UP,
            ReadEvent.READ_DONE: FetchState.ENDED,
            ReadEvent.FENCED: FetchState.ENDED,
        },
        FetchState.LANDED: {},
        FetchState.STALE: {},
        FetchState.FAILED: {},
        FetchState.ENDED: {},
    },
)
