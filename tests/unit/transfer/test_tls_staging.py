"""Pages of a device over the TLS transport: one wait a batch, and nothing sent, landed or DONE before its time.

The device is late on purpose: a copy happens when somebody waits for it, so bytes that are used too early are wrong.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace

import pytest

from shared.transfer.memory import Copies, HostAccess
from shared.transfer.reader import ReadState, Span
from shared.transfer.tls.channel import PORTION_BYTES, FrameKind, TlsChannel
from shared.transfer.tls.keys import Handshake
from shared.transfer.tls.protocol import GetPages, encode_request
from shared.transfer.tls.staging import BATCH_BYTES, RING_BYTES, SLOTS, StagingRing
from shared.transfer.tls.transport import TlsReader
from tests.fetcher_contract import PAGE_BYTES, PATIENCE_SECONDS, PageBuffer, byte_of
from tests.unit.transfer.test_tls_reader import baton
from tests.unit.transfer.tls_holder_here import (
    CONTEXTS,
    LEASE,
    NONCE,
    HolderHere,
    dial,
    is_served,
    receive_frame,
)
from tests.waiting import until

PORTIONS = 10
BATCHES = 3  # of four portions
PAGES = PORTIONS * PORTION_BYTES // PAGE_BYTES
WHOLE = ((0, PAGES * PAGE_BYTES),)
SCATTERED = (  # in no order, of all sizes, more than the ring holds
    (5 * PAGE_BYTES + 1, 3),
    (7 * PAGE_BYTES, BATCH_BYTES + 5),
    (0, PAGE_BYTES),
    (2 * PAGE_BYTES + 9, PAGE_BYTES - 1),
    (30 * PAGE_BYTES, 1),
    (24 * PAGE_BYTES, PORTION_BYTES),
    (31 * PAGE_BYTES, 8 * PAGE_BYTES),
)
assert BATCH_BYTES == 4 * PORTION_BYTES


@dataclass(eq=False)
class LateCopies:
    """`Copies` that do nothing until they are waited for."""

    access: LateAccess
    copy: Callable[[], object]

    def wait(self) -> None:
        """See `Copies`."""
        self.access.waits += 1
        self.access.on_wait()
        self.copy()
        self.access.under_way.remove(self)


@dataclass
class LateAccess(HostAccess):
    """To pages that this process cannot address, as it were."""

    waits: int = 0
    buffers: list[int] = field(default_factory=list)
    under_way: list[LateCopies] = field(default_factory=list)
    most_under_way: int = 0
    on_wait: Callable[[], object] = lambda: None

    def view(self, address: int, size_bytes: int) -> memoryview | None:
        del address, size_bytes
        return None

    def buffer(self, size_bytes: int) -> memoryview:
        self.buffers.append(size_bytes)
        return super().buffer(size_bytes)

    def start_reads(self, reads: Sequence[tuple[int, memoryview]]) -> Copies:
        return self._start(lambda: HostAccess.start_reads(self, reads))

    def start_writes(self, writes: Sequence[tuple[int, memoryview]]) -> Copies:
        return self._start(lambda: HostAccess.start_writes(self, writes))

    def _start(self, copy: Callable[[], object]) -> LateCopies:
        copies = LateCopies(self, copy)
        self.under_way.append(copies)
        self.most_under_way = max(self.most_under_way, len(self.under_way))
        return copies


class StagedReading:
    """A reader with pages of a late device."""

    def __init__(self) -> None:
        self.access, self.buffer = LateAccess(), PageBuffer(PAGES)
        self.reader = TlsReader(CONTEXTS.reader, replace(self.buffer.memory, access=self.access), 2)

    def post(self, address: tuple[str, int], spans: tuple[tuple[int, int], ...]) -> int:
        pages = self.buffer.memory.address
        return self.reader.read_pages(
            baton(address), [Span(begin, pages + begin, size) for begin, size in spans]
        )

    def end_of(self, handle: int) -> ReadState:
        until(
            lambda: self.reader.state(handle) is not ReadState.READING, PATIENCE_SECONDS, "the end of a read"
        )
        return self.reader.state(handle)


@pytest.fixture
def device() -> LateAccess:
    """The holder's."""
    return LateAccess()


