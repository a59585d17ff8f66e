"""KV links: what the first fetch from a peer proves, and when a link is called slow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import pytest
from structlog.testing import capture_logs

from shared.links.events import peer_name
from shared.transfer.counters import KvCounters
from shared.transfer.fetches import Fetches
from shared.transfer.kv_links import MEASURED_BYTES_MIN, RECENT_FETCHES, SLOW_FETCHES_MIN, KvLinks
from shared.transfer.protocol import FetchEnded, FetchEvent, FetchFailed, FetchLanded, KvLink
from shared.transfer.rank_reader import RankReader, WorkerReader
from shared.transfer.reader import PEERS_MAX, ReadState, Span
from shared.wire.baton import Baton, Holder, agent_name
from shared.wire.messages import Hello
from tests.doubles.in_process_transfer import InProcessFabric, InProcessOffer, InProcessReader
from tests.fetcher_contract import (
    KV_FORMAT,
    LEASES,
    LIMITS,
    PAGE_BYTES,
    Clock,
    FetchWorld,
    HolderUnderTest,
    PageBuffer,
    byte_of,
)
from tests.unit.transfer.in_process_world import InProcessHolder, make_world

MIB = 2**20


def holder(uid: str, epoch: int = 1, where: bytes = b"") -> Holder:
    return Holder(uid, epoch, agent_name(uid, epoch), where, 0, PAGE_BYTES, 0, known_page=7)


def name(uid: str, epoch: int = 1) -> str:
    return f"{uid}/{epoch:016x}"


class Peers:
    """The links of one worker, to peers that are all sound."""

    def __init__(self) -> None:
        self.links = KvLinks(holder("own"), KvCounters())

    def check(self, uid: str, transport: str = "", epoch: int = 1) -> None:
        self.links.note_check(holder(uid, epoch), transport, right_bytes=True)

    def fetch(self, uid: str, megabytes_per_second: float, fetched_bytes: int = 8 * MIB) -> None:
        self.links.note_fetch(holder(uid), fetched_bytes, fetched_bytes / (megabytes_per_second * 1e6))

    def transport(self, uid: str) -> str:
        link = self.links.link(holder(uid))
        assert link is not None
        return link.transport


@pytest.fixture
def peers() -> Peers:
    peers = Peers()
    for uid in ("fast", "slow"):
        peers.check(uid, "tcp/eth0")
    return peers


# ---- speed -----------------------------------------------------------------------------------------------------


def test_the_best_of_the_recent_fetches_is_the_speed_of_a_link(peers: Peers) -> None:
    for speed in (50, 800, 300):
        peers.fetch("fast", speed)
    assert peers.links.links == {name("fast"): KvLink("tcp/eth0", 8e8)}
    for _ in range(RECENT_FETCHES):
        peers.fetch("fast", 100)
    assert peers.links.links == {name("fast"): KvLink("tcp/eth0", 1e8)}


def test_a_fetch_below_a_mebibyte_measures_nothing(peers: Peers) -> None:
    peers.fetch("fast", 800, MEASURED_BYTES_MIN - 1)
    assert peers.links.links == {}
    assert peers.links.link(holder("fast")) == KvLink("tcp/eth0", 0.0)
    peers.fetch("fast", 800, MEASURED_BYTES_MIN)
    assert list(peers.links.links) == [name("fast")]


def test_a_slow_link_is_logged_once_after_three_measured_fetches(peers: Peers) -> None:
    with capture_logs() as lines:
        for fetch in range(1, 6):
            peers.fetch("slow", 200)
            peers.fetch("fast", 1000)
            assert len(lines) == peers.links.slow_links == (fetch >= SLOW_FETCHES_MIN)
    [line] = lines
    assert (line["event"], line["log_level"]) == ("transfer.slow_link", "warning")
    assert (line["peer"], line["transport"]) == (name("slow"), "tcp/eth0")
    assert (line["megabytes_per_second"], line["best_megabytes_per_second"]) == (200, 1000)


def test_a_busy_moment_makes_no_slow_link(peers: Peers) -> None:
    peers.fetch("fast", 1000)
    with capture_logs() as lines:
        for speed in (50, 60, 900, 50, 60):
            peers.fetch("slow", speed)
    assert lines == []
    assert peers.links.slow_links == 0


def test_a_link_that_is_half_as_fast_is_not_slow(peers: Peers) -> None:
    for _ in range(SLOW_FETCHES_MIN):
        peers.fetch("fast", 1000)
        peers.fetch("slow", 260)
    assert peers.links.slow_links == 0


def test_a_worker_is_no_peer_of_itself(peers: Peers) -> None:
    peers.check("own", "cma/memory")
    for _ in range(SLOW_FETCHES_MIN):
        peers.fetch("own", 10_000)
        peers.fetch("slow", 200)
    assert peers.transport("own") == "cma/memory"
    assert list(peers.links.links) == [name("slow")]
    assert peers.links.slow_links == 0


# ---- names -----------------------------------------------------------------------------------------------------


def test_a_link_of_a_kind_that_was_printed_before_has_its_transport() -> None:
    """The first peer is read as this worker reads itself; two kinds then leave it open which one a fourth has."""
    peers = Peers()
    cma, tcp = "cma/memory", "tcp/eth0"
    for uid, printed in (("own", cma), ("near", ""), ("far", tcp), ("farther", "")):
        peers.check(uid, printed)
    found = [peers.transport(uid) for uid in ("own", "near", "far", "farther")]
    assert found == [cma, cma, tcp, f"{cma} or {tcp}"]


def test_all_peers_over_one_network_have_its_name() -> None:
    peers = Peers()
    for uid, printed in (("own", "cma/memory"), ("p0", "tcp/eth0"), ("p1", ""), ("p2", "")):
        peers.check(uid, printed)
    assert {peers.transport(uid) for uid in ("p0", "p1", "p2")} == {"tcp/eth0"}


def test_where_nothing_prints_the_transport_it_is_unknown() -> None:
    peers = Peers()
    peers.check("own")
    peers.check("prefill")
    assert peers.transport("prefill") == "unknown"


def test_a_peer_that_restarted_replaces_its_former_self() -> None:
    peers = Peers()
    for uid, epoch in (("prefill", 1), ("prefill", 2), ("prefill-2", 1)):
        peers.check(uid, epoch=epoch)
    assert peers.links.link(holder("prefill", 1)) is None
    assert peers.links.link(holder("prefill", 2)) is not None
    assert peers.links.link(holder("prefill-2", 1)) is not None


def test_the_peers_used_last_are_remembered_and_no_others() -> None:
    peers = Peers()
    peers.check("first")
    for number in range(PEERS_MAX):
        peers.check(f"p{number}")
        peers.links.note_use(holder("first"))
    assert peers.links.needs_check(holder("p0"))
    assert not peers.links.needs_check(holder("first"))
    assert not peers.links.needs_check(holder(f"p{PEERS_MAX - 1}"))


def test_a_check_at_one_address_is_none_of_another() -> None:
    """Two holders of one name are two peers: neither the check of one nor its refusal is the other's."""
    peers = Peers()
    here, there = holder("p", where=b"here"), holder("p", where=b"there")
    peers.links.note_check(here, "", right_bytes=False)
    assert peers.links.refusal(here)
    assert peers.links.needs_check(there)
    peers.links.note_check(there, "", right_bytes=True)
    assert not peers.links.refusal(there)
    assert peers.links.refusal(here), "it is not forgotten for the other's sake"


