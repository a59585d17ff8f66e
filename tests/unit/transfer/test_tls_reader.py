"""What a TLS reader makes of a holder that ends a lease, refuses, or answers what was not asked for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from socket import create_server, socket

import msgspec
import pytest

from shared.transfer.reader import SPANS_MAX, NotPostedError, ReadState, Span
from shared.transfer.tls import channel, transport
from shared.transfer.tls.channel import KEY_SECONDS_MAX, FrameKind, TlsChannel
from shared.transfer.tls.keys import Handshake, TlsContexts, TlsKeys
from shared.transfer.tls.transport import TlsAddress, TlsReader
from shared.wire.baton import Baton, Holder, agent_name
from tests.fetcher_contract import KV_FORMAT, PAGE_BYTES, PATIENCE_SECONDS, PageBuffer, byte_of
from tests.unit.transfer.tls_holder_here import CONTEXTS, LEASE, NONCE, OLDER_CONTEXTS, PAGES, HolderHere
from tests.waiting import until

WHOLE = ((0, PAGES * PAGE_BYTES),)
TWO_SMALL = ((0, 8), (PAGE_BYTES, 8))


class TlsReading:
    """A reader of this process, with as many pages as a holder has."""

    def __init__(self, contexts: TlsContexts = CONTEXTS) -> None:
        self.buffer = PageBuffer(PAGES)
        self.reader = TlsReader(contexts.reader, self.buffer.memory, 2)

    def post(self, address: tuple[str, int], spans: tuple[tuple[int, int], ...], uid: str = "h") -> int:
        """Read these bytes of the holder to the same places here."""
        pages = self.buffer.memory.address
        return self.reader.read_pages(
            baton(address, uid), [Span(offset, pages + offset, size) for offset, size in spans]
        )

    def end_of(self, handle: int) -> ReadState:
        until(
            lambda: self.reader.state(handle) is not ReadState.READING, PATIENCE_SECONDS, "the end of a read"
        )
        return self.reader.state(handle)


def baton(address: tuple[str, int], uid: str = "h") -> Baton:
    where = msgspec.msgpack.encode(TlsAddress(*address))
    return Baton(
        "r",
        1,
        Holder(uid, 1, agent_name(uid, 1), where, 0, PAGE_BYTES, 0),
        KV_FORMAT,
        LEASE,
        NONCE,
        1,
        1,
        (0,),
    )


@pytest.fixture
def reading() -> Iterator[TlsReading]:
    reading = TlsReading()
    yield reading
    reading.reader.close()


@pytest.fixture
def holder() -> Iterator[HolderHere]:
    here = HolderHere()
    yield here
    here.tls.close()


@contextmanager
def answering(kind: FrameKind, payload: bytes) -> Iterator[tuple[str, int]]:
    """A holder with a worker's key that answers every request with this frame."""

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            handshake = Handshake(CONTEXTS.holder, holder=True)
            while handshake.keys is None:
                connection.sendall(handshake.advance(connection.recv(4096)))
            keys = handshake.keys
            channel = TlsChannel(connection, sends_with=keys.answers, receives_with=keys.requests)
            size, _ = channel.receive_header()
            channel.receive_payload(memoryview(bytearray(size)))
            channel.send(kind, payload)
            ended.wait(PATIENCE_SECONDS)

    ended = threading.Event()
    with create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()
        ended.set()
        thread.join()


# ---- what lands --------------------------------------------------------------------------------------------------


def test_a_read_is_done_when_its_last_portion_has_landed(reading: TlsReading, holder: HolderHere) -> None:
    assert reading.end_of(reading.post(holder.address, WHOLE)) is ReadState.DONE
    assert all(reading.buffer.holds(page, byte_of(page)) for page in range(PAGES))


