"""KV between two processes, out of one tensor into another: right bytes, which transport, how fast, and faults.

The same claims for VRAM and, so that they are tried everywhere, for tensors on the CPU. `-s` shows the GB/s.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from shared.transfer.fetches import FetchLimits
from shared.transfer.protocol import FetchEnded, FetchEvent, FetchFailed, FetchLanded, KvTransport
from shared.transfer.transfer import Transfer, self_fetch
from shared.transfer.transports import open_offer
from tests.fetcher_contract import KV_FORMAT, LEASES, Clock, FetchWorld, byte_of
from tests.integration.transfer.holder_processes import (
    HolderPool,
    HolderProcess,
    epochs,
    network,
    worker_keys,
)
from tests.tensor_pages import TensorPages

PAGE_BYTES = 2_621_440  # Qwen3-14B, 16 tokens
PAGES = {"cpu": 48, "cuda": 1024}
LIMITS = FetchLimits(fetches_max=16, fetch_seconds_max=10.0, quarantine_seconds=5.0)
LATE_SECONDS = 1.0  # how long bytes are waited for that must not come
ROUNDS = 3
SEALED_PAGES = 128  # of a GPU, which copies what is sealed by way of the host


@dataclass
class Between:
    """A reader with its pages in a tensor of this process, and holders with theirs in others."""

    device: str
    transport: KvTransport
    new_holder: Callable[[], HolderProcess]

    def __post_init__(self) -> None:
        self.clock, self.pages = Clock(), TensorPages(self.device, PAGES[self.device], PAGE_BYTES)
        memory = self.pages.memory
        offer = open_offer(network(self.transport), worker_keys(), ("reader", next(epochs)), memory, LEASES)
        self.transfer = Transfer(offer, memory, KV_FORMAT, limits=LIMITS, clock=self.clock)
        self.world = FetchWorld(self.transfer, self.pages, self.clock, self.start_holder)
        pages = PAGES[self.device]
        self.everything = tuple(range(min(pages, SEALED_PAGES) if self.transport == "tls" else pages))

    def start_holder(self) -> HolderProcess:
        holder = self.new_holder()
        holder.write(3, 77)
        return holder

    def fetch(self, source: HolderProcess, pages: tuple[int, ...], fetch_id: int = 1) -> FetchEvent:
        """Fetch the pages to the same places here; the first event."""
        self.start(source, pages, fetch_id)
        return self.world.next_event()

    def start(self, source: HolderProcess, pages: tuple[int, ...], fetch_id: int = 1) -> None:
        self.transfer.start(fetch_id, self.world.baton(source, pages), 0, pages)

    def wrong(self, pages: tuple[int, ...]) -> list[int]:
        """Those that do not hold the holder's bytes."""
        return [page for page in pages if not self.pages.holds(page, byte_of(page))]


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda":
        request.getfixturevalue("gpu")
    return str(request.param)


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[tuple[str, str], HolderPool]]:
    pools: dict[tuple[str, str], HolderPool] = {}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture(params=["nixl", "nixl over tcp", "tls"])
def between(
    device: str,
    pools: dict[tuple[str, str], HolderPool],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Between]:
    monkeypatch.delenv("UCX_TLS", raising=False)
    if request.param == "nixl over tcp":
        monkeypatch.setenv("UCX_TLS", "tcp,cuda_copy" if device == "cuda" else "tcp")
    transport: KvTransport = "tls" if request.param == "tls" else "nixl"
    pool = pools.setdefault((device, request.param), HolderPool(transport, device, PAGES[device], PAGE_BYTES))
    with pool.check_out() as new_holder:
        between = Between(device, transport, new_holder)
        yield between
        between.transfer.close()


def test_every_page_arrives_as_it_was_sent_and_the_transport_has_a_name(between: Between) -> None:
    source = between.start_holder()
    best = 0.0
    for _ in range(ROUNDS):
        for page in between.everything:
            between.pages.fill(page, 0)
        begin = time.perf_counter()
        landed = between.fetch(source, between.everything)
        seconds = time.perf_counter() - begin
        assert isinstance(landed, FetchLanded), landed
        assert between.wrong(between.everything) == []
        best = max(best, landed.fetched_bytes / seconds / 1e9)
    (transport,) = between.transfer.counters.fetches
    assert transport not in ("", "unknown")
    sys.stdout.write(f"\n{between.device}, {transport}: {best:.2f} GB/s, the best of {ROUNDS}\n")


def test_a_worker_fetches_from_itself(between: Between) -> None:
    between.clock.now = 0.0
    assert self_fetch(between.transfer, between.pages.memory, KV_FORMAT, clock=time.monotonic)


def test_wrong_bytes_are_seen_in_the_memory_of_a_device(between: Between) -> None:
    source = between.start_holder()
    source.spoil()
    failed = between.fetch(source, (5,))
    assert isinstance(failed, FetchFailed)
    assert "came with other bytes" in failed.reason


def test_a_holder_that_is_killed_in_mid_read_costs_its_own_fetch_alone(between: Between) -> None:
    source, other = between.start_holder(), between.start_holder()
    assert isinstance(between.fetch(source, (5,)), FetchLanded)
    assert isinstance(between.fetch(other, (6,)), FetchLanded)
    between.start(source, between.everything)
    source.kill()
    between.clock.now += LIMITS.fetch_seconds_max
    event = between.world.next_event()
    if isinstance(event, FetchFailed) and not event.ended:
        between.clock.now += LIMITS.quarantine_seconds
        event = between.world.next_event()
    assert isinstance(event, (FetchLanded, FetchFailed, FetchEnded))
    for page in between.everything:  # this process computes on, in its own pages
        between.pages.fill(page, 250)
    assert all(between.pages.holds(page, 250) for page in between.everything)
    assert isinstance(between.fetch(other, (1, 2, 3), 2), FetchLanded)
    assert between.wrong((1, 2, 3)) == []


def test_nothing_lands_after_the_fence(between: Between) -> None:
    source = between.start_holder()
    assert isinstance(between.fetch(source, (5,)), FetchLanded)
    source.freeze()
    between.start(source, between.everything)
    between.transfer.abandon(1)
    between.clock.now += LIMITS.quarantine_seconds
    assert between.world.next_event() == FetchEnded(1)
    for page in between.everything:
        between.pages.fill(page, 255)
    source.thaw()
    pause, deadline = threading.Event(), time.monotonic() + LATE_SECONDS
    while time.monotonic() < deadline:
        between.transfer.poll()
        pause.wait(0.01)
    between.pages.memory.access.fence()
    assert all(between.pages.holds(page, 255) for page in between.everything)