def test_a_worker_has_one_name_on_its_links_and_in_its_batons() -> None:
    hello = Hello(session=1, role="decode", uid="d0", epoch=0xABC)
    assert peer_name(hello) == holder("d0", 0xABC).name == "d0/0000000000000abc"


# ---- the first fetch from a peer -------------------------------------------------------------------------------


@dataclass
class CountingReader(InProcessReader):
    """Counts what it is asked for, and fails on request."""

    fabric: InProcessFabric
    posts: list[tuple[str, int]] = field(default_factory=list)  # uid and spans of each read of pages
    fails: bool = False

    def __post_init__(self) -> None:
        super().__init__(self.fabric, LIMITS.fetches_max)

    def read_pages(self, baton: Baton, spans: Sequence[Span]) -> int:
        self.posts.append((baton.holder.uid, len(spans)))
        return super().read_pages(baton, spans)

    def state(self, handle: int) -> ReadState:
        return ReadState.FAILED if self.fails else super().state(handle)


class CountedFetches:
    """The fetches of one worker with a counting reader, and a sound peer to read from."""

    def __init__(self) -> None:
        self.fabric = InProcessFabric()
        clock = Clock()
        self.source = InProcessHolder(self.fabric, "prefill", clock)
        self.source.write(3, 77)
        self.buffer = PageBuffer()
        own = InProcessOffer(self.fabric, "own", 1, self.buffer.memory, LEASES).holder
        self.readers: list[CountingReader] = []
        memory = self.buffer.memory
        self.fetches = Fetches(own, memory, KV_FORMAT, self.make_reader, LIMITS, clock, KvCounters())

    def make_reader(self) -> WorkerReader:
        self.readers.append(CountingReader(self.fabric))
        return WorkerReader(RankReader(self.readers[-1], self.buffer.memory))

    def fetch(self, fetch_id: int, holder: Holder | None = None, pages: Sequence[int] = (5,)) -> FetchEvent:
        """What came of a fetch into the pages from `fetch_id` on."""
        baton = Baton("r", 1, holder or self.source.holder, KV_FORMAT, 3, 77, 1, 1, tuple(pages))
        self.fetches.start(fetch_id, baton, 0, range(fetch_id, fetch_id + len(pages)))
        for _ in range(10):
            if events := self.fetches.poll():
                return events[0]
        raise AssertionError("no event")


