"""A TLS holder in the process of a test, and a connection to it with a worker's key."""

from __future__ import annotations

import socket
import ssl

import msgspec
import pytest

from shared.transfer.counters import KvCounters
from shared.transfer.grants import Grants
from shared.transfer.reader import ReadState, Span
from shared.transfer.tls.channel import PORTION_BYTES, FrameKind, TlsChannel
from shared.transfer.tls.keys import Handshake, TlsContexts, make_contexts
from shared.transfer.tls.offered_memory import OfferedMemory
from shared.transfer.tls.protocol import HOLDS, CheckLease, encode_request
from shared.transfer.tls.server import TlsHolder
from shared.transfer.tls.transport import TlsAddress, TlsReader
from shared.wire.baton import Baton, Holder
from tests.fetcher_contract import KV_FORMAT, PAGE_BYTES, PATIENCE_SECONDS, PageBuffer, byte_of
from tests.link_keys import new_keys
from tests.waiting import until

LEASE, NONCE, OTHER_NONCE = 3, 77, 78
PAGES = 3 * PORTION_BYTES // PAGE_BYTES
KEYS = new_keys()["worker"]
CONTEXTS = make_contexts(KEYS)


def older_contexts() -> TlsContexts:
    """Of a worker of the release before, with the same key: it names no version in its handshakes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl.SSLContext, "set_alpn_protocols", lambda *_: None)
        return make_contexts(KEYS)


OLDER_CONTEXTS = older_contexts()


class EndingMemory(OfferedMemory):
    """Page memory whose lease may end while a read is answered."""

    ends_after_portions = -1  # of pages that were given; -1: never

    def page_bytes_at(self, offset: int, size_bytes: int) -> memoryview | None:
        self.ends_after_portions -= 1
        if self.ends_after_portions == 0:
            self.grants.clear(LEASE)
        return super().page_bytes_at(offset, size_bytes)


class HolderHere:
    """A holder with pages for three portions, which are open under one lease."""

    def __init__(self, contexts: TlsContexts = CONTEXTS) -> None:
        self.buffer = PageBuffer(PAGES)
        for page in range(PAGES):
            self.buffer.fill(page, byte_of(page))
        self.words = Grants(8)
        self.words.write(LEASE, NONCE, range(PAGES))
        self.words.write(LEASE + 1, OTHER_NONCE, (1,))
        self.counters = KvCounters()
        self.memory = EndingMemory(self.buffer.memory, self.words)
        self.tls = TlsHolder("127.0.0.1", range(1), contexts.holder, self.memory, self.counters)

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.tls.port


def dial(holder: HolderHere, contexts: TlsContexts = CONTEXTS) -> tuple[socket.socket, TlsChannel]:
    """A connection with a worker's key, and nothing asked yet."""
    connection = socket.create_connection(holder.address, timeout=PATIENCE_SECONDS)
    return connection, shake_on(connection, contexts)


def shake_on(connection: socket.socket, contexts: TlsContexts) -> TlsChannel:
    """The handshake of a reader."""
    handshake = Handshake(contexts.reader, holder=False)
    connection.sendall(handshake.advance())
    while handshake.keys is None:
        connection.sendall(handshake.advance(connection.recv(4096)))
    keys = handshake.keys
    return TlsChannel(connection, sends_with=keys.requests, receives_with=keys.answers)


def is_served(channel: TlsChannel) -> bool:
    """Whether the holder answers on it that a lease holds, and does not hang up."""
    try:
        channel.send(FrameKind.REQUEST, encode_request(CheckLease(LEASE + 1, OTHER_NONCE)))
        return receive(channel) == (FrameKind.DATA, HOLDS)
    except OSError:
        return False


def receive(channel: TlsChannel) -> tuple[FrameKind, bytes]:
    size, kind = channel.receive_header()
    payload = bytearray(size)
    channel.receive_payload(memoryview(payload))
    return FrameKind(kind), bytes(payload)


def receive_frame(channel: TlsChannel) -> FrameKind:
    return receive(channel)[0]


def start_reading(address: tuple[str, int]) -> tuple[TlsReader, int, PageBuffer]:
    """Post a read of the first page of whoever listens there."""
    buffer = PageBuffer(2)
    where = msgspec.msgpack.encode(TlsAddress(*address))
    peer = Holder("h", 1, "h-1", where, 0, PAGE_BYTES, 0)
    reader = TlsReader(CONTEXTS.reader, buffer.memory, 1)
    baton = Baton("r", 1, peer, KV_FORMAT, LEASE, NONCE, 1, 1, (0,))
    return reader, reader.read_pages(baton, [Span(0, buffer.memory.address, PAGE_BYTES)]), buffer


def read_page(holder: HolderHere) -> ReadState:
    """Read the first page of the holder; it is whole, or nothing was written."""
    reader, handle, buffer = start_reading(holder.address)
    until(lambda: reader.state(handle) is not ReadState.READING, PATIENCE_SECONDS, "the end of the read")
    state = reader.state(handle)
    reader.close()
    assert buffer.holds(0, byte_of(0) if state is ReadState.DONE else 0)
    return state
