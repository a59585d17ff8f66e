"""Messages of the right type with any values that their types admit: no router falls, whatever workers say and when.

The messages are made of the types themselves, at their extremes more often than not, about requests that there are: a
fuzzer of bytes rarely gets as far as a valid `Joined`. Nobody knows what is true here; but no request may get more
than it asked for, each ends once, and the books agree after every message.
"""

from __future__ import annotations

import math
from typing import Any, get_args

from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect

from router.core.effects import NewTokens, RequestEnded
from router.core.worker_events import books
from shared.links.events import PeerUp
from shared.wire.bounds import COUNT_MAX
from shared.wire.messages import (
    Closed,
    Heartbeat,
    Hello,
    Message,
    Prefill,
    WorkerToRouter,
    decode_from_worker,
    encode,
)
from tests.fuzzing import fuzzed
from tests.unit.router.deployment import ScriptedDeployment, hello, request

RIDS = ("a", "b", "c")
PEERS = ("p0", "p1", "d0", "d1")
MOST = 8  # tokens that each request asks for
LINK_LAYER = (Hello, Heartbeat, Closed)  # never seen by a core
SAID = [message for message in get_args(WorkerToRouter) if message not in LINK_LAYER]
PLAIN: dict[type[inspect.Type], st.SearchStrategy[Any]] = {
    inspect.StrType: st.sampled_from(("", "kv", "p0", "d0", "m", "x" * 1024)),
    inspect.BytesType: st.binary(max_size=4),
    inspect.BoolType: st.booleans(),
    inspect.NoneType: st.none(),
}


def values(kind: inspect.Type, name: str = "") -> st.SearchStrategy[Any]:
    """Whatever a type admits."""
    if name == "rid":
        return st.sampled_from(RIDS)
    if name == "attempt":
        return st.sampled_from((1, 1, 1, 2, 3, COUNT_MAX))
    match kind:
        case inspect.IntType() | inspect.FloatType():
            return _numbers(kind)
        case inspect.LiteralType(values=words):
            return st.sampled_from(words)
        case inspect.UnionType(types=kinds):
            return st.one_of(*(values(one) for one in kinds))
        case inspect.VarTupleType(item_type=item, min_length=least, max_length=most):
            return st.lists(values(item), min_size=least or 0, max_size=min(most or 9, 9)).map(tuple)
        case inspect.TupleType(item_types=kinds):
            return st.tuples(*(values(one) for one in kinds))
        case inspect.StructType(cls=struct, fields=fields):
            return st.builds(struct, **{each.name: values(each.type, each.name) for each in fields})
        case _:
            return PLAIN[type(kind)]


def _numbers(kind: inspect.IntType | inspect.FloatType) -> st.SearchStrategy[float]:
    """Both ends, what there may be, and anything between."""
    if isinstance(kind, inspect.FloatType):
        low = -math.inf if kind.ge is None else float(kind.ge)
        high = math.inf if kind.le is None else float(kind.le)
        return st.sampled_from((low, high, 5e-324)) | st.floats(low, high)
    least = -1 if kind.ge is None else int(kind.ge)
    most = int(kind.le) if kind.le is not None else int(kind.lt) - 1 if kind.lt is not None else 2**64 - 1
    return st.sampled_from((least, most)) | st.integers(max(least, 0), 9).map(lambda n: max(n, least))


# Deferred: to make them takes a third of a second.
MESSAGES: st.SearchStrategy[Any] = st.deferred(
    lambda: st.one_of(*(values(inspect.type_info(message)) for message in SAID))
)
HELLOS: st.SearchStrategy[Any] = st.deferred(lambda: values(inspect.type_info(Hello)))


def start() -> ScriptedDeployment:
    """Three requests and two workers a role; the first request decodes."""
    world = ScriptedDeployment(2, 2, prefilling_per_slot=0.25)
    for rid in RIDS:
        world.submit(request(rid, max_new_tokens=MOST))
    peer = world.placed(Prefill, "a")
    assert peer is not None
    world.prefilled(peer, "a", 7)
    return world


def prove(world: ScriptedDeployment) -> None:
    """Nobody has more than asked for, nobody ended twice, and the books agree."""
    books.check(world.core._requests, world.core.fleet)
    for rid in RIDS:
        tokens = [e.token_ids for e in world.effects if isinstance(e, NewTokens) and e.rid == rid]
        assert sum(map(len, tokens)) <= MOST
        assert len([e for e in world.effects if isinstance(e, RequestEnded) and e.rid == rid]) <= 1
        world.core.debug(rid)
    assert not world.core.counters.worker_faults, "the core failed at what its types admit"


@fuzzed
@given(said=st.lists(st.tuples(st.sampled_from(PEERS), MESSAGES), min_size=1, max_size=6))
def test_any_values_of_any_message_cost_no_more_than_their_requests(said: list[tuple[str, Message]]) -> None:
    world = start()
    for peer, message in said:
        assert decode_from_worker(encode(message)) == message, "a router would not have read it"
        world.say(peer, message)
        prove(world)
    world.wait(2.0)
    for rid in RIDS:
        world.cancel(rid)
    prove(world)
    world.assert_nothing_left()


@fuzzed
@given(one=HELLOS, said=st.lists(MESSAGES, max_size=3))
def test_any_hello_is_a_worker_like_another_or_none(one: Hello, said: list[Message]) -> None:
    world = start()
    world.link(PeerUp("liar", one))
    for message in said:
        world.say("liar", message)
        prove(world)
    world.submit(request("d", tuple(range(700))))
    world.link(PeerUp("honest", hello("decode", "honest")))
    world.down("liar")
    prove(world)
