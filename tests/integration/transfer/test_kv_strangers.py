"""Strangers at a worker's KV ports: without a worker's key nobody reads or writes a byte of it.

The worker is a process of its own, with pages of known bytes; the stranger is this test. Without a value that
acknowledges the risk, a chart can turn on the TLS transport alone.
"""

from __future__ import annotations

import os
import socket
import ssl
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from shared.links.keys import Identity, LinkKeys, key_file, new_identity, parse_keys
from shared.primitives.errors import TransferError
from shared.transfer.nixl import NixlOffer
from shared.transfer.reader import SPANS_MAX, ReadState, Span
from shared.transfer.tls.channel import PORTION_BYTES, FrameKind, TlsChannel
from shared.transfer.tls.keys import Handshake, make_contexts
from shared.transfer.tls.protocol import CheckLease, GetPages, Request, encode_request
from shared.transfer.tls.server import CONNECTIONS_MAX, HANDSHAKE_SECONDS_MAX, HANDSHAKES_MAX
from shared.transfer.tls.transport import TlsAddress, TlsOffer, TlsReader
from shared.transfer.ucx import WITHOUT_TCP
from shared.wire.baton import Baton, Holder
from tests.abuse.procfs import PeakMemory
from tests.fetcher_contract import (
    KV_FORMAT,
    LEASES,
    PAGE_BYTES,
    PAGES,
    PATIENCE_SECONDS,
    PageBuffer,
    byte_of,
)
from tests.integration.transfer.holder_processes import (
    ROUTER,
    HolderProcess,
    epochs,
    holders,
    network,
    worker_keys,
)
from tests.waiting import until

UCX_GREETING = struct.pack("<Q", 0xCAFEBABE12345678)  # of UCX's TCP transport
UCX_PUT = 33  # of its message types


@pytest.fixture(scope="module")
def worker() -> Iterator[HolderProcess]:
    with holders() as started:
        started.append(HolderProcess("worker", next(epochs), transport="tls"))
        started[0].write(3, 77)
        yield started[0]


def address(worker: HolderProcess) -> tuple[str, int]:
    where = msgspec.msgpack.decode(worker.holder.metadata, type=TlsAddress)
    return where.host, where.port


def dial(worker: HolderProcess) -> socket.socket:
    return socket.create_connection(address(worker), timeout=PATIENCE_SECONDS)


def hears(connection: socket.socket) -> bytes:
    """All that the worker says until it hangs up."""
    heard = b""
    try:
        while received := connection.recv(65536):
            heard += received
    except ConnectionResetError:
        pass
    return heard


def read_page(worker: HolderProcess, keys: LinkKeys, page: int = 5) -> tuple[ReadState, PageBuffer]:
    """Read one page as a worker with these keys does."""
    return read_from(worker.holder, keys, page)


def read_from(holder: Holder, keys: LinkKeys, page: int = 0) -> tuple[ReadState, PageBuffer]:
    buffer = PageBuffer(2)
    reader = TlsReader(make_contexts(keys).reader, buffer.memory, 1)
    baton = Baton("r", 1, holder, KV_FORMAT, 3, 77, 1, 1, (page,))
    span = Span(holder.pages_address + page * PAGE_BYTES, buffer.memory.address, PAGE_BYTES)
    handle = reader.read_pages(baton, [span])
    until(lambda: reader.state(handle) is not ReadState.READING, PATIENCE_SECONDS, "the end of the read")
    state = reader.state(handle)
    reader.close()
    return state, buffer


def assert_whole(worker: HolderProcess) -> None:
    """It serves its own, and its memory is as it was."""
    for page in (0, 5, 250):
        state, buffer = read_page(worker, worker_keys(), page)
        assert state is ReadState.DONE
        assert buffer.holds(0, byte_of(page))


