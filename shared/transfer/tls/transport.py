"""KV pages over TCP between workers that prove who they are: this worker's offer by the TLS transport.

The parts: `keys` (TLS 1.3 with the workers' keys), `server` (listens and answers reads), `TlsReader`
below (reads), `channel` (frames), `protocol` (what may be asked), `offered_memory` and `grants`
(what is given). No UCX, no NIXL, no torch.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import ssl
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import structlog

from shared.links.keys import LinkKeys
from shared.transfer.counters import KvCounters
from shared.transfer.grants import Grants
from shared.transfer.memory import HOST_ACCESS, WORD_BYTES, PageAccess, PageMemory, WordTable
from shared.transfer.offer import describe_holder
from shared.transfer.reader import ENDED, PEERS_MAX, SPANS_MAX, NotPostedError, ReadState, Span
from shared.transfer.tls.channel import PORTION_BYTES, FrameKind, TlsChannel, cut
from shared.transfer.tls.keys import Handshake, TlsError, Version, make_contexts
from shared.transfer.tls.offered_memory import OfferedMemory
from shared.transfer.tls.protocol import (
    HOLDS,
    CheckLease,
    GetPages,
    GetWord,
    Piece,
    Request,
    cut_portions,
    encode_request,
)
from shared.transfer.tls.server import REFUSAL_BYTES_MAX, TlsHolder, set_timeouts
from shared.wire.baton import Baton, Holder, HolderIdentity

log = structlog.get_logger(__name__)


class TlsOffer:
    """Offers this worker's pages and lease words at one address. Implements `Offer`.

    `address` is numeric, and others reach this worker there. Pages of a device go by way of host memory, a portion at a
    time. A further rank of a worker answers by `grants`, which are those of rank 0. `TransferError` when no port is
    free.
    """

    def __init__(
        self,
        uid: str,
        epoch: int,
        pages: PageMemory,
        lease_count: int,
        *,
        address: str,
        ports: range,
        keys: LinkKeys,
        rank: int = 0,
        grants: Grants | None = None,
    ):
        self._pages = pages
        self._contexts = make_contexts(keys)
        self.counters = KvCounters()
        self.words = grants or Grants(lease_count)
        memory = OfferedMemory(pages, self.words)
        self._server = TlsHolder(address, ports, self._contexts.holder, memory, self.counters)
        metadata = msgspec.msgpack.encode(TlsAddress(address, self._server.port))
        self.holder = describe_holder(uid, epoch, metadata, pages, words_address=0, rank=rank)

    def make_reader(self, slots: int) -> TlsReader:
        """See `Offer`."""
        return TlsReader(self._contexts.reader, self._pages, slots)

    def close(self) -> None:
        """See `Offer`."""
        self._server.close()


# ---- the reading end of the TLS transport: one generation of reads, closed as a whole. Implements `Reader` -----------
# Each peer, which is the identity of a holder, has a connection and a thread. The thread takes the reads posted for it
# in order: ask, then open the portions straight into page memory; into a device's memory by way of a scratch buffer,
# from which they are copied at once. `state` only looks. `close` cuts the connections and waits for the threads:
# nothing is left that could write, so it is a fence.
#
# A connection whose keys are worn is left for a fresh one between two reads, which is why reads wait for a handshake
# once in a while and none is lost.
#
# A read that fails takes the reads behind it along, and this reader reads no more from that peer; `fetches` replaces a
# reader of which a read has failed.


TLS = "tls"
STAGED = "tls/staged"  # by way of host memory: pages of a device
IDLE_SECONDS = 30.0  # then a connection that nobody needs is closed
CONNECT_SECONDS_MAX = 5.0  # also bounds `close`, which may come just before the connection begins
_HANDSHAKE_RECEIVE_BYTES = 4096


class TlsAddress(msgspec.Struct, frozen=True, tag="sealed/1", forbid_unknown_fields=True):
    """`Holder.metadata` of a worker that is read over the TLS transport.

    Its tag stands on the wire: it keeps the transport's former name, the only one that the release before knows.
    """

    host: str  # numeric
    port: int


def address_of(holder: Holder) -> TlsAddress:
    """Where the holder listens. `NotPostedError` when it is read by another transport."""
    try:
        return msgspec.msgpack.decode(holder.metadata, type=TlsAddress)
    except (msgspec.MsgspecError, ValueError):
        raise NotPostedError(
            f"{holder.name} is not read over the TLS transport, which this worker uses: "
            "give all workers one kv_transport"
        ) from None


@dataclass(slots=True, eq=False)
class _TlsRead:
    """One posted read: what is asked for, and where it goes."""

    request: GetPages | CheckLease
    targets: list[tuple[int, int]]  # address and size in bytes
    access: PageAccess  # to the targets
    state: ReadState = ReadState.READING  # set by the peer's thread, once
    left_out: bool = False  # the holder found the lease ended


class _PeerConnection:
    """The connection to one holder, and the thread that reads from it. `NotPostedError`: no thread can be started."""

    def __init__(self, name: str, address: TlsAddress, context: ssl.SSLContext, scratch: memoryview):
        self.reads_outstanding = 0  # counted by the reader
        self.failed = False
        self._name = name
        self._address = address
        self._context = context
        self._scratch = scratch
        self._queue: queue.SimpleQueue[_TlsRead | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._stopped = False
        self._connection: socket.socket | None = None
        self._channel: TlsChannel | None = None
        self._version = Version.BOUND  # of the channel
        self.thread = threading.Thread(target=self._run, name="kv-reader", daemon=True)
        try:
            self.thread.start()
        except RuntimeError as error:
            raise NotPostedError(f"{name} cannot be read now: {error}") from None

    def post(self, read: _TlsRead) -> None:
        self._queue.put(read)

    def stop(self) -> None:
        """End the thread soon, whatever it waits for; `thread.join` tells when."""
        with self._lock:
            self._stopped = True
            if self._connection:
                cut(self._connection)
        self._queue.put(None)

    def _run(self) -> None:
        read: _TlsRead | None = None
        try:
            while read := self._next():
                self._read(read)
                read.state = ReadState.GONE if read.left_out else ReadState.DONE
        except Exception as error:  # whatever it is, the reads must not wait for this thread
            self._fail(read, error)
        finally:
            self._disconnect()

    def _next(self) -> _TlsRead | None:
        """The next read; None: stop. While there is none for long the connection is closed."""
        try:
            return self._queue.get(timeout=IDLE_SECONDS)
        except queue.Empty:
            self._disconnect()
            return self._queue.get()

    def _fail(self, read: _TlsRead | None, error: Exception) -> None:
        """This read and those behind it: the order matters to `post`, which looks at `failed` first."""
        self.failed = True
        if not self._stopped:
            log.warning("transfer.read_failed", peer=self._name, reason=str(error))
        reads = [read]
        with contextlib.suppress(queue.Empty):
            while True:
                reads.append(self._queue.get_nowait())
        for each in reads:
            if each:
                each.state = ReadState.FAILED

    def _read(self, read: _TlsRead) -> None:
        if self._channel and self._channel.worn:
            self._disconnect()
        channel = self._channel or self._connect()
        if isinstance(read.request, GetPages):
            _read_pages(channel, read, read.request)
        elif self._version is Version.OLDER:
            _read_older_word(channel, read, read.request)
        else:
            _check_lease(channel, read, read.request)

    def _connect(self) -> TlsChannel:
        connection = self._dial()
        handshake = Handshake(self._context, holder=False)
        connection.sendall(handshake.advance())
        while handshake.keys is None:
            received = connection.recv(_HANDSHAKE_RECEIVE_BYTES)
            if not received:
                raise TlsError("the holder refused the handshake: is it a worker of this deployment?")
            connection.sendall(handshake.advance(received))
        keys = handshake.keys
        self._version = keys.version
        self._channel = TlsChannel(
            connection, sends_with=keys.requests, receives_with=keys.answers, scratch=self._scratch
        )
        return self._channel

    def _dial(self) -> socket.socket:
        """`stop` cannot cut what has not begun to connect: so connecting has a bound, and then it looks again."""
        family = socket.AF_INET6 if ":" in self._address.host else socket.AF_INET
        connection = socket.socket(family, socket.SOCK_STREAM)
        with self._lock:
            self._connection = connection
            self._raise_if_stopped()
        set_timeouts(connection, send_seconds=0, receive_seconds=0)
        connection.settimeout(CONNECT_SECONDS_MAX)
        connection.connect((self._address.host, self._address.port))
        connection.settimeout(None)
        self._raise_if_stopped()
        return connection

    def _raise_if_stopped(self) -> None:
        if self._stopped:
            raise ConnectionAbortedError("stopped")

    def _disconnect(self) -> None:
        with self._lock:
            connection, self._connection, self._channel = self._connection, None, None
        if connection:
            connection.close()


def _read_pages(channel: TlsChannel, read: _TlsRead, request: GetPages) -> None:
    channel.send(FrameKind.REQUEST, encode_request(request))
    for portion in cut_portions([size for _, size in read.targets]):
        expected = sum(piece.size_bytes for piece in portion)
        size, kind = channel.receive_header()
        if kind == FrameKind.DATA and size == expected:
            _receive_portion(channel, read, portion, size)
        else:
            _receive_other(channel, kind, size)
            read.left_out = True
            return


def _check_lease(channel: TlsChannel, read: _TlsRead, request: CheckLease) -> None:
    """The nonce lands in the word's place if the holder says that the lease holds."""
    if _ask(channel, request, len(HOLDS)) == HOLDS:
        [(address, _)] = read.targets
        read.access.write(address, request.nonce.to_bytes(WORD_BYTES, "little"))


