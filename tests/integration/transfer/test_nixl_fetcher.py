"""The contract of fetching, on NIXL between real processes: over CMA (what one machine uses) and over TCP."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shared.transfer.kv_links import MEASURED_BYTES_MIN
from shared.transfer.protocol import FetchLanded, KvLink
from shared.transfer.reader import NotPostedError, ReadState, Span
from shared.transfer.transfer import Transfer, self_fetch
from shared.transfer.transports import open_offer
from shared.wire.bounds import COUNT_MAX
from tests.fetcher_contract import (
    KV_FORMAT,
    LEASES,
    LIMITS,
    PAGE_SIZES,
    PATIENCE_SECONDS,
    AnsweredReadsContract,
    Clock,
    FetcherContract,
    FetchWorld,
    HolderUnderTest,
    PageBuffer,
    kv_format_of,
)
from tests.integration.transfer.holder_processes import HolderPool, epochs, network, worker_keys
from tests.tensor_pages import tensor_pages
from tests.waiting import until

Pools = dict[str, HolderPool]  # by the type of keys and values


@pytest.fixture(scope="module")
def local_holders() -> Iterator[HolderPool]:
    pool = HolderPool()
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def tcp_holders() -> Iterator[Pools]:
    yield from make_pools("host")


@pytest.fixture(scope="module")
def tensor_holders() -> Iterator[Pools]:
    yield from make_pools("cpu")


def make_pools(memory: str) -> Iterator[Pools]:
    pools = {
        dtype: HolderPool(memory=memory, page_bytes=page_bytes) for dtype, page_bytes in PAGE_SIZES.items()
    }
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture
def dtype() -> str:
    """Of keys and values."""
    return "float8_e4m3fn"


class InBothTypes:
    """Runs a contract with pages of 8 bits, and of 16."""

    @pytest.fixture(params=PAGE_SIZES)
    def dtype(self, request: pytest.FixtureRequest) -> str:
        return str(request.param)


@pytest.fixture
def tensor_world(tensor_holders: Pools, dtype: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FetchWorld]:
    monkeypatch.delenv("UCX_TLS", raising=False)
    yield from make_world(tensor_holders[dtype], tensor_pages(dtype), kv_format_of(dtype))


@pytest.fixture
def local_world(local_holders: HolderPool, monkeypatch: pytest.MonkeyPatch) -> Iterator[FetchWorld]:
    monkeypatch.delenv("UCX_TLS", raising=False)
    yield from make_world(local_holders)


@pytest.fixture
def tcp_world(tcp_holders: Pools, dtype: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FetchWorld]:
    monkeypatch.setenv("UCX_TLS", "tcp")
    pages = PageBuffer(page_bytes=PAGE_SIZES[dtype])
    yield from make_world(tcp_holders[dtype], pages, kv_format_of(dtype))


def make_world(
    pool: HolderPool, pages: PageBuffer | None = None, kv_format: str = KV_FORMAT
) -> Iterator[FetchWorld]:
    clock, buffer = Clock(), pages or PageBuffer()
    offer = open_offer(network(), worker_keys(), ("reader", next(epochs)), buffer.memory, LEASES)
    reader = Transfer(offer, buffer.memory, kv_format, limits=LIMITS, clock=clock)
    with pool.check_out() as make_holder:
        yield FetchWorld(reader, buffer, clock, make_holder, kv_format)
        reader.close()


class TestOnOneMachine(FetcherContract):
    """What `segue up` uses: the kernel copies from process to process, a frozen holder answers too."""

    @pytest.fixture
    def world(self, local_world: FetchWorld) -> FetchWorld:
        return local_world


class TestBetweenTensors(InBothTypes, FetcherContract):
    """What the CUDA engine uses, with its pages on a CPU: this process looks at them through torch alone."""

    @pytest.fixture
    def world(self, tensor_world: FetchWorld) -> FetchWorld:
        return tensor_world


class TestOverTcp(InBothTypes, FetcherContract, AnsweredReadsContract):
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
    assert link_after_fetch(world, source).transport == transport


@pytest.mark.parametrize("fixture", ["local_world", "tcp_world"])
def test_a_fetch_of_a_mebibyte_measures_its_link(fixture: str, request: pytest.FixtureRequest) -> None:
    world: FetchWorld = request.getfixturevalue(fixture)
    source = world.make_holder()
    source.write(3, 77)
    pages = MEASURED_BYTES_MIN // world.pages.memory.page_bytes
    assert link_after_fetch(world, source, pages - 1).bytes_per_second == 0
    assert link_after_fetch(world, source, pages).bytes_per_second > 0


def link_after_fetch(world: FetchWorld, source: HolderUnderTest, pages: int = 1) -> KvLink:
    """Fetch the first pages; what is known of the link then."""
    world.reader.start(1, world.baton(source, tuple(range(pages))), 0, range(pages))
    landed = world.next_event()
    assert isinstance(landed, FetchLanded)
    assert landed.link is not None
    return landed.link


def test_a_second_holder_over_the_same_network_has_its_transport(tcp_world: FetchWorld) -> None:
    links = [link_after_fetch(tcp_world, source) for source in make_two(tcp_world)]
    assert [link.transport for link in links] == ["tcp/lo", "tcp/lo"]


def test_a_holder_frozen_at_first_contact_holds_up_no_other_fetch(tcp_world: FetchWorld) -> None:
    (source, other) = make_two(tcp_world)
    source.freeze()
    tcp_world.reader.start(1, tcp_world.baton(source, (5,)), 0, [0])
    tcp_world.reader.start(2, tcp_world.baton(other, (5,)), 0, [1])
    landed = tcp_world.next_event()
    assert isinstance(landed, FetchLanded)
    assert landed.fetch_id == 2
    source.thaw()
    landed = tcp_world.next_event()
    assert isinstance(landed, FetchLanded)
    assert landed.fetch_id == 1
    assert tcp_world.reader.outstanding == 0


def test_an_address_of_more_than_64_bits_costs_its_read_and_nothing_else(local_world: FetchWorld) -> None:
    """Page numbers are the holder's, up to `COUNT_MAX`: times a page of 128 KiB they are no address any more."""
    source, memory = local_world.make_holder(), local_world.pages.memory
    baton = local_world.baton(source, (5,))
    reader = open_offer(network(), worker_keys(), ("far", next(epochs)), memory, LEASES).make_reader(1)
    far = Span(source.holder.pages_address + COUNT_MAX * 2**17, memory.address, memory.page_bytes)
    with pytest.raises(NotPostedError, match="cannot be read"):
        reader.read_pages(baton, [far])
    near = Span(source.holder.pages_address, memory.address, memory.page_bytes)
    handle = reader.read_pages(baton, [near])
    until(lambda: reader.state(handle) is ReadState.DONE, PATIENCE_SECONDS, "the read")
    reader.close()


def make_two(world: FetchWorld) -> tuple[HolderUnderTest, HolderUnderTest]:
    first, second = world.make_holder(), world.make_holder()
    for source in (first, second):
        source.write(3, 77)
    return first, second


@pytest.mark.parametrize("fixture", ["local_world", "tcp_world"])
def test_the_self_fetch_takes_the_whole_way(fixture: str, request: pytest.FixtureRequest) -> None:
    world: FetchWorld = request.getfixturevalue(fixture)
    assert isinstance(world.reader, Transfer)
    world.clock.now = 0
    assert self_fetch(world.reader, world.pages.memory, world.kv_format, clock=world.clock)
    assert world.reader.outstanding == 0
