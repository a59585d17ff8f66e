"""Every number that a router takes from a worker has bounds, and one beyond them ends that session alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from http import HTTPStatus
from itertools import pairwise
from typing import get_args

import msgspec
import pytest
from msgspec import inspect

from shared.links.dialing import FAULT_REST_SECONDS, FAULT_REST_SECONDS_MAX
from shared.links.events import PeerDown, PeerUp, Received
from shared.links.session import seal
from shared.wire.bounds import COUNT_MAX, LOGPROB_ROUNDING, SECONDS_MAX, ErrorStatus
from shared.wire.messages import Generated, Hello, Row, WorkerToRouter, decode_from_worker, encode
from shared.wire.sampled import LOGPROB_MIN, TokenLogprobs, bounded_logprobs
from tests.simulation.adversaries.lies import Path, changed, numbers_in
from tests.unit.links.cable import Cable, connected, downs, kinds
from tests.unit.links.two_peers import Dialing
from tests.unit.links.wire import INSTANCES

WITHOUT_FLOOR = {"TokenLogprobs.logprob", "TokenLogprobs.top"}  # -inf, of a token that cannot come
WITHOUT_CEILING = {
    "Hello.session",
    "Hello.epoch",
    "Holder.epoch",
    "Baton.nonce",
}  # 64 bits, as many as msgpack has
SAID = [message for message in INSTANCES if isinstance(message, get_args(WorkerToRouter))]
BODIES = {type(message).__name__: msgspec.msgpack.decode(encode(message)) for message in SAID}
LIES = (-1, -(2**63), 2**63, 2**64 - 1, math.nan, math.inf)


def numbers(kind: inspect.Type, name: str) -> Iterator[tuple[str, inspect.IntType | inspect.FloatType]]:
    """The numbers within a type, by the field that they are in."""
    match kind:
        case inspect.IntType() | inspect.FloatType():
            yield name, kind
        case inspect.StructType():
            for field in kind.fields:
                yield from numbers(field.type, f"{kind.cls.__name__}.{field.name}")
        case inspect.UnionType():
            for one in kind.types:
                yield from numbers(one, name)
        case inspect.VarTupleType():
            yield from numbers(kind.item_type, name)
        case inspect.TupleType():
            for one in kind.item_types:
                yield from numbers(one, name)


def test_every_number_of_a_worker_has_bounds() -> None:
    found = {
        name: kind for one in get_args(WorkerToRouter) for name, kind in numbers(inspect.type_info(one), "")
    }
    assert len(found) > 30
    for name, kind in found.items():
        floor = (kind.ge, kind.gt) != (None, None)
        ceiling = (kind.le, kind.lt) != (None, None)
        assert floor or name in WITHOUT_FLOOR, f"{name} may be below zero"
        assert ceiling or name in WITHOUT_CEILING, f"{name} may be without end"
        assert not isinstance(kind, inspect.FloatType) or ceiling, f"{name} may be infinite"


@pytest.mark.parametrize(
    ("name", "path"), [(name, path) for name, plain in BODIES.items() for path in numbers_in(plain)], ids=str
)
def test_a_number_at_its_extremes_is_within_its_bounds_or_cannot_be_read(name: str, path: Path) -> None:
    refused = 0
    for lie in LIES:
        body = msgspec.msgpack.encode(changed(BODIES[name], path, lie))
        try:
            decode_from_worker(body)
        except msgspec.ValidationError:
            refused += 1
        else:
            assert (
                path[-1] in ("session", "epoch", "nonce")
                or (lie == -1 and path[-1] == "known_page")
                or (-math.inf < lie < 0)
            ), f"{name} {path} may be {lie}"
    assert refused >= 3


@pytest.mark.parametrize("status", [*get_args(ErrorStatus), 599, 444, 200])
def test_a_worker_fails_a_request_with_a_status_that_there_is(status: int) -> None:
    body = msgspec.msgpack.encode(BODIES["Failed"] | {"status": status})
    if status in get_args(ErrorStatus):
        assert HTTPStatus(status).phrase
        assert decode_from_worker(body)
    else:
        with pytest.raises(msgspec.ValidationError, match="status"):
            decode_from_worker(body)


def row_with(logprob: float) -> Generated:
    return Generated((Row("r", 1, 0, (7,), (TokenLogprobs(logprob, 1, ((7, logprob),)),)),))


@pytest.mark.parametrize("logprob", [-math.inf, -1e300, 0.0, LOGPROB_ROUNDING])
def test_what_an_older_worker_tells_of_a_token_that_cannot_come_is_read(logprob: float) -> None:
    assert decode_from_worker(encode(row_with(logprob))) == row_with(logprob)


@pytest.mark.parametrize("computed", [-math.inf, math.inf, math.nan, -1e300, 1e-12, 0.0, -2.5])
def test_a_worker_tells_numbers_whatever_its_model_computes(computed: float) -> None:
    told = bounded_logprobs(computed, 1, [(7, computed)])
    assert LOGPROB_MIN <= told.logprob <= 0
    assert told.top == ((7, told.logprob),)
    assert told.logprob == computed or not LOGPROB_MIN <= computed <= 0


@pytest.mark.parametrize("lie", [math.inf, math.nan, -1.0, 2 * SECONDS_MAX])
def test_a_lie_ends_the_session_it_came_on_and_no_other(lie: float) -> None:
    side = Dialing()
    side.receive(seal(1, 1, msgspec.msgpack.encode(BODIES["Joined"] | {"fetch_seconds": lie})))
    (down,) = side.end.events
    assert isinstance(down, PeerDown)
    assert "fetch_seconds" in down.reason
    assert side.end.counters.malformed == 1
    assert side.other_is_served()


def lying(cable: Cable) -> None:
    """The worker says of itself that it has a request more than there can be."""
    cable.worker_sends(msgspec.structs.replace(SAID_LOAD, queued=COUNT_MAX + 1))
    cable.run()


(SAID_LOAD,) = (message for message in SAID if type(message).__name__ == "Load")


def test_a_worker_that_lies_again_is_dialed_later_each_time() -> None:
    cable = connected()
    rests = []
    for _ in range(9):
        lying(cable)
        assert kinds(cable.router_saw)[-1] is PeerDown
        ended_at = cable.now
        while kinds(cable.router_saw)[-1] is not PeerUp:
            cable.run(0.05)
        rests.append(cable.now - ended_at)
    assert rests[0] >= FAULT_REST_SECONDS
    assert all(later >= 1.8 * sooner for sooner, later in pairwise(rests[:6]))
    assert rests[-1] < FAULT_REST_SECONDS_MAX + 1


def test_a_session_that_the_core_ends_is_over_at_both_ends_and_only_once() -> None:
    cable = connected()
    up = cable.last_up(cable.router_saw)
    for session in (up.hello.session - 1, up.hello.session, up.hello.session):
        cable.router.end_faulty(up.peer, session, "it lied", cable.now)
    cable.run()
    assert downs(cable.router_saw) == ["it lied"]
    assert "it lied" in downs(cable.worker_saw)[0]
    cable.run(FAULT_REST_SECONDS + 1)
    assert kinds(cable.router_saw)[-1] is PeerUp


def test_a_hello_that_lies_comes_to_nothing() -> None:
    side = Dialing()
    greeting = Hello(session=1, role="decode", uid="d1", epoch=2, eos_token_ids=(-1,))
    side.receive(seal(1, 1, encode(greeting)))
    assert not any(isinstance(event, Received) for event in side.end.events)
    assert side.other_is_served()
