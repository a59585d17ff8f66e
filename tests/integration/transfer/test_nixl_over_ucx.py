"""What NIXL over UCX does, as far as the design leans on it (docs/decisions/0001-nixl-over-ucx.md).

These tests are about NIXL, not about Segue: they post reads by hand. One that fails after an upgrade says which
sentence of the decision no longer holds. TCP is the transport on which a holder's processor answers reads, so that a
frozen holder keeps them open for as long as a test wants.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from shared.transfer.nixl import NixlReader, load_nixl
from shared.transfer.reader import ReadState, Span
from shared.transfer.ucx import configure_ucx
from shared.wire.baton import Baton
from tests.fetcher_contract import KV_FORMAT, PATIENCE_SECONDS, PageBuffer, byte_of
from tests.integration.transfer.holder_processes import PORTS, HolderProcess, epochs, holders

MIB = 1024 * 1024
PAGES = 64  # of 1 MiB: more than sockets buffer
names = count(1)


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not done():
        assert time.monotonic() < deadline, "nothing happened"
        os.sched_yield()


class UcxBench:
    """A reader agent, its target pages, and a holder to read from."""

    def __init__(self, started: list[HolderProcess]):
        self.started = started
        self.target = PageBuffer(PAGES, MIB)
        self.source = self.start()
        self.reader = self.make_reader()
        self.finish(self.read(1))  # connected from here on
        self.target.fill(0, 0)

    def start(self, uid: str = "holder") -> HolderProcess:
        self.started.append(HolderProcess(uid, next(epochs), PAGES, MIB))
        return self.started[-1]

    def make_reader(self) -> NixlReader:
        return NixlReader(load_nixl(), f"bench-r{next(names)}", self.target.memory, 4)

    def read(self, pages: int = PAGES) -> int:
        holder = self.source.holder
        baton = Baton("a request", 1, holder, KV_FORMAT, 0, 1, 1, 1, ())
        return self.reader.read_pages(
            baton, [Span(holder.pages_address, self.target.memory.address, pages * MIB)]
        )

    def finish(self, handle: int) -> None:
        until(lambda: self.reader.state(handle) is ReadState.DONE)
        self.reader.release(handle)

    def landed(self) -> int:
        """Pages of the target that have arrived whole."""
        return sum(self.target.holds(page, byte_of(page)) for page in range(PAGES))

    def empty(self) -> bool:
        return all(self.target.holds(page, 0) for page in range(PAGES))


@pytest.fixture
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> Iterator[UcxBench]:
    monkeypatch.setenv("UCX_TLS", "tcp")
    yield from make_bench()


@pytest.fixture
def on_one_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[UcxBench]:
    monkeypatch.delenv("UCX_TLS", raising=False)
    yield from make_bench()


def make_bench() -> Iterator[UcxBench]:
    configure_ucx("lo", PORTS, tcp=True)
    with holders() as started:
        bench = UcxBench(started)
        yield bench
        bench.reader.close()


# ---- reads that were given up ----------------------------------------------------------------------------------


def test_a_read_that_was_released_lands_all_the_same(over_tcp: UcxBench) -> None:
    bench = over_tcp
    bench.source.freeze()
    handle = bench.read()
    assert bench.reader.state(handle) is ReadState.READING
    bench.reader.release(handle)
    assert bench.empty()
    bench.source.thaw()
    until(lambda: bench.landed() == PAGES)


def test_a_read_whose_peer_was_removed_lands_all_the_same_and_can_no_longer_be_followed(
    over_tcp: UcxBench,
) -> None:
    bench = over_tcp
    bench.source.freeze()
    handle = bench.read()
    bench.reader._agent.agent.invalidateRemoteMD(bench.source.holder.agent)
    assert bench.reader.state(handle) is ReadState.FAILED
    assert bench.empty()
    bench.source.thaw()
    until(lambda: bench.landed() == PAGES)


def test_a_removed_peer_harms_no_read_from_another(over_tcp: UcxBench) -> None:
    bench = over_tcp
    first = bench.source
    bench.source = bench.start()
    bench.finish(bench.read(1))
    handle = bench.read()
    bench.reader._agent.agent.invalidateRemoteMD(first.holder.agent)
    bench.finish(handle)
    assert bench.landed() == PAGES


def test_nothing_lands_after_the_reading_agent_was_destroyed(over_tcp: UcxBench) -> None:
    bench = over_tcp
    bench.source.freeze()
    bench.read()
    started = time.monotonic()
    bench.reader.close()
    assert time.monotonic() - started < 5.0  # it does not wait for the holder
    bench.source.thaw()
    bench.source, bench.reader = bench.start(), bench.make_reader()
    for _ in range(20):  # a whole conversation with another holder leaves the old bytes time enough
        before = bench.landed()
        bench.finish(bench.read(1))
        assert before in (0, 1)
    assert bench.landed() == 1


def test_a_destroyed_agent_stops_reads_in_full_flight(over_tcp: UcxBench) -> None:
    bench = over_tcp
    handles = [bench.read() for _ in range(16)]  # 1 GiB, most of a second
    until(lambda: bench.target.map[0] != 0)
    assert bench.reader.state(handles[-1]) is ReadState.READING
    bench.reader.close()
    for page in range(PAGES):
        bench.target.fill(page, 0)
    bench.source, bench.reader = bench.start(), bench.make_reader()  # the old holder may have aborted
    bench.finish(bench.read(1))
    assert bench.landed() == 1
    assert all(bench.target.holds(page, 0) for page in range(1, PAGES))


# ---- killed and restarted --------------------------------------------------------------------------------------


@pytest.mark.parametrize("fixture", ["over_tcp", "on_one_machine"])
def test_the_death_of_a_holder_is_an_error_of_its_reads_and_no_crash(
    fixture: str, request: pytest.FixtureRequest
) -> None:
    bench: UcxBench = request.getfixturevalue(fixture)
    bench.source.freeze()
    bench.source.kill()
    handle = bench.read(1)
    until(lambda: bench.reader.state(handle) is ReadState.FAILED)
    bench.source = bench.start()  # the same pod, restarted: another epoch, so another agent
    bench.finish(bench.read())
    assert bench.landed() == PAGES


@pytest.mark.long
def test_the_death_of_a_reader_leaves_the_holder_serving(over_tcp: UcxBench) -> None:
    bench = over_tcp
    for _ in range(3):
        dying = bench.start("dying")
        dying.read(Baton("doomed", 0, bench.source.holder, KV_FORMAT, 0, 1, 1, 1, tuple(range(PAGES))))
        dying.kill()
        bench.finish(bench.read())
    assert bench.landed() == PAGES


# ---- the progress thread ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("fixture", ["over_tcp", "on_one_machine"])
def test_a_holder_that_computes_without_pause_serves_reads(
    fixture: str, request: pytest.FixtureRequest
) -> None:
    bench: UcxBench = request.getfixturevalue(fixture)
    bench.source.be_busy(1.0)
    bench.finish(bench.read())
    assert bench.landed() == PAGES
    assert bench.source.busy_turns() > 0


def test_an_idle_agent_costs_no_processor_time(over_tcp: UcxBench) -> None:
    pid = over_tcp.source.process.pid
    ticks, started = processor_ticks(pid), time.monotonic()
    until(lambda: time.monotonic() - started > 1.0)
    assert processor_ticks(pid) - ticks < 20  # of 100; without a pause the progress thread takes all


def processor_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


# ---- where it listens ------------------------------------------------------------------------------------------


def test_two_workers_of_one_host_listen_on_loopback_at_different_ports_of_the_range(
    over_tcp: UcxBench,
) -> None:
    first, second = over_tcp.source, over_tcp.start()
    addresses = [address for holder in (first, second) for address in listening(holder.process.pid)]
    low, high = (int(port) for port in PORTS.split("-"))
    assert len(addresses) == len(set(addresses)) >= 2
    for host, port in addresses:
        assert host == "0100007F"  # 127.0.0.1 as /proc/net/tcp writes it
        assert low <= port <= high


def listening(pid: int) -> list[tuple[str, int]]:
    """Addresses a process listens at."""
    links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
    inodes = {link.removeprefix("socket:[").removesuffix("]") for link in links if link.startswith("socket:")}
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    local = [row[1].split(":") for row in rows if row[3] == "0A" and row[9] in inodes]
    return [(host, int(port, 16)) for host, port in local]