def _read_older_word(channel: TlsChannel, read: _TlsRead, request: CheckLease) -> None:
    [(address, _)] = read.targets
    read.access.write(address, _ask(channel, GetWord(request.lease), WORD_BYTES))


def _ask(channel: TlsChannel, request: Request, size_bytes: int) -> bytes:
    """The answer, of this size; `TlsError` for any other."""
    channel.send(FrameKind.REQUEST, encode_request(request))
    size, kind = channel.receive_header()
    if kind != FrameKind.DATA or size != size_bytes:
        _receive_other(channel, kind, size)
        raise TlsError(f"a frame of kind {kind}, where the word of a lease was expected")
    answer = bytearray(size)
    channel.receive_payload(memoryview(answer))
    return bytes(answer)


def _receive_portion(channel: TlsChannel, read: _TlsRead, portion: list[Piece], size: int) -> None:
    """A single piece goes straight to its place in host memory."""
    addresses = [read.targets[piece.span][0] + piece.begin for piece in portion]
    if len(portion) == 1 and (view := read.access.view(addresses[0], size)):
        channel.receive_payload(view)
        return
    channel.receive_payload(channel.scratch[:size])
    begin = 0
    for address, piece in zip(addresses, portion, strict=True):
        read.access.write(address, channel.scratch[begin : begin + piece.size_bytes])
        begin += piece.size_bytes