@pytest.fixture
def holder(device: LateAccess) -> Iterator[HolderHere]:
    here = HolderHere(pages=PAGES, access=device)
    yield here
    here.tls.close()
    assert device.under_way == [], "its connections have ended, and the memory may be given back"


@pytest.fixture
def reading() -> Iterator[StagedReading]:
    reading = StagedReading()
    yield reading
    reading.reader.close()
    assert reading.access.under_way == [], "the reader is closed, and the pages are somebody else's"


def ask(channel: TlsChannel, spans: tuple[tuple[int, int], ...] = WHOLE) -> None:
    channel.send(FrameKind.REQUEST, encode_request(GetPages(LEASE, NONCE, spans)))


# ---- both ends -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spans", [WHOLE, SCATTERED], ids=["one span", "scattered"])
def test_bytes_arrive_whole_and_nothing_else_changes(
    reading: StagedReading, holder: HolderHere, spans: tuple[tuple[int, int], ...]
) -> None:
    assert reading.end_of(reading.post(holder.address, spans)) is ReadState.DONE
    expected = bytearray(len(reading.buffer.map))
    for begin, size in spans:
        expected[begin : begin + size] = holder.buffer.map[begin : begin + size]
    assert reading.buffer.map[:] == bytes(expected)


def test_a_device_is_waited_for_once_a_batch_and_copies_while_the_batch_before_is_on_its_way(
    reading: StagedReading, holder: HolderHere, device: LateAccess
) -> None:
    assert reading.end_of(reading.post(holder.address, WHOLE)) is ReadState.DONE
    assert (device.waits, reading.access.waits) == (BATCHES, BATCHES)
    assert (device.most_under_way, reading.access.most_under_way) == (SLOTS, SLOTS)


def test_a_connection_has_one_ring_from_its_first_read_of_pages_on_and_none_before(
    reading: StagedReading, holder: HolderHere, device: LateAccess
) -> None:
    assert reading.end_of(reading.reader.read_word(baton(holder.address), 1)) is ReadState.DONE
    assert (device.buffers, reading.access.buffers) == ([], [])
    for _ in range(3):
        assert reading.end_of(reading.post(holder.address, WHOLE)) is ReadState.DONE
    assert (device.buffers, reading.access.buffers) == ([RING_BYTES], [RING_BYTES])


def test_pages_in_host_memory_pass_no_ring() -> None:
    here = HolderHere()
    assert here.memory.make_ring() is None
    here.tls.close()


# ---- the holder ------------------------------------------------------------------------------------------------


def test_what_was_copied_while_a_lease_held_is_not_sent_after_its_end(
    holder: HolderHere, device: LateAccess
) -> None:
    """It ends while the holder waits for the second batch: the portions of the first have gone, and no others go."""
    device.on_wait = lambda: holder.words.clear(LEASE) if device.waits == 2 else None
    connection, channel = dial(holder)
    with connection:
        ask(channel)
        heard = [receive_frame(channel) for _ in range(5)]
        assert heard == [FrameKind.DATA] * 4 + [FrameKind.GONE]
        assert is_served(channel), "nothing follows but the answer to the next request"
        assert device.under_way == []


