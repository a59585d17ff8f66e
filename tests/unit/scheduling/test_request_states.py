"""Claims about the state of a request on a worker: who writes it, and that lists which disagree with it are found."""

from __future__ import annotations

import pytest

from decode import lifecycle as decode
from decode.lifecycle import DecodeEvent, DecodeState
from prefill import lifecycle as prefill
from prefill.lifecycle import PrefillEvent, PrefillState
from shared.batch.req import Req
from shared.primitives.errors import InvariantError
from shared.scheduling.request_states import RequestStates, check_states
from tests.unit.kv.lettered_pages import request


def _in(state: DecodeState) -> Req:
    req = request("a", rid="a")
    req.state = state
    return req


def test_a_request_follows_the_table_and_every_row_taken_is_counted() -> None:
    states, req = RequestStates(decode.TRANSITIONS), _in(DecodeState.WAITING)
    states.advance(req, DecodeEvent.FETCH_STARTED)
    states.advance(req, DecodeEvent.LANDED)
    assert req.state is DecodeState.JOINING
    assert states.taken == {
        (DecodeState.WAITING, DecodeEvent.FETCH_STARTED): 1,
        (DecodeState.TRANSFERRING, DecodeEvent.LANDED): 1,
    }


def test_a_pair_that_is_not_in_the_table_raises_naming_request_state_and_event() -> None:
    states, req = RequestStates(decode.TRANSITIONS), _in(DecodeState.RUNNING)
    with pytest.raises(InvariantError, match="request a: a running request cannot meet Landed"):
        states.advance(req, DecodeEvent.LANDED)
    assert req.state is DecodeState.RUNNING
    assert not states.taken


@pytest.mark.parametrize(
    ("held", "live", "found"),
    [
        pytest.param(
            {DecodeState.JOINING: ["a"]}, [], "a is running, but held as joining", id="another state"
        ),
        pytest.param(
            {DecodeState.RUNNING: ["a", "a"]}, [], "a is running, but held as running", id="held twice"
        ),
        pytest.param({DecodeState.RUNNING: ["a"]}, [], r"still held: \['a \(running\)'\]", id="not live"),
        pytest.param({}, ["a"], r"no part of the scheduler holds: \['a \(running\)'\]", id="held nowhere"),
    ],
)
def test_lists_that_disagree_with_the_states_are_found(
    held: dict[DecodeState, list[str]], live: list[str], found: str
) -> None:
    req = _in(DecodeState.RUNNING)
    with pytest.raises(InvariantError, match=found):
        check_states({state: [req for _ in rids] for state, rids in held.items()}, [req for _ in live])


def test_every_state_of_a_worker_is_a_row_and_every_event_leads_somewhere() -> None:
    assert list(prefill.TRANSITIONS.rows) == list(PrefillState)
    assert {event for row in prefill.TRANSITIONS.rows.values() for event in row} == set(PrefillEvent)
    assert list(decode.TRANSITIONS.rows) == list(DecodeState)
    assert {event for row in decode.TRANSITIONS.rows.values() for event in row} == set(DecodeEvent)
