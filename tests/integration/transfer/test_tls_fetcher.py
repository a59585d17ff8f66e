"""The contract of fetching, over the TLS transport between real processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shared.transfer.protocol import FetchFailed, FetchLanded
from shared.transfer.transfer import Transfer, self_fetch
from shared.transfer.transports import open_offer
from tests.fetcher_contract import (
    KV_FORMAT,
    LEASES,
    LIMITS,
    PAGE_SIZES,
    AnsweredReadsContract,
    Clock,
    FetcherContract,
    FetchWorld,
    PageBuffer,
    kv_format_of,
)
from tests.integration.transfer.holder_processes import HolderPool, epochs, network, worker_keys
from tests.tensor_pages import tensor_pages


@pytest.fixture(scope="module")
def tls_holders() -> Iterator[HolderPool]:
    pool = HolderPool("tls")
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def staged_holders() -> Iterator[dict[str, HolderPool]]:
    """By the type of keys and values."""
    pools = {
        dtype: HolderPool("tls", memory="cpu", page_bytes=page_bytes)
        for dtype, page_bytes in PAGE_SIZES.items()
    }
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture
def world(tls_holders: HolderPool) -> Iterator[FetchWorld]:
    yield from make_world(tls_holders, PageBuffer())


@pytest.fixture
def dtype() -> str:
    """Of keys and values in tensors."""
    return "float8_e4m3fn"


@pytest.fixture
def staged_world(staged_holders: dict[str, HolderPool], dtype: str) -> Iterator[FetchWorld]:
    yield from make_world(staged_holders[dtype], tensor_pages(dtype), kv_format_of(dtype))


def make_world(pool: HolderPool, buffer: PageBuffer, kv_format: str = KV_FORMAT) -> Iterator[FetchWorld]:
    clock = Clock()
    offer = open_offer(network("tls"), worker_keys(), ("reader", next(epochs)), buffer.memory, LEASES)
    reader = Transfer(offer, buffer.memory, kv_format, limits=LIMITS, clock=clock)
    with pool.check_out() as make_holder:
        yield FetchWorld(reader, buffer, clock, make_holder, kv_format)
        reader.close()


class TestTls(FetcherContract, AnsweredReadsContract):
    """What pods without RDMA use."""


class TestStaged(FetcherContract, AnsweredReadsContract):
    """What pods with GPUs and without RDMA use: both ends copy portions out of a tensor and into one."""

    @pytest.fixture(params=PAGE_SIZES)
    def dtype(self, request: pytest.FixtureRequest) -> str:
        return str(request.param)

    @pytest.fixture
    def world(self, staged_world: FetchWorld) -> FetchWorld:
        return staged_world


@pytest.mark.parametrize(("fixture", "transport"), [("world", "tls"), ("staged_world", "tls/staged")])
def test_the_link_names_the_tls_transport(
    fixture: str, transport: str, request: pytest.FixtureRequest
) -> None:
    world: FetchWorld = request.getfixturevalue(fixture)
    source = world.make_holder()
    source.write(3, 77)
    world.reader.start(1, world.baton(source, (5,)), 0, [0])
    landed = world.next_event()
    assert isinstance(landed, FetchLanded)
    assert landed.link is not None
    assert landed.link.transport == transport


def test_the_self_fetch_takes_the_whole_way(world: FetchWorld) -> None:
    assert isinstance(world.reader, Transfer)
    world.clock.now = 0
    assert self_fetch(world.reader, world.pages.memory, KV_FORMAT, clock=world.clock) == "tls"


def test_a_holder_that_offers_nixl_is_refused_with_the_reason(world: FetchWorld) -> None:
    nixl = HolderPool()
    try:
        with nixl.check_out() as make_holder:
            source = make_holder()
            source.write(3, 77)
            world.reader.start(1, world.baton(source, (5,)), 0, [0])
            failed = world.next_event()
            assert isinstance(failed, FetchFailed)
            assert failed.ended
            assert "give all workers one kv_transport" in failed.reason
    finally:
        nixl.close()
