"""The contract of fetching, on NIXL between real processes: over CMA (what one machine uses) and over TCP."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shared.transfer.nixl import NixlTransfer
from shared.transfer.protocol import FetchLanded, KvLink
from shared.transfer.self_fetch import self_fetch
from tests.fetcher_contract import (
    KV_FORMAT,
    LEASES,
    LIMITS,
    AnsweredReadsContract,
    Clock,
    FetcherContract,
    FetchWorld,
    HolderUnderTest,
    PageBuffer,
)
from tests.integration.nixl_processes import PORTS, HolderPool, epochs


@pytest.fixture(scope="module")
def local_holders() -> Iterator[HolderPool]:
    pool = HolderPool()
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def tcp_holders() -> Iterator[HolderPool]:
    pool = HolderPool()
    yield pool
    pool.close()


@pytest.fixture
def local_world(local_holders: HolderPool, monkeypatch: pytest.MonkeyPatch) -> Iterator[FetchWorld]:
    monkeypatch.delenv("UCX_TLS", raising=False)
    yield from make_world(local_holders)


@pytest.fixture
def tcp_world(tcp_holders: HolderPool, monkeypatch: pytest.MonkeyPatch) -> Iterator[FetchWorld]:
    monkeypatch.setenv("UCX_TLS", "tcp")
    yield from make_world(tcp_holders)


def make_world(pool: HolderPool) -> Iterator[FetchWorld]:
    clock, buffer = Clock(), PageBuffer()
    reader = NixlTransfer(
        "reader",
        next(epochs),
        buffer.memory,
        LEASES,
        KV_FORMAT,
        interface="lo",
        ports=PORTS,
        limits=LIMITS,
        clock=clock,
    )
    with pool.lend() as make_holder:
        yield FetchWorld(reader, buffer, clock, make_holder)
        reader.close()


class TestOnOneMachine(FetcherContract):
    """What `segue up` uses: the kernel copies from process to process, a frozen holder answers too."""

    @pytest.fixture
    def world(self, local_world: FetchWorld) -> FetchWorld:
        return local_world


class TestOverTcp(FetcherContract, AnsweredReadsContract):
    """What pods without RDMA use."""

    @pytest.fixture
    def world(self, tcp_world: FetchWorld) -> FetchWorld:
        return tcp_world


@pytest.mark.parametrize(("fixture", "transport"), [("local_world", "cma/memory"), ("tcp_world", "tcp/lo")])
def test_the_transport_is_the_one_that_ucx_chose(
    fixture: str, transport: str, request: pytest.FixtureRequest
) -> None:
    world: FetchWorld = request.getfixturevalue(fixture)
    source = world.make_holder()
    source.write(3, 77)
    link = measured(world, source)
    assert link.transport == transport
    assert link.bytes_per_second > 0


def measured(world: FetchWorld, source: HolderUnderTest) -> KvLink:
    """What the link carries. A machine too busy for a probe has another chance with every fetch."""
    while True:
        world.reader.start(1, world.baton(source, (5,)), 0, [0])
        landed = world.next_event()
        assert isinstance(landed, FetchLanded)
        if landed.link:
            return landed.link


def test_a_second_holder_over_the_same_network_has_its_transport(tcp_world: FetchWorld) -> None:
    links = [measured(tcp_world, source) for source in make_two(tcp_world)]
    assert [link.transport for link in links] == ["tcp/lo", "tcp/lo"]


def test_a_holder_frozen_at_first_contact_is_measured_when_it_has_thawed(tcp_world: FetchWorld) -> None:
    (source, other) = make_two(tcp_world)
    source.freeze()
    tcp_world.reader.start(1, tcp_world.baton(source, (5,)), 0, [0])
    tcp_world.reader.start(2, tcp_world.baton(other, (5,)), 0, [1])
    landed = tcp_world.next_event()
    assert isinstance(landed, FetchLanded)
    assert (landed.fetch_id, landed.link) == (2, None)
    source.thaw()
    assert isinstance(tcp_world.next_event(), FetchLanded)
    tcp_world.poll_until(lambda: tcp_world.reader.outstanding == 0)
    assert measured(tcp_world, source).transport == measured(tcp_world, other).transport == "tcp/lo"


def make_two(world: FetchWorld) -> tuple[HolderUnderTest, HolderUnderTest]:
    first, second = world.make_holder(), world.make_holder()
    for source in (first, second):
        source.write(3, 77)
    return first, second


@pytest.mark.parametrize("fixture", ["local_world", "tcp_world"])
def test_the_self_fetch_takes_the_whole_way(fixture: str, request: pytest.FixtureRequest) -> None:
    world: FetchWorld = request.getfixturevalue(fixture)
    assert isinstance(world.reader, NixlTransfer)
    world.clock.now = 0
    self_fetch(world.reader, world.pages.memory, KV_FORMAT, clock=world.clock)
    assert world.reader.outstanding == 0
