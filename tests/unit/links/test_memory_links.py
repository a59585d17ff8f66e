"""The in-memory pair keeps the promises of the links over sockets."""

from __future__ import annotations

import msgspec
import pytest

from shared.links.events import Links, PeerDown, PeerUp, Received
from shared.wire.messages import Cancel, Hello, Refused
from tests.doubles.memory_links import MemoryLinks
from tests.doubles.novelty import Novelty

ROUTER = Hello(session=0, role="router", uid="router-a", epoch=1)
WORKER = Hello(session=0, role="decode", uid="decode-a", epoch=2)


def test_what_is_sent_between_up_and_down_arrives_in_order_and_nothing_else() -> None:
    router, worker = MemoryLinks(ROUTER), MemoryLinks(WORKER)
    ends: list[Links] = [router, worker]
    router.send(worker.name, Cancel("early", 0))
    router.link(worker, session=7)
    router.send(worker.name, Cancel("a", 0))
    router.send(worker.name, Cancel("b", 0))
    worker.send(router.name, Refused("a", 0, "stale"))
    router.drop(worker, "cut")
    router.send(worker.name, Cancel("late", 0))
    router_saw, worker_saw = (end.receive(0.0) for end in ends)
    assert worker_saw == [
        PeerUp(router.name, msgspec.structs.replace(ROUTER, session=7)),
        Received(router.name, Cancel("a", 0)),
        Received(router.name, Cancel("b", 0)),
        PeerDown(router.name, "cut"),
    ]
    assert router_saw == [
        PeerUp(worker.name, msgspec.structs.replace(WORKER, session=7)),
        Received(worker.name, Refused("a", 0, "stale")),
        PeerDown(worker.name, "cut"),
    ]


def test_what_the_peer_does_not_understand_is_not_sent() -> None:
    router, worker = MemoryLinks(ROUTER), MemoryLinks(WORKER)
    router.link(worker)
    with pytest.raises(AssertionError, match="does not read Novelty"):
        router.send(worker.name, Novelty("a"))


def test_a_message_of_the_wrong_direction_cannot_cross() -> None:
    router, worker = MemoryLinks(ROUTER), MemoryLinks(WORKER)
    router.link(worker)
    with pytest.raises(msgspec.ValidationError):
        worker.send(router.name, Cancel("a", 0))