def ucx_put(worker: HolderProcess) -> bytes:
    """UCX's own packet that writes 16 bytes at an address: greeting, header, address and length, payload."""
    payload = b"OWNED BY STRANGE"
    where = struct.pack("<QQI", worker.holder.pages_address, len(payload), 1)
    return UCX_GREETING + struct.pack("<BI", UCX_PUT, len(where)) + where + payload


@pytest.mark.parametrize(
    "says",
    [
        lambda worker: ucx_put(worker),
        lambda _: os.urandom(4096),
        lambda _: b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        lambda _: b"\x16\x03\x01\x3f\xff\x01" + b"\x00" * 16384 + b"\x16\x03\x01\x3f\xff" + b"\x00" * 16384,
    ],
    ids=["the UCX packet that writes memory", "garbage", "HTTP", "a hello without end"],
)
def test_plain_bytes_read_and_write_nothing(
    worker: HolderProcess, says: Callable[[HolderProcess], bytes]
) -> None:
    with dial(worker) as connection:
        connection.sendall(says(worker))
        heard = hears(connection)
    assert len(heard) < 16, f"at most a TLS alert: {heard!r}"
    assert_whole(worker)


def test_tls_without_a_key_gets_no_keys(worker: HolderProcess) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    heard = b""
    with dial(worker) as connection, context.wrap_socket(connection) as tls, suppress(ssl.SSLError, OSError):
        heard = tls.recv(64)
    assert heard == b""
    assert_whole(worker)


def test_a_worker_of_another_deployment_reads_nothing(worker: HolderProcess) -> None:
    assert_refused(worker, worker_keys(new_identity("worker")))


def test_a_foreign_key_that_trusts_ours_reads_nothing(worker: HolderProcess) -> None:
    """Its own check passes; the holder's must not."""
    assert_refused(worker, presenting(new_identity("worker")))


def test_a_router_reads_nothing(worker: HolderProcess) -> None:
    """Routers have links to workers, and no business at their KV."""
    assert_refused(worker, presenting(ROUTER))


def presenting(identity: Identity) -> LinkKeys:
    """The workers' certificates to check with, and somebody else's key to show."""
    return replace(worker_keys(), own_pem=identity.key + identity.certificate)


def assert_refused(worker: HolderProcess, keys: LinkKeys) -> None:
    state, buffer = read_page(worker, keys)
    assert state is ReadState.FAILED
    assert buffer.holds(0, 0)
    assert_whole(worker)


def test_a_reader_sends_nothing_to_a_holder_without_a_key() -> None:
    """A stranger that has taken over a worker's address learns nothing and lands nothing."""
    with TlsServer(presenting(new_identity("worker"))) as stranger:
        state, buffer = read_from(stranger.holder, worker_keys())
        assert state is ReadState.FAILED
        assert buffer.holds(0, 0)


@pytest.mark.parametrize("turned", [False, True])
def test_two_generations_of_keys_read_each_other(turned: bool) -> None:
    old, new = new_identity("worker"), new_identity("worker")
    ours, theirs = (new, old) if turned else (old, new)
    for listed in ((old, new), (new, old)):
        keys = parse_keys(key_file(ours, *listed, ROUTER), "worker")
        with TlsServer(parse_keys(key_file(theirs, *listed, ROUTER), "worker")) as server:
            state, buffer = read_from(server.holder, keys)
            assert state is ReadState.DONE
            assert buffer.holds(0, byte_of(0))


# ---- workers of ours that misbehave -----------------------------------------------------------------------------


def channel_to(worker: HolderProcess) -> tuple[socket.socket, TlsChannel]:
    """A connection with a worker's key, and nothing asked yet."""
    connection, handshake = dial(worker), Handshake(make_contexts(worker_keys()).reader, holder=False)
    connection.sendall(handshake.advance())
    while handshake.keys is None:
        connection.sendall(handshake.advance(connection.recv(4096)))
    connection.settimeout(None)
    keys = handshake.keys
    return connection, TlsChannel(connection, sends_with=keys.requests, receives_with=keys.answers)


