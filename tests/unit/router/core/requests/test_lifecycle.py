"""The table of a request's life: every pair of state and event."""

from __future__ import annotations

import pytest

from router.core.requests.lifecycle import TRANSITIONS, RequestEvent, RequestState, next_state
from shared.primitives.errors import InvariantError
from tests.unit.router.deployment import ScriptedDeployment, request

PATHS = {  # what must be possible, written down apart from the table
    RequestState.WAITING: "Placed:prefilling PlacedWhole:extending Stopped:finished Cancelled:cancelled Expired:failed",
    RequestState.PREFILLING: "Prefilled:ready NoRoom:waiting Lost:waiting Finished:finished Rejected:failed "
    "Stopped:finished Cancelled:cancelled Expired:failed Exhausted:failed",
    RequestState.EXTENDING: "Prefilled:decoding Migrating:ready NoRoom:waiting Lost:waiting Finished:finished "
    "Rejected:failed "
    "Stopped:finished Cancelled:cancelled Expired:failed Exhausted:failed",
    RequestState.READY: "Placed:decoding LeaseEnded:waiting Lost:waiting Finished:finished Stopped:finished "
    "Cancelled:cancelled Expired:failed Exhausted:failed",
    RequestState.DECODING: "Joined:decoding Generated:decoding Migrating:ready NoRoom:ready "
    "Unreachable:ready MigrationTargetLost:ready Stale:waiting Lost:waiting Finished:finished Rejected:failed "
    "Stopped:finished Cancelled:cancelled Expired:failed Exhausted:failed",
    RequestState.FINISHED: "",
    RequestState.CANCELLED: "",
    RequestState.FAILED: "",
}
EXPECTED = {state: dict(pair.split(":") for pair in pairs.split()) for state, pairs in PATHS.items()}
PAIRS = [(state, event) for state in RequestState for event in RequestEvent]


@pytest.mark.parametrize(("state", "event"), PAIRS, ids=[f"{s.value}-{e.value}" for s, e in PAIRS])
def test_every_pair_leads_where_the_design_says_or_raises_naming_both(
    state: RequestState, event: RequestEvent
) -> None:
    target = EXPECTED[state].get(event.value)
    if target is None:
        with pytest.raises(InvariantError, match=rf"{state.value} .*{event.value}"):
            TRANSITIONS.next(state, event)
    else:
        assert TRANSITIONS.next(state, event).value == target


def test_every_event_is_in_the_table_and_every_live_state_can_end_each_way() -> None:
    assert {event for row in TRANSITIONS.rows.values() for event in row} == set(RequestEvent)
    for state in set(RequestState) - TRANSITIONS.ended:
        assert set(TRANSITIONS.rows[state].values()) >= TRANSITIONS.ended


def test_an_event_that_the_table_does_not_have_names_the_request() -> None:
    with pytest.raises(InvariantError, match="r1: a waiting request cannot meet Generated"):
        next_state(RequestState.WAITING, RequestEvent.GENERATED, "r1")


def test_a_change_of_state_is_a_log_line_and_a_token_is_none() -> None:
    world = ScriptedDeployment()
    world.submit(request("r"))
    world.prefilled("p0", "r", 10)
    world.joined("d0", "r")
    placed, computed, placed_again = (note.fields for note in world.notes("request.state"))
    changed = {"from": "waiting", "on": "Placed", "to": "prefilling"}
    assert placed == {"rid": "r", "worker": "p0", "cause": placed["cause"]} | changed
    assert (computed["on"], placed_again["on"]) == ("Prefilled", "Placed")
    world.generated("d0", "r", 1, 11)
    assert len(world.notes("request.state")) == 3
