"""Links are probed at first contact: what that proves, what it costs, and when a link is called slow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import pytest
from structlog.testing import capture_logs

from shared.baton import Baton, Holder
from shared.transfer.fetches import Fetches
from shared.transfer.link_speed import PROBE_BYTES, PROBES_MAX, SPINS, LinkProbe
from shared.transfer.protocol import FetchEnded, FetchEvent, FetchFailed, FetchLanded
from shared.transfer.reader import PEERS_MAX, NotPostedError, ReadState, Span
from tests.doubles.in_process_transfer import InProcessFabric, InProcessReader, InProcessTransfer
from tests.fetcher_contract import (
    KV_FORMAT,
    LEASES,
    LIMITS,
    PAGE_BYTES,
    Clock,
    FetchWorld,
    HolderUnderTest,
    PageBuffer,
)
from tests.unit.transfer.in_process_world import InProcessHolder, make_world

PROBE_SPANS = PROBE_BYTES // PAGE_BYTES


@dataclass
class PacedReader(InProcessReader):
    """Each span takes its peer's seconds; each kind of connection is told of once, as UCX does."""

    fabric: InProcessFabric
    clock: Clock
    span_seconds: dict[str, float] = field(default_factory=dict)  # by uid; others take none
    transports: dict[str, str] = field(default_factory=dict)  # by uid
    posts: list[tuple[str, int]] = field(default_factory=list)  # uid and spans of each read
    asked: int = 0
    fails: bool = False
    refuses_more: bool = False  # than one read
    _told: set[str] = field(default_factory=set)
    _news: str = ""

    def __post_init__(self) -> None:
        super().__init__(self.fabric, LIMITS.fetches_max)

    def read_pages(self, holder: Holder, spans: Sequence[Span]) -> int:
        if self.refuses_more and self.posts:
            raise NotPostedError("it is gone")
        self.posts.append((holder.uid, len(spans)))
        self.clock.now += len(spans) * self.span_seconds.get(holder.uid, 0.0)
        transport = self.transports.get(holder.uid, "")
        self._news = "" if transport in self._told else transport
        self._told.add(transport)
        return super().read_pages(holder, spans)

    def state(self, handle: int) -> ReadState:
        self.asked += 1
        return ReadState.FAILED if self.fails else super().state(handle)

    def new_transport(self) -> str:
        news, self._news = self._news, ""
        return news


class Peers:
    """A probing worker, and peers with real memory."""

    def __init__(self) -> None:
        self.fabric, self.clock = InProcessFabric(), Clock()
        self.reader = PacedReader(self.fabric, self.clock)
        self.buffers = [PageBuffer(4)]
        self.own = self.join("own")
        self.probe = LinkProbe(self.own.holder, self.buffers[1].memory, self.clock)

    def join(self, uid: str, epoch: int = 1) -> InProcessTransfer:
        self.buffers.append(PageBuffer(4))
        memory = self.buffers[-1].memory
        return InProcessTransfer(self.fabric, uid, epoch, memory, LEASES, KV_FORMAT, clock=self.clock)

    def meet(self, peer: InProcessTransfer) -> str:
        return self.probe.meet(peer.holder, self.reader)

    def paced(self, uid: str, megabytes_per_second: float) -> InProcessTransfer:
        self.reader.span_seconds[uid] = PAGE_BYTES / megabytes_per_second / 1e6
        return self.join(uid)


@pytest.fixture
def peers() -> Peers:
    return Peers()


def test_first_contact_measures_the_link_and_later_fetches_do_not(peers: Peers) -> None:
    prefill = peers.paced("prefill", 800)
    peers.reader.transports["prefill"] = "tcp/eth0"
    for _ in range(4):
        assert peers.meet(prefill) == ""
    link = peers.probe.links["prefill/1"]
    assert link.transport == "tcp/eth0"
    assert link.bytes_per_second == pytest.approx(8e8)
    assert peers.reader.posts == [("prefill", 1), ("prefill", PROBE_SPANS)]
    assert not peers.probe.under_way


def test_a_worker_is_no_peer_of_itself(peers: Peers) -> None:
    peers.reader.span_seconds["own"] = 0.001
    peers.meet(peers.own)
    assert peers.probe.own_link is not None
    assert peers.probe.links == {}
    peers.meet(peers.paced("slower than memory", 1))
    assert peers.probe.slow_links == 0


def test_a_slow_link_is_warned_of_once_when_it_was_slow_three_times(peers: Peers) -> None:
    fast, slow = peers.paced("fast", 1000), peers.paced("slow", 200)
    with capture_logs() as lines:
        for contact in range(1, 6):
            peers.meet(slow)
            peers.meet(fast)
            assert len(lines) == (contact >= PROBES_MAX)
    [line] = lines
    assert line["log_level"] == "warning"
    assert (line["peer"], line["megabytes_per_second"], line["best_megabytes_per_second"]) == (
        "slow/1",
        200,
        1000,
    )
    assert peers.probe.slow_links == 1
    assert peers.reader.posts.count(("slow", PROBE_SPANS)) == PROBES_MAX


