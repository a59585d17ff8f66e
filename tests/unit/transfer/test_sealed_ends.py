"""Both ends of the sealed KV plane in this process: bounds that hold, and faults that stay with one connection."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import msgspec
import pytest

from shared.baton import Baton, Holder
from shared.transfer import sealed_reader
from shared.transfer.counters import KvCounters
from shared.transfer.memory import WordTable
from shared.transfer.reader import NotPostedError, ReadState, Span
from shared.transfer.sealed_holder import SealedHolder
from shared.transfer.sealed_keys import make_contexts
from shared.transfer.sealed_reader import SealedAddress, SealedReader
from shared.transfer.sealed_requests import OfferedMemory
from tests.fetcher_contract import KV_FORMAT, PAGE_BYTES, PATIENCE_SECONDS, PageBuffer, byte_of
from tests.link_keys import new_keys
from tests.waiting import until

LEASE, NONCE = 3, 77
CONTEXTS = make_contexts(new_keys()["worker"])
NO_THREAD = RuntimeError("can't start new thread")


class HolderHere:
    """A holder with two pages, which are open under one lease."""

    def __init__(self) -> None:
        self.buffer = PageBuffer(2)
        self.buffer.fill(0, byte_of(0))
        self.words = WordTable(8)
        self.words.write(LEASE, NONCE)
        self.counters = KvCounters()
        memory = OfferedMemory(self.buffer.memory, self.words)
        self.sealed = SealedHolder("127.0.0.1", range(1), CONTEXTS.holder, memory, self.counters)

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.sealed.port


@pytest.fixture
def holder() -> Iterator[HolderHere]:
    here = HolderHere()
    yield here
    here.sealed.close()


def start_reading(address: tuple[str, int]) -> tuple[SealedReader, int, PageBuffer]:
    """Post a read of the first page of whoever listens there."""
    buffer = PageBuffer(2)
    where = msgspec.msgpack.encode(SealedAddress(*address))
    peer = Holder("h", 1, "h-1", where, 0, PAGE_BYTES, 0)
    reader = SealedReader(CONTEXTS.reader, buffer.memory, 1)
    baton = Baton("r", 1, peer, KV_FORMAT, LEASE, NONCE, 1, 1, (0,))
    return reader, reader.read_pages(baton, [Span(0, buffer.memory.address, PAGE_BYTES)]), buffer


def read_page(holder: HolderHere) -> ReadState:
    reader, handle, buffer = start_reading(holder.address)
    until(lambda: reader.state(handle) is not ReadState.READING, PATIENCE_SECONDS, "the end of the read")
    state = reader.state(handle)
    reader.close()
    assert buffer.holds(0, byte_of(0) if state is ReadState.DONE else 0)
    return state


def fail_to_start(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next thread of this name cannot be started; those after it can."""
    start, fails = threading.Thread.start, [True]

    def start_or_fail(thread: threading.Thread) -> None:
        if thread.name == name and fails:
            fails.clear()
            raise NO_THREAD
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_or_fail)


# ---- faults ----------------------------------------------------------------------------------------------------


def test_a_connection_that_gets_no_thread_costs_no_other_its_pages(
    holder: HolderHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_to_start("kv-holder", monkeypatch)
    assert read_page(holder) is ReadState.FAILED
    assert read_page(holder) is ReadState.DONE
    assert holder.counters.refused_crowded == 1


def test_a_connection_that_gets_no_tls_state_costs_no_other_its_pages(
    holder: HolderHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr("shared.transfer.sealed_door.Handshake", no_memory)
        with socket.create_connection(holder.address, timeout=PATIENCE_SECONDS) as connection:
            assert connection.recv(1) == b""
    assert read_page(holder) is ReadState.DONE


def no_memory(*_: object, **__: object) -> None:
    raise MemoryError


def test_a_read_whose_thread_cannot_be_started_is_not_posted(
    holder: HolderHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_to_start("kv-reader", monkeypatch)
    with pytest.raises(NotPostedError, match="can't start new thread"):
        start_reading(holder.address)
    assert read_page(holder) is ReadState.DONE


@pytest.mark.parametrize("silent", [0, 8], ids=["it says nothing", "it is not there"])
def test_the_fence_waits_for_no_connection_that_is_about_to_begin(
    silent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`close` comes when the reader has a socket that does not connect yet. So many others fill the holder's queue."""
    about_to_connect, go_on = threading.Event(), threading.Event()
    set_timeouts = sealed_reader.set_timeouts

    def wait_and_set(connection: socket.socket, *, send_seconds: int, receive_seconds: int) -> None:
        about_to_connect.set()
        go_on.wait(PATIENCE_SECONDS)
        set_timeouts(connection, send_seconds=send_seconds, receive_seconds=receive_seconds)

    monkeypatch.setattr(sealed_reader, "set_timeouts", wait_and_set)
    monkeypatch.setattr(sealed_reader, "CONNECT_SECONDS_MAX", 0.2)
    with ExitStack() as stack, socket.create_server(("127.0.0.1", 0), backlog=0) as deaf:
        for _ in range(silent):
            other = stack.enter_context(socket.socket())
            other.setblocking(False)
            other.connect_ex(deaf.getsockname())
        reader, handle, _ = start_reading(deaf.getsockname())
        assert about_to_connect.wait(PATIENCE_SECONDS)
        closing = threading.Thread(target=reader.close, daemon=True)
        closing.start()
        until(lambda: stopped(reader), PATIENCE_SECONDS, "the cut that comes too early")
        go_on.set()
        closing.join(PATIENCE_SECONDS)
        assert not closing.is_alive(), "the fence still waits for the holder"
        assert reader.state(handle) is ReadState.FAILED


def stopped(reader: SealedReader) -> bool:
    return all(peer._stopped for peer in reader._peers.values())