def answer_to(worker: HolderProcess, request: Request) -> tuple[FrameKind, bytes]:
    """The first frame that comes back."""
    connection, channel = channel_to(worker)
    with connection:
        channel.send(FrameKind.REQUEST, encode_request(request))
        size, kind = channel.receive_header()
        payload = memoryview(bytearray(size))
        channel.receive_payload(payload)
    return FrameKind(kind), bytes(payload)


def test_a_worker_cannot_read_beyond_the_pages(worker: HolderProcess) -> None:
    beyond = (PAGES + 1) * PAGE_BYTES
    for span in ((beyond, 8), (-8, 8), (0, beyond + 1), (2**63, 2**63)):
        kind, sentence = answer_to(worker, GetPages(3, 77, (span,)))
        assert kind is FrameKind.REFUSED
        assert b"not within" in sentence
    assert answer_to(worker, CheckLease(LEASES, 77))[0] is FrameKind.REFUSED


def test_a_worker_gets_no_page_under_a_lease_that_is_not_held(worker: HolderProcess) -> None:
    assert answer_to(worker, GetPages(3, 77, ((0, 8),)))[0] is FrameKind.DATA
    assert answer_to(worker, GetPages(3, 78, ((0, 8),))) == (FrameKind.GONE, b"")
    assert answer_to(worker, GetPages(2, 0, ((0, 8),))) == (FrameKind.GONE, b"")


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x83" + bytes(100), os.urandom(5000)])
def test_what_is_no_request_ends_the_connection_alone(worker: HolderProcess, payload: bytes) -> None:
    connection, channel = channel_to(worker)
    with connection:
        channel.send(FrameKind.REQUEST, payload)
        assert hears(connection) == b""
    assert_whole(worker)


def test_readers_that_do_not_read_cost_the_holder_bounded_memory(worker: HolderProcess) -> None:
    before = resident_bytes(worker.process.pid)
    greedy = [channel_to(worker) for _ in range(8)]
    for _, channel in greedy:
        for _ in range(4):
            channel.send(FrameKind.REQUEST, encode_request(GetPages(3, 77, ((0, PAGES * PAGE_BYTES),))))
    assert_whole(worker)
    assert resident_bytes(worker.process.pid) - before < 8 * (2 * PORTION_BYTES + 2**18)
    for connection, _ in greedy:
        connection.close()
    assert_whole(worker)


def test_as_many_readers_as_may_come_with_the_longest_requests_cost_bounded_memory(
    worker: HolderProcess,
) -> None:
    """None of them reads, so the holder keeps each request, a frame and a buffer to gather in."""
    peak = PeakMemory(worker.process.pid)
    spans = tuple((70_000 + 1500 * number, 1000) for number in range(SPANS_MAX))
    with ExitStack() as stack:
        for _ in range(CONNECTIONS_MAX - 1):
            connection, channel = channel_to(worker)
            stack.enter_context(connection)
            channel.send(FrameKind.REQUEST, encode_request(GetPages(3, 77, spans)))
        assert_whole(worker)
        assert peak.growth() < 200 << 20
    assert_whole(worker)