def test_a_busy_moment_at_first_contact_is_no_slow_link(peers: Peers) -> None:
    prefill, other = peers.paced("prefill", 50), peers.paced("other", 1000)
    with capture_logs() as lines:
        peers.meet(other)
        peers.meet(prefill)
        assert peers.probe.slow_links == 1
        peers.reader.span_seconds["prefill"] = PAGE_BYTES / 9e8
        for _ in range(4):
            peers.meet(prefill)
    assert lines == []
    assert peers.probe.links["prefill/1"].bytes_per_second == pytest.approx(9e8)
    assert peers.probe.slow_links == 0


def test_a_link_that_is_half_as_fast_is_not_slow(peers: Peers) -> None:
    for uid, speed in (("a", 1000), ("b", 500), ("c", 260)):
        peers.meet(peers.paced(uid, speed))
    assert peers.probe.slow_links == 0


def test_a_connection_of_a_kind_that_was_told_of_has_its_transport(peers: Peers) -> None:
    """The first peer is read as this worker reads itself; two kinds then leave it open which one a fourth has."""
    cma, tcp = "cma/memory", "tcp/eth0"
    peers.reader.transports = {"own": cma, "near": cma, "far": tcp, "farther": tcp}
    for peer in (peers.own, *(peers.join(uid) for uid in ("near", "far", "farther"))):
        peers.meet(peer)
    assert peers.probe.own_link is not None
    assert peers.probe.own_link.transport == cma
    assert [link.transport for link in peers.probe.links.values()] == [cma, tcp, f"{cma} or {tcp}"]


def test_all_peers_over_one_network_have_its_name(peers: Peers) -> None:
    peers.reader.transports = {"own": "cma/memory", "p0": "tcp/eth0", "p1": "tcp/eth0", "p2": "tcp/eth0"}
    for peer in (peers.own, *(peers.join(f"p{k}") for k in range(3))):
        peers.meet(peer)
    assert {link.transport for link in peers.probe.links.values()} == {"tcp/eth0"}


def test_where_nothing_tells_the_transport_it_is_unknown(peers: Peers) -> None:
    peers.meet(peers.own)
    peers.meet(peers.join("prefill"))
    assert peers.probe.links["prefill/1"].transport == "unknown"


def test_a_peer_that_started_anew_replaces_its_former_self(peers: Peers) -> None:
    peers.meet(peers.join("prefill", epoch=1))
    peers.meet(peers.join("prefill", epoch=2))
    peers.meet(peers.join("prefill-2"))
    assert list(peers.probe.links) == ["prefill/2", "prefill-2/1"]


def test_the_peers_met_last_are_remembered_and_no_others(peers: Peers) -> None:
    first = peers.join("first")
    peers.meet(first)
    for number in range(PEERS_MAX):
        peers.meet(peers.join(f"p{number}"))
        peers.meet(first)
    assert len(peers.probe.links) == PEERS_MAX
    assert "p0/1" not in peers.probe.links
    assert "first/1" in peers.probe.links


def test_memory_that_cannot_be_looked_into_is_measured_and_not_compared(peers: Peers) -> None:
    prefill = peers.join("prefill")
    peers.buffers[-1].fill(prefill.holder.known_page, 7)
    device = msgspec.structs.replace(prefill.holder, memory="VRAM")
    assert peers.probe.meet(device, peers.reader) == ""
    assert "prefill/1" in peers.probe.links


def test_a_worker_of_a_version_without_known_pages_is_not_probed(peers: Peers) -> None:
    older = msgspec.structs.replace(peers.join("prefill").holder, known_page=-1)
    assert peers.probe.meet(older, peers.reader) == ""
    assert (peers.reader.posts, peers.probe.links) == ([], {})


def test_a_frozen_peer_is_asked_a_bounded_number_of_times(peers: Peers) -> None:
    frozen = peers.join("frozen")
    peers.fabric.freeze(frozen.holder.agent)
    assert peers.meet(frozen) == ""
    assert peers.meet(frozen) == ""
    assert peers.reader.asked == SPINS
    assert peers.probe.under_way
    peers.fabric.thaw(frozen.holder.agent)
    peers.probe.poll()
    assert not peers.probe.under_way
    assert "frozen/1" in peers.probe.links
    peers.meet(frozen)
    peers.meet(frozen)
    assert len(peers.reader.posts) == 3, "what was measured late is measured again, once"


def test_one_link_is_probed_at_a_time(peers: Peers) -> None:
    frozen, healthy = peers.join("frozen"), peers.join("healthy")
    peers.fabric.freeze(frozen.holder.agent)
    peers.meet(frozen)
    assert peers.meet(healthy) == ""
    assert peers.reader.posts == [("frozen", 1)]
    peers.fabric.thaw(frozen.holder.agent)
    peers.probe.poll()
    peers.meet(healthy)
    assert set(peers.probe.links) == {"frozen/1", "healthy/1"}