def _receive_other(channel: TlsChannel, kind: int, size: int) -> None:
    """The end of a lease is no fault: nothing more lands. Anything else is one."""
    if kind not in (FrameKind.GONE, FrameKind.REFUSED) or size > REFUSAL_BYTES_MAX:
        raise TlsError(f"a frame of kind {kind} and {size} bytes, where pages were expected")
    payload = memoryview(bytearray(size))
    channel.receive_payload(payload)
    if kind == FrameKind.REFUSED:
        raise TlsError(f"the holder refused the read: {bytes(payload).decode(errors='replace')}")


class TlsReader:
    """One generation of reads. Implements `Reader`; belongs to one thread."""

    def __init__(self, context: ssl.SSLContext, pages: PageMemory, slots: int):
        self._context = context
        self._pages = pages
        self._words = WordTable(slots)
        self._ranks_of_a_peer = pages.slices.peer_ranks_max
        self._transport = TLS if pages.access.view(pages.address, pages.page_bytes) else STAGED
        self._peers: dict[HolderIdentity, _PeerConnection] = {}  # least recently used first
        self._leaving: list[_PeerConnection] = []  # stopped to make room, and perhaps not ended yet
        self._reads: dict[int, tuple[_TlsRead, _PeerConnection]] = {}
        self._posted = 0

    def read_pages(self, baton: Baton, spans: Sequence[Span]) -> int:
        """See `Reader`."""
        holder = baton.holder
        sources = tuple((span.source - holder.pages_address, span.size_bytes) for span in spans)
        targets = [self._target(span) for span in spans]
        request = GetPages(baton.lease, baton.nonce, sources)
        return self._post(holder, request, targets, self._pages.access)

    def read_word(self, baton: Baton, slot: int) -> int:
        """See `Reader`."""
        self._words.clear(slot)
        target = (self._words.address_of(slot), WORD_BYTES)
        return self._post(baton.holder, CheckLease(baton.lease, baton.nonce), [target], HOST_ACCESS)

    def word(self, slot: int) -> int:
        """See `Reader`."""
        return self._words.read(slot)

    def state(self, handle: int) -> ReadState:
        """See `Reader`."""
        return self._reads[handle][0].state

    def release(self, handle: int) -> None:
        """See `Reader`."""
        read, peer = self._reads.pop(handle)
        assert read.state in ENDED, "a read was released while bytes may land"
        peer.reads_outstanding -= 1

    def new_transport(self) -> str:
        """See `Reader`."""
        return self._transport

    def close(self) -> None:
        """See `Reader`."""
        peers = [*self._peers.values(), *self._leaving]
        for peer in peers:
            peer.stop()
        for peer in peers:
            peer.thread.join()

    def _target(self, span: Span) -> tuple[int, int]:
        begin = span.target - self._pages.address
        assert 0 <= begin <= self._pages.size_bytes - span.size_bytes, f"{span} is not within the own pages"
        return span.target, span.size_bytes

    def _post(
        self,
        holder: Holder,
        request: GetPages | CheckLease,
        targets: list[tuple[int, int]],
        access: PageAccess,
    ) -> int:
        if len(targets) > SPANS_MAX:
            raise NotPostedError(f"a read of {len(targets)} spans: a holder answers at most {SPANS_MAX}")
        peer = self._peer(holder)
        read = _TlsRead(request, targets, access)
        peer.post(read)
        if peer.failed:  # perhaps after its thread had looked for reads the last time
            read.state = ReadState.FAILED
        self._posted += 1
        self._reads[self._posted] = (read, peer)
        peer.reads_outstanding += 1
        return self._posted

    def _peer(self, holder: Holder) -> _PeerConnection:
        peer = self._peers.pop(holder.identity, None)
        if peer is None:
            scratch = self._pages.access.buffer(PORTION_BYTES)
            peer = _PeerConnection(holder.name, address_of(holder), self._context, scratch)
        self._peers[holder.identity] = peer
        if peer.failed:
            raise NotPostedError(f"{holder.name} cannot be read: its connection has failed")
        idle = [
            one for one, other in self._peers.items() if not other.reads_outstanding and other is not peer
        ]
        if (
            len(self._peers) > PEERS_MAX * self._ranks_of_a_peer and idle
        ):  # one with a read under way is never stopped
            self._leave(self._peers.pop(idle[0]))
        return peer

    def _leave(self, peer: _PeerConnection) -> None:
        peer.stop()
        self._leaving = [each for each in self._leaving if each.thread.is_alive()] + [peer]