def resident_bytes(pid: int) -> int:
    return int(Path("/proc", str(pid), "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_the_fence_does_not_wait_for_a_holder_that_does_not_answer() -> None:
    """Neither for one that is not there (its queue of connections is full) nor for one that says nothing."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as deaf:
        where = TlsAddress(*deaf.getsockname()[:2])
        waiting = []
        for _ in range(8):
            waiting.append(socket.socket())
            waiting[-1].setblocking(False)
            waiting[-1].connect_ex((where.host, where.port))
        buffer = PageBuffer(2)
        holder = Holder("h", 1, "h-1", msgspec.msgpack.encode(where), 0, PAGE_BYTES, 0)
        for stage in ("it says nothing", "it is not there"):
            reader = TlsReader(make_contexts(worker_keys()).reader, buffer.memory, 1)
            baton = Baton(stage, 1, holder, KV_FORMAT, 3, 77, 1, 1, (0,))
            handle = reader.read_pages(baton, [Span(0, buffer.memory.address, PAGE_BYTES)])
            assert reader.state(handle) is ReadState.READING
            reader.close()
            assert reader.state(handle) is ReadState.FAILED
        for connection in waiting:
            connection.close()


class TlsServer:
    """A holder in this process, with one page and the lease that `read_from` names."""

    def __init__(self, keys: LinkKeys):
        self.buffer = PageBuffer(1)
        self.buffer.fill(0, byte_of(0))
        self.offer = TlsOffer(
            "server",
            1,
            self.buffer.memory,
            LEASES,
            address="127.0.0.1",
            ports=network().port_range,
            keys=keys,
        )
        self.offer.words.write(3, 77, (0,))
        self.holder = self.offer.holder

    def __enter__(self) -> TlsServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.offer.close()


def test_silent_strangers_keep_no_worker_out(worker: HolderProcess) -> None:
    """More than the worker has room for, and none says a word."""
    silent = [dial(worker) for _ in range(3 * HANDSHAKES_MAX)]
    assert_whole(worker)
    for connection in silent:
        connection.settimeout(HANDSHAKE_SECONDS_MAX + PATIENCE_SECONDS)
        assert hears(connection) == b"", "it hangs up after a while"
        connection.close()


def test_a_worker_with_tls_listens_on_one_port_and_has_not_loaded_ucx(worker: HolderProcess) -> None:
    assert listening_ports(worker.process.pid) == {address(worker)[1]}
    assert "libuc" not in Path("/proc", str(worker.process.pid), "maps").read_text()


def test_ucx_without_tcp_listens_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """With RDMA what is left of NIXL has no port; without it there is nothing left, and the agent cannot be made."""
    monkeypatch.setenv("UCX_TLS", WITHOUT_TCP)
    before, buffer = listening_ports(os.getpid()), PageBuffer()
    with ExitStack() as stack, suppress(TransferError):
        offer = NixlOffer("w", next(epochs), buffer.memory, LEASES, interface="", ports="", tcp=False)
        stack.callback(offer.close)
        assert listening_ports(os.getpid()) == before
    assert listening_ports(os.getpid()) == before


def test_nixl_on_one_machine_has_no_port_and_is_read_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_TLS", raising=False)
    with holders() as started:
        started.append(HolderProcess("worker", next(epochs), transport="nixl"))
        assert listening_ports(started[0].process.pid) == set()


def test_ucx_over_tcp_lets_any_stranger_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why that needs a setting which says so: the packet of the first test, and a port of UCX instead of ours."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    with holders() as started:
        started.append(HolderProcess("worker", next(epochs), transport="nixl"))
        pid, begin = started[0].process.pid, started[0].holder.pages_address
        for port in listening_ports(pid):
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(ucx_put(started[0]))
                until(lambda: memory_of(pid, begin, 5) == b"OWNED", PATIENCE_SECONDS, "the write")


def memory_of(pid: int, begin: int, size: int) -> bytes:
    with Path("/proc", str(pid), "mem").open("rb") as memory:
        memory.seek(begin)
        return memory.read(size)


def listening_ports(pid: int) -> set[int]:
    """The TCP ports at which the process listens."""
    proc = Path("/proc", str(pid))
    sockets = {link for link in _links(proc / "fd") if link.startswith("socket:")}
    return {
        int(row.split()[1].rsplit(":", 1)[1], 16)
        for table in ("tcp", "tcp6")
        for row in (proc / "net" / table).read_text().splitlines()[1:]
        if row.split()[3] == "0A" and f"socket:[{row.split()[9]}]" in sockets
    }


def _links(folder: Path) -> Iterator[str]:
    for entry in folder.iterdir():
        try:
            yield str(entry.readlink())
        except FileNotFoundError:
            continue