def test_a_probe_that_failed_is_asked_after_no_more_and_ends_with_its_reader(peers: Peers) -> None:
    prefill, healthy = peers.join("prefill"), peers.join("healthy")
    peers.reader.fails = True
    peers.meet(prefill)
    peers.probe.poll()
    assert peers.reader.asked == 1
    assert peers.probe.broken(peers.reader)
    peers.probe.forget(PacedReader(peers.fabric, peers.clock))
    assert peers.probe.under_way, "another reader proves nothing"
    peers.probe.forget(peers.reader)
    peers.reader = PacedReader(peers.fabric, peers.clock)
    peers.meet(healthy)
    assert list(peers.probe.links) == ["healthy/1"]


@pytest.fixture
def world() -> Iterator[FetchWorld]:
    yield from make_world(Clock())


def fetched(world: FetchWorld, source: HolderUnderTest, fetch_id: int) -> FetchEvent:
    """What came of a fetch of page 5."""
    world.reader.start(fetch_id, world.baton(source, (5,)), 0, [fetch_id])
    return world.next_event()


def make_source(world: FetchWorld) -> HolderUnderTest:
    source = world.make_holder()
    source.write(3, 77)
    return source


def test_a_fetch_tells_what_its_link_carries(world: FetchWorld) -> None:
    landed = fetched(world, make_source(world), 1)
    assert isinstance(landed, FetchLanded)
    assert landed.link is not None
    assert landed.link.transport == "memory"
    assert world.reader.outstanding == 0


def test_a_peer_whose_known_page_has_other_bytes_is_not_fetched_from(world: FetchWorld) -> None:
    broken, sound = make_source(world), make_source(world)
    assert isinstance(broken, InProcessHolder)
    broken.buffer.fill(broken.holder.known_page, 7)
    with capture_logs() as lines:
        for fetch_id in (1, 2):
            failed = fetched(world, broken, fetch_id)
            assert isinstance(failed, FetchFailed)
            assert failed.ended
            assert "other bytes" in failed.reason
    assert [line["event"] for line in lines] == ["a peer's known page has other bytes"]
    assert world.pages.holds(1, 0)
    assert isinstance(fetched(world, sound, 3), FetchLanded)


def test_a_peer_frozen_at_first_contact_costs_others_their_measurement_until_the_fence(
    world: FetchWorld,
) -> None:
    frozen, healthy = make_source(world), make_source(world)
    frozen.freeze()
    world.reader.start(1, world.baton(frozen, (5,)), 0, [1])
    landed = fetched(world, healthy, 2)
    assert isinstance(landed, FetchLanded)
    assert landed.link is None
    world.clock.now += LIMITS.fetch_seconds_max
    assert isinstance(world.next_event(), FetchFailed)
    world.clock.now += LIMITS.fence_seconds
    assert world.next_event() == FetchEnded(1)
    assert world.reader.readers_fenced == 1
    assert world.reader.outstanding == 0
    landed = fetched(world, healthy, 3)
    assert isinstance(landed, FetchLanded)
    assert landed.link is not None


def test_a_peer_frozen_at_first_contact_is_measured_when_it_has_thawed(world: FetchWorld) -> None:
    source = make_source(world)
    source.freeze()
    world.reader.start(1, world.baton(source, (5,)), 0, [1])
    assert world.reader.poll() == []
    source.thaw()
    landed = world.next_event()
    assert isinstance(landed, FetchLanded)
    assert landed.link is not None
    assert world.reader.readers_fenced == 0


def test_a_peer_that_dies_of_its_probe_costs_the_reader_and_no_other_fetch(peers: Peers) -> None:
    """The probe is all that was posted: nothing but the fence can end it."""
    first = peers.reader
    readers = [PacedReader(peers.fabric, peers.clock), first]
    memory = peers.buffers[1].memory
    fetches = Fetches(peers.own.holder, memory, KV_FORMAT, readers.pop, LIMITS, peers.clock)
    dying, healthy = peers.join("dying"), peers.join("healthy")
    batons = [Baton("r", 1, peer.holder, KV_FORMAT, 3, 77, 1, 1, (0,)) for peer in (dying, healthy)]
    healthy.words.write(3, 77)
    first.fails = first.refuses_more = True
    fetches.start(1, batons[0], 0, [1])
    assert [type(event) for event in fetches.poll()] == [FetchFailed]
    assert (fetches.readers_fenced, fetches.outstanding) == (1, 0)
    fetches.start(2, batons[1], 0, [2])
    [landed] = [*fetches.poll(), *fetches.poll()]
    assert isinstance(landed, FetchLanded)
    assert landed.link is not None
