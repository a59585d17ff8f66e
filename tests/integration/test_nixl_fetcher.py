"""The contract of fetching, on NIXL between real processes: over CMA (what one machine uses) and over TCP."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shared.transfer.nixl import NixlTransfer
from shared.transfer.protocol import Landed
from shared.transfer.self_fetch import self_fetch
from tests.fetcher_contract import (
    KV_FORMAT,
    LEASES,
    LIMITS,
    AnsweredReadsContract,
    Clock,
    FetcherContract,
    PageBuffer,
    World,
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
def local_world(local_holders: HolderPool, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.delenv("UCX_TLS", raising=False)
    yield from make_world(local_holders)


@pytest.fixture
def tcp_world(tcp_holders: HolderPool, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setenv("UCX_TLS", "tcp")
    yield from make_world(tcp_holders)


def make_world(pool: HolderPool) -> Iterator[World]:
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
        yield World(reader, buffer, clock, make_holder)
        reader.close()


class TestOnOneMachine(FetcherContract):
    """What `segue up` uses: the kernel copies from process to process, a frozen holder answers too."""

    @pytest.fixture
    def world(self, local_world: World) -> World:
        return local_world


class TestOverTcp(FetcherContract, AnsweredReadsContract):
    """What pods without RDMA use."""

    @pytest.fixture
    def world(self, tcp_world: World) -> World:
        return tcp_world


@pytest.mark.parametrize(("fixture", "transport"), [("local_world", "cma/memory"), ("tcp_world", "tcp/lo")])
def test_the_transport_is_the_one_that_ucx_chose(
    fixture: str, transport: str, request: pytest.FixtureRequest
) -> None:
    world: World = request.getfixturevalue(fixture)
    source = world.make_holder()
    source.write(3, 77)
    world.reader.start(1, world.baton(source, (5,)), 0, [0])
    assert isinstance(world.next_event(), Landed)
    assert isinstance(world.reader, NixlTransfer)
    assert world.reader.transport == transport


@pytest.mark.parametrize("fixture", ["local_world", "tcp_world"])
def test_the_self_fetch_takes_the_whole_way(fixture: str, request: pytest.FixtureRequest) -> None:
    world: World = request.getfixturevalue(fixture)
    assert isinstance(world.reader, NixlTransfer)
    world.clock.now = 0
    assert self_fetch(world.reader, world.pages.memory, KV_FORMAT, clock=world.clock) > 0
    assert world.reader.outstanding == 0
