"""Both ends of the TLS transport in this process: bounds that hold, and faults that stay with one connection."""

from __future__ import annotations

import os
import resource
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from shared.transfer.reader import NotPostedError, ReadState
from shared.transfer.tls import server, transport
from shared.transfer.tls.channel import PORTION_BYTES, FrameKind
from shared.transfer.tls.protocol import CheckLease, GetPages, encode_request
from shared.transfer.tls.server import REFUSAL_BYTES_MAX, SEND_BUFFER_BYTES
from shared.transfer.tls.transport import TlsReader
from tests.fetcher_contract import PAGE_BYTES, PATIENCE_SECONDS
from tests.unit.transfer.tls_holder_here import (
    LEASE,
    NONCE,
    HolderHere,
    dial,
    is_served,
    read_page,
    receive,
    receive_frame,
    start_reading,
)
from tests.waiting import until

NO_THREAD = RuntimeError("can't start new thread")


@pytest.fixture
def holder() -> Iterator[HolderHere]:
    here = HolderHere()
    yield here
    here.tls.close()


def fail_to_start(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next thread of this name cannot be started; those after it can."""
    start, fails = threading.Thread.start, [True]

    def start_or_fail(thread: threading.Thread) -> None:
        if thread.name == name and fails:
            fails.clear()
            raise NO_THREAD
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_or_fail)


# ---- what is asked for -----------------------------------------------------------------------------------------


def test_small_spans_come_in_one_portion_in_their_order(holder: HolderHere) -> None:
    offsets = (5000, 0, PAGE_BYTES + 7)
    for number, offset in enumerate(offsets):
        holder.buffer.map[offset : offset + 3] = bytes([number + 1] * 3)
    connection, channel = dial(holder)
    with connection:
        spans = tuple((offset, 3) for offset in offsets)
        channel.send(FrameKind.REQUEST, encode_request(GetPages(LEASE, NONCE, spans)))
        assert receive(channel) == (FrameKind.DATA, b"\1\1\1\2\2\2\3\3\3")


def test_a_request_that_is_refused_is_answered_and_counted_and_the_connection_lives(
    holder: HolderHere,
) -> None:
    connection, channel = dial(holder)
    with connection:
        channel.send(FrameKind.REQUEST, encode_request(GetPages(LEASE, NONCE, ((-1, 8),))))
        assert receive_frame(channel) is FrameKind.REFUSED
        assert is_served(channel)
    assert holder.counters.refused_request == 1


def test_a_frame_of_another_kind_is_no_request(holder: HolderHere) -> None:
    connection, channel = dial(holder)
    with connection:
        channel.send(FrameKind.DATA, encode_request(CheckLease(LEASE, NONCE)))
        assert connection.recv(1) == b""
    assert holder.counters.refused_request == 1


# ---- bounds ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("portions", [1, 2])
def test_a_lease_that_ends_in_mid_read_ends_the_read_at_the_next_portion(
    holder: HolderHere, portions: int
) -> None:
    holder.memory.ends_after_portions = portions
    connection, channel = dial(holder)
    with connection:
        channel.send(FrameKind.REQUEST, encode_request(GetPages(LEASE, NONCE, ((0, 3 * PORTION_BYTES),))))
        heard = [receive_frame(channel) for _ in range(portions + 1)]
        assert heard == [FrameKind.DATA] * portions + [FrameKind.GONE]
        assert is_served(channel), "nothing follows but the answer to the next request"


def test_a_handshake_beyond_the_bound_ends_the_oldest(
    holder: HolderHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "HANDSHAKES_MAX", 2)
    monkeypatch.setattr(server, "HANDSHAKE_SECONDS_MAX", PATIENCE_SECONDS)
    with ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection(holder.address, timeout=PATIENCE_SECONDS))
            for _ in range(4)
        ]
        assert [connection.recv(1) for connection in silent[:2]] == [b"", b""]
        assert holder.counters.refused_crowded == 2
        assert reaches(holder), "it ends the third"
        assert silent[2].recv(1) == b""
        silent[3].settimeout(0.1)
        with pytest.raises(TimeoutError):
            silent[3].recv(1)


def test_a_handshake_that_takes_too_long_is_ended_and_counted(
    holder: HolderHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "HANDSHAKE_SECONDS_MAX", 0.2)
    with socket.create_connection(holder.address, timeout=PATIENCE_SECONDS) as silent:
        assert silent.recv(1) == b""
    assert holder.counters.refused_handshake == 1


def test_a_connection_of_a_worker_beyond_the_bound_is_closed_until_another_has_gone(
    holder: HolderHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "CONNECTIONS_MAX", 2)
    with ExitStack() as stack:
        first, second = dial(holder), dial(holder)
        stack.enter_context(first[0])
        stack.enter_context(second[0])
        assert is_served(first[1])
        assert is_served(second[1])
        assert not reaches(holder)
        assert holder.counters.refused_crowded == 1
        first[0].close()
        until(lambda: reaches(holder), PATIENCE_SECONDS, "the place of the one that has gone")
        assert is_served(second[1])


def reaches(holder: HolderHere) -> bool:
    connection, channel = dial(holder)
    with connection:
        return is_served(channel)


def test_a_connection_without_a_request_is_closed_after_a_while(
    holder: HolderHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "IDLE_SECONDS_MAX", 1)
    connection, channel = dial(holder)
    with connection:
        assert is_served(channel)
        assert connection.recv(1) == b""


def test_a_reader_that_does_not_read_is_cut_after_a_while(
    holder: HolderHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "CONNECTIONS_MAX", 1)
    monkeypatch.setattr(server, "SEND_SECONDS_MAX", 1)
    connection, channel = dial(holder)
    with connection:
        assert is_served(channel)
        (client,) = holder.tls._clients
        kept = client.connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        assert kept <= 2 * SEND_BUFFER_BYTES, "the kernel doubles it"
        for _ in range(40):  # more than both kernels' buffers hold
            channel.send(FrameKind.REQUEST, encode_request(GetPages(LEASE, NONCE, ((0, 3 * PORTION_BYTES),))))
        assert not reaches(holder)
        until(lambda: reaches(holder), PATIENCE_SECONDS, "the place of the one that does not read")


def test_a_refusal_of_any_length_is_sent_cut(holder: HolderHere, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holder.memory, "refusal", lambda _: "x" * 1000)
    connection, channel = dial(holder)
    with connection:
        channel.send(FrameKind.REQUEST, encode_request(CheckLease(LEASE, NONCE)))
        assert channel.receive_header() == (REFUSAL_BYTES_MAX, FrameKind.REFUSED)


def test_closing_ends_connections_that_ask_for_nothing() -> None:
    here = HolderHere()
    connection, channel = dial(here)
    with connection:
        assert is_served(channel)
        closing = threading.Thread(target=here.tls.close, daemon=True)
        closing.start()
        closing.join(PATIENCE_SECONDS)
        assert not closing.is_alive()
        assert connection.recv(1) == b""


# ---- faults ----------------------------------------------------------------------------------------------------


def test_a_connection_that_gets_no_thread_costs_no_other_its_pages(
    holder: HolderHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "CONNECTIONS_MAX", 1)
    fail_to_start("kv-holder", monkeypatch)
    assert read_page(holder) is ReadState.FAILED
    assert read_page(holder) is ReadState.DONE
    assert holder.counters.refused_crowded == 1


def test_a_connection_that_gets_no_tls_state_costs_no_other_its_pages(
    holder: HolderHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr("shared.transfer.tls.server.Handshake", no_memory)
        with socket.create_connection(holder.address, timeout=PATIENCE_SECONDS) as connection:
            assert connection.recv(1) == b""
    assert read_page(holder) is ReadState.DONE


def refused_count(holder: HolderHere, count: int) -> bool:
    """Whether so many handshakes have been refused."""
    return holder.counters.refused_handshake == count


def test_a_stranger_that_hangs_up_or_resets_leaves_at_once(
    holder: HolderHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "HANDSHAKE_SECONDS_MAX", 10 * PATIENCE_SECONDS)
    for on_close in (struct.pack("ii", 0, 0), struct.pack("ii", 1, 0)):
        stranger = socket.create_connection(holder.address, timeout=PATIENCE_SECONDS)
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, on_close)
        stranger.close()
    until(lambda: holder.counters.refused_handshake == 2, PATIENCE_SECONDS, "the end of both")
    assert read_page(holder) is ReadState.DONE


def test_without_a_descriptor_connections_wait_and_are_served_afterwards(holder: HolderHere) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as waiting:
        first_free = os.dup(waiting.fileno())
        os.close(first_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (first_free, before[1]))
        try:
            waiting.connect(holder.address)
            until(lambda: holder.tls._listener._retry_at, PATIENCE_SECONDS, "the listener to look away")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
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
    set_timeouts = server.set_timeouts

    def wait_and_set(connection: socket.socket, *, send_seconds: int, receive_seconds: int) -> None:
        about_to_connect.set()
        go_on.wait(PATIENCE_SECONDS)
        set_timeouts(connection, send_seconds=send_seconds, receive_seconds=receive_seconds)

    monkeypatch.setattr(transport, "set_timeouts", wait_and_set)
    monkeypatch.setattr(transport, "CONNECT_SECONDS_MAX", 0.2)
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


def stopped(reader: TlsReader) -> bool:
    return all(peer._stopped for peer in reader._peers.values())
