"""The table of a request's life: every pair of state and event."""

from __future__ import annotations

import pytest

from router.core.lifecycle import (
    ENDED,
    TRANSITIONS,
    Lifecycle,
    RequestEvent,
    RequestState,
    diagram,
    next_state,
)
from shared.errors import InvariantError

PATHS = {  # what must be possible, written down apart from the table
    RequestState.WAITING: "Placed:prefilling Stopped:finished Cancelled:cancelled Expired:failed",
    RequestState.PREFILLING: "Prefilled:ready NoRoom:waiting Lost:waiting Finished:finished Rejected:failed "
    "Stopped:finished Cancelled:cancelled Expired:failed Exhausted:failed",
    RequestState.READY: "Placed:decoding LeaseEnded:waiting Lost:waiting Stopped:finished "
    "Cancelled:cancelled Expired:failed Exhausted:failed",
    RequestState.DECODING: "Joined:decoding Generated:decoding Migrating:ready NoRoom:ready MigrationTargetLost:ready "
    "Stale:waiting Lost:waiting Finished:finished Rejected:failed Stopped:finished Cancelled:cancelled "
    "Expired:failed Exhausted:failed",
    RequestState.FINISHED: "",
    RequestState.CANCELLED: "",
    RequestState.FAILED: "",
}
EXPECTED = {state: dict(pair.split(":") for pair in pairs.split()) for state, pairs in PATHS.items()}
PAIRS = [(state, event) for state in RequestState for event in RequestEvent.__subclasses__()]


@pytest.mark.parametrize(("state", "event"), PAIRS, ids=[f"{s.value}-{e.__name__}" for s, e in PAIRS])
def test_every_pair_leads_where_the_design_says_or_raises_naming_both(
    state: RequestState, event: type[RequestEvent]
) -> None:
    target = EXPECTED[state].get(event.__name__)
    if target is None:
        with pytest.raises(InvariantError, match=rf"{state.value} .*{event.__name__}"):
            next_state(state, event)
    else:
        assert next_state(state, event).value == target


def test_every_event_is_in_the_table_and_every_live_state_can_end_each_way() -> None:
    assert {event for row in TRANSITIONS.values() for event in row} == set(RequestEvent.__subclasses__())
    for state in set(RequestState) - ENDED:
        assert set(TRANSITIONS[state].values()) >= ENDED


def test_a_refused_transition_leaves_the_state_and_names_the_request() -> None:
    from router.core.lifecycle import Generated

    life = Lifecycle("r1")
    with pytest.raises(InvariantError, match="r1: a waiting request cannot meet Generated"):
        life.advance(Generated())
    assert life.state is RequestState.WAITING


def test_the_diagram_has_an_arrow_for_every_row_of_the_table() -> None:
    picture = diagram()
    for state, row in EXPECTED.items():
        for event, target in row.items():
            (arrow,) = [
                line for line in picture.splitlines() if line.startswith(f"    {state.value} --> {target}")
            ]
            assert event in arrow.partition(": ")[2].split(" | ")