def test_the_end_of_a_lease_ends_a_read_and_the_next_one_is_answered(
    reading: TlsReading, holder: HolderHere
) -> None:
    holder.words.clear(LEASE)
    assert reading.end_of(reading.post(holder.address, WHOLE)) is ReadState.GONE
    assert reading.buffer.holds(0, 0)
    holder.words.write(LEASE, NONCE, range(PAGES))
    assert reading.end_of(reading.post(holder.address, WHOLE)) is ReadState.DONE
    assert reading.buffer.holds(PAGES - 1, byte_of(PAGES - 1))


def test_a_word_that_has_not_come_yet_is_no_old_one(reading: TlsReading, holder: HolderHere) -> None:
    assert reading.end_of(reading.reader.read_word(baton(holder.address), 1)) is ReadState.DONE
    assert reading.reader.word(1) == NONCE
    with create_server(("127.0.0.1", 0)) as silent:
        reading.reader.read_word(baton(silent.getsockname(), "silent"), 1)
        assert reading.reader.word(1) == 0
        reading.reader.close()


# ---- holders that do not keep to the protocol ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        pytest.param(FrameKind.DATA, bytes(8), id="fewer bytes"),
        pytest.param(FrameKind.DATA, bytes(24), id="more bytes"),
        pytest.param(FrameKind.REFUSED, bytes(16), id="a refusal as long as the pages"),
        pytest.param(FrameKind.REFUSED, b"no", id="a refusal"),
        pytest.param(FrameKind.REQUEST, b"", id="a request"),
        pytest.param(FrameKind.DATA, b"", id="nothing"),
    ],
)
def test_an_answer_that_is_not_the_pages_fails_the_read(
    reading: TlsReading, kind: FrameKind, payload: bytes
) -> None:
    with answering(kind, payload) as address:
        first, behind = reading.post(address, TWO_SMALL), reading.post(address, TWO_SMALL)
        assert reading.end_of(first) is ReadState.FAILED
        assert reading.end_of(behind) is ReadState.FAILED
        with pytest.raises(NotPostedError, match="has failed"):
            reading.post(address, TWO_SMALL)


# ---- its own pages and peers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [-8, (PAGES + 1) * PAGE_BYTES - 7])
def test_nothing_is_read_to_beyond_the_own_pages(
    reading: TlsReading, holder: HolderHere, target: int
) -> None:
    with pytest.raises(AssertionError, match="not within the own pages"):
        reading.reader.read_pages(baton(holder.address), [Span(0, reading.buffer.memory.address + target, 8)])


def test_a_read_of_more_spans_than_a_holder_answers_is_not_posted(
    reading: TlsReading, holder: HolderHere
) -> None:
    assert reading.end_of(reading.post(holder.address, ((0, 1),) * SPANS_MAX)) is ReadState.DONE
    with pytest.raises(NotPostedError, match="spans"):
        reading.post(holder.address, ((0, 1),) * (SPANS_MAX + 1))


def test_a_read_is_not_released_while_bytes_may_land(reading: TlsReading) -> None:
    with create_server(("127.0.0.1", 0)) as silent:
        handle = reading.post(silent.getsockname(), WHOLE)
        with pytest.raises(AssertionError, match="may land"):
            reading.reader.release(handle)
        reading.reader.close()


def test_the_peer_used_longest_ago_is_left_unless_it_is_being_read(
    reading: TlsReading, holder: HolderHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "PEERS_MAX", 1)
    first = reading.post(holder.address, WHOLE, "one")
    second = reading.post(holder.address, WHOLE, "two")
    assert [reading.end_of(first), reading.end_of(second)] == [ReadState.DONE] * 2
    reading.post(holder.address, WHOLE, "two")
    assert {uid for uid, *_ in reading.reader._peers} == {"one", "two"}, "its read is not released"
    reading.reader.release(first)
    assert reading.end_of(reading.post(holder.address, WHOLE, "two")) is ReadState.DONE
    assert {uid for uid, *_ in reading.reader._peers} == {"two"}