@pytest.mark.parametrize("sent", range(6))
def test_a_lease_that_ends_between_two_portions_of_a_batch_ends_the_read_there(
    holder: HolderHere, sent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_open, looks = holder.memory.is_open, iter(range(PORTIONS))

    def is_open_still(shown: dict[int, int], request: GetPages) -> bool:
        if next(looks) == sent:
            holder.words.clear(LEASE)
        return is_open(shown, request)

    monkeypatch.setattr(holder.memory, "is_open", is_open_still)
    connection, channel = dial(holder)
    with connection:
        ask(channel)
        assert [receive_frame(channel) for _ in range(sent + 1)] == [FrameKind.DATA] * sent + [FrameKind.GONE]


def test_a_reader_that_hangs_up_leaves_no_copy_behind(holder: HolderHere, device: LateAccess) -> None:
    connection, channel = dial(holder)
    with connection:
        for _ in range(8):  # more than the kernels' buffers hold
            ask(channel)
        assert receive_frame(channel) is FrameKind.DATA
    until(lambda: not holder.tls._clients, PATIENCE_SECONDS, "the end of the connection")
    assert device.under_way == []


# ---- the reader ------------------------------------------------------------------------------------------------


def test_a_read_is_done_only_when_its_last_copy_has_been_waited_for(
    reading: StagedReading, holder: HolderHere
) -> None:
    late, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        if reading.access.waits == BATCHES:
            late.set()
            go_on.wait(PATIENCE_SECONDS)

    reading.access.on_wait = wait
    handle = reading.post(holder.address, WHOLE)
    assert late.wait(PATIENCE_SECONDS)
    assert reading.reader.state(handle) is ReadState.READING
    go_on.set()
    assert reading.end_of(handle) is ReadState.DONE
    assert all(reading.buffer.holds(page, byte_of(page)) for page in range(PAGES))


@contextmanager
def hanging_up_after(portions: int) -> Iterator[tuple[str, int]]:
    """A holder with a worker's key that sends so many portions of the answer."""

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            handshake = Handshake(CONTEXTS.holder, holder=True)
            while handshake.keys is None:
                connection.sendall(handshake.advance(connection.recv(4096)))
            keys = handshake.keys
            channel = TlsChannel(connection, sends_with=keys.answers, receives_with=keys.requests)
            assert receive_frame(channel) is FrameKind.REQUEST
            for _ in range(portions):
                channel.send(FrameKind.DATA, b"\1" * PORTION_BYTES)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()
        thread.join()


@pytest.mark.parametrize("portions", [3, 4, 6, 9])
def test_a_read_that_fails_has_no_copy_under_way_and_nothing_lands_after_the_fence(
    reading: StagedReading, portions: int
) -> None:
    with hanging_up_after(portions) as address:
        assert reading.end_of(reading.post(address, WHOLE)) is ReadState.FAILED
    assert reading.access.under_way == []
    whole = portions // 4 * BATCH_BYTES
    assert reading.buffer.map[:] == b"\1" * whole + bytes(len(reading.buffer.map) - whole)


def test_closing_waits_for_a_copy_that_is_under_way(reading: StagedReading) -> None:
    late, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        late.set()
        go_on.wait(PATIENCE_SECONDS)

    reading.access.on_wait = wait
    with hanging_up_after(5) as address:
        reading.post(address, WHOLE)
        assert late.wait(PATIENCE_SECONDS)
        closing_reader = threading.Thread(target=reading.reader.close, daemon=True)
        closing_reader.start()
        closing_reader.join(0.1)
        assert closing_reader.is_alive()
        go_on.set()
        closing_reader.join(PATIENCE_SECONDS)
        assert not closing_reader.is_alive()
    assert reading.access.under_way == []


# ---- the ring --------------------------------------------------------------------------------------------------


def test_all_copies_are_waited_for_when_a_ring_is_left_early() -> None:
    access, buffer = LateAccess(), PageBuffer(PAGES)
    ring, spans = StagingRing(access), [(buffer.memory.address, PAGES * PAGE_BYTES)]
    with closing(ring.read(spans)) as portions:
        next(portions)
        assert len(access.under_way) == SLOTS - 1
    assert access.under_way == []
    with closing(ring.write(spans)) as places:
        for _ in range(5):
            next(places)
        assert len(access.under_way) == 1
    assert access.under_way == []