@pytest.fixture
def counted() -> CountedFetches:
    return CountedFetches()


def test_the_first_fetch_reads_the_known_page_and_later_ones_do_not(counted: CountedFetches) -> None:
    for fetch_id in (1, 2):
        assert isinstance(counted.fetch(fetch_id), FetchLanded)
        assert counted.buffer.holds(fetch_id, byte_of(5)), "the page of the request, not the known one"
    assert counted.readers[0].posts == [("prefill", 1)] * 3


def test_a_fetch_of_no_pages_needs_no_check(counted: CountedFetches) -> None:
    assert isinstance(counted.fetch(1, pages=()), FetchLanded)
    assert counted.readers[0].posts == []


def test_memory_of_a_device_is_compared_as_well(counted: CountedFetches) -> None:
    counted.source.buffer.fill(counted.source.holder.known_page, 7)
    failed = counted.fetch(1, msgspec.structs.replace(counted.source.holder, memory="VRAM"))
    assert isinstance(failed, FetchFailed)
    assert "came with other bytes" in failed.reason


def test_a_worker_without_a_known_page_is_not_checked(counted: CountedFetches) -> None:
    assert isinstance(
        counted.fetch(1, msgspec.structs.replace(counted.source.holder, known_page=-1)), FetchLanded
    )
    assert counted.readers[0].posts == [("prefill", 1)]


def test_a_peer_that_fails_during_its_check_costs_the_reader_and_no_other_fetch(
    counted: CountedFetches,
) -> None:
    counted.readers[0].fails = True
    failed = counted.fetch(1)
    assert isinstance(failed, FetchFailed)
    assert not failed.ended
    assert (counted.fetches.readers_fenced, counted.fetches.outstanding) == (1, 0)
    assert isinstance(counted.fetch(2), FetchLanded)


@pytest.fixture
def world() -> Iterator[FetchWorld]:
    yield from make_world(Clock())


def start(world: FetchWorld, source: HolderUnderTest, fetch_id: int) -> None:
    """Fetch page 5 into the page of the fetch's number."""
    world.reader.start(fetch_id, world.baton(source, (5,)), 0, [fetch_id])


def fetched(world: FetchWorld, source: HolderUnderTest, fetch_id: int) -> FetchEvent:
    start(world, source, fetch_id)
    return world.next_event()


def make_source(world: FetchWorld) -> HolderUnderTest:
    source = world.make_holder()
    source.write(3, 77)
    return source


def test_a_fetch_names_its_transport(world: FetchWorld) -> None:
    landed = fetched(world, make_source(world), 1)
    assert isinstance(landed, FetchLanded)
    assert landed.link == KvLink("memory", 0.0)
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
    assert [line["event"] for line in lines] == ["transfer.wrong_bytes"]
    assert world.pages.holds(2, 0), "nothing is read from it any more"
    assert world.reader.outstanding == 0
    assert isinstance(fetched(world, sound, 3), FetchLanded)


def test_known_bytes_that_lay_in_the_target_already_prove_nothing(world: FetchWorld) -> None:
    broken = make_source(world)
    assert isinstance(broken, InProcessHolder)
    broken.buffer.fill(broken.holder.known_page, 0)
    world.pages.memory.write_known_bytes(1)
    assert isinstance(fetched(world, broken, 1), FetchFailed)


def test_a_peer_that_is_frozen_during_its_check_times_out_and_holds_up_nobody(world: FetchWorld) -> None:
    frozen, healthy = make_source(world), make_source(world)
    frozen.freeze()
    start(world, frozen, 1)
    assert isinstance(fetched(world, healthy, 2), FetchLanded)
    world.clock.now += LIMITS.fetch_seconds_max
    failed = world.next_event()
    assert isinstance(failed, FetchFailed)
    assert not failed.ended
    world.clock.now += LIMITS.quarantine_seconds
    with capture_logs() as lines:
        assert world.next_event() == FetchEnded(1)
    assert [(line["event"], line["peers"]) for line in lines] == [
        ("transfer.reader_fenced", [frozen.holder.name])
    ]
    assert world.reader.readers_fenced == 1
    assert isinstance(fetched(world, healthy, 3), FetchLanded)


def test_a_fetch_goes_on_when_its_peer_has_thawed_during_the_check(world: FetchWorld) -> None:
    source = make_source(world)
    source.freeze()
    start(world, source, 1)
    assert world.reader.poll() == []
    source.thaw()
    assert isinstance(world.next_event(), FetchLanded)
    assert world.reader.readers_fenced == 0


def test_a_fetch_abandoned_during_the_check_ends_when_the_known_page_is_there(world: FetchWorld) -> None:
    source = make_source(world)
    source.freeze()
    start(world, source, 1)
    world.reader.abandon(1)
    assert world.reader.poll() == []
    source.thaw()
    assert world.next_event() == FetchEnded(1)
    assert not world.pages.holds(1, byte_of(5)), "the pages were never asked for"