def test_a_connection_that_nobody_needs_is_closed_and_made_anew(
    reading: TlsReading, holder: HolderHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "IDLE_SECONDS", 0.1)
    assert reading.end_of(reading.post(holder.address, WHOLE)) is ReadState.DONE
    until(lambda: not holder.tls._clients, PATIENCE_SECONDS, "the end of the connection")
    assert reading.end_of(reading.post(holder.address, WHOLE)) is ReadState.DONE


# ---- worn keys, and holders of the release before ----------------------------------------------------------------


class Handshakes:
    """How many connections a holder has let in."""

    def __init__(self, holder: HolderHere, monkeypatch: pytest.MonkeyPatch):
        self.count = 0
        self._admit = holder.tls._listener._admit
        monkeypatch.setattr(holder.tls._listener, "_admit", self.admit)

    def admit(self, connection: socket, keys: TlsKeys) -> bool:
        self.count += 1
        return self._admit(connection, keys)


def test_a_key_that_has_sealed_enough_is_left_between_two_reads_and_none_is_lost(
    reading: TlsReading, holder: HolderHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "FRAMES_MAX", 4)
    handshakes = Handshakes(holder, monkeypatch)
    posted = [reading.post(holder.address, WHOLE) for _ in range(6)]  # each of three frames
    posted.append(reading.reader.read_word(baton(holder.address), 1))
    assert [reading.end_of(handle) for handle in posted] == [ReadState.DONE] * 7
    assert all(reading.buffer.holds(page, byte_of(page)) for page in range(PAGES))
    assert reading.reader.word(1) == NONCE
    assert handshakes.count == 4
    until(lambda: len(holder.tls._clients) == 1, PATIENCE_SECONDS, "the end of the connections before")


def test_a_key_that_is_old_enough_is_left_between_two_reads(
    reading: TlsReading, holder: HolderHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(channel, "monotonic", lambda: now[0])
    handshakes = Handshakes(holder, monkeypatch)
    counts = []
    for now[0] in (100.0, 100.0 + KEY_SECONDS_MAX - 1, 100.0 + KEY_SECONDS_MAX):
        assert reading.end_of(reading.post(holder.address, WHOLE)) is ReadState.DONE
        counts.append(handshakes.count)
    assert counts == [1, 1, 2]


@pytest.mark.parametrize("older", ["neither", "holder", "reader"])
def test_workers_of_two_releases_read_each_others_pages_and_words(older: str) -> None:
    holder = HolderHere(OLDER_CONTEXTS if older == "holder" else CONTEXTS)
    reading = TlsReading(OLDER_CONTEXTS if older == "reader" else CONTEXTS)
    try:
        for handle in (
            reading.post(holder.address, WHOLE),
            reading.reader.read_word(baton(holder.address), 1),
        ):
            assert reading.end_of(handle) is ReadState.DONE
        assert all(reading.buffer.holds(page, byte_of(page)) for page in range(PAGES))
        assert reading.reader.word(1) == NONCE
        holder.words.clear(LEASE)
        assert reading.end_of(reading.reader.read_word(baton(holder.address), 1)) is ReadState.DONE
        assert reading.reader.word(1) == 0
    finally:
        reading.reader.close()
        holder.tls.close()


def test_an_older_reader_that_has_all_pages_cached_reads_the_word_alone(holder: HolderHere) -> None:
    reading = TlsReading(OLDER_CONTEXTS)
    assert reading.end_of(reading.reader.read_word(baton(holder.address), 1)) is ReadState.DONE
    assert reading.reader.word(1) == NONCE
    reading.reader.close()


@pytest.mark.parametrize(
    ("kind", "payload"),
    [(FrameKind.DATA, b""), (FrameKind.DATA, bytes(8)), (FrameKind.GONE, b""), (FrameKind.REFUSED, b"no")],
)
def test_an_answer_that_says_nothing_of_the_lease_fails_the_read_of_its_word(
    reading: TlsReading, kind: FrameKind, payload: bytes
) -> None:
    with answering(kind, payload) as address:
        assert reading.end_of(reading.reader.read_word(baton(address), 1)) is ReadState.FAILED
        assert reading.reader.word(1) == 0
