"""What the links to other workers carry, measured at first contact, before any KV comes over them.

Every worker has a *known page*, which holds the same bytes everywhere, and a *scratch page* for those of others. A
worker hears of another through a baton alone, so the first fetch from a peer begins with two reads of its known page:

    one page ──► are these the bytes?  (the connection is made on the way)      no: nothing is fetched from it, ever
    PROBE_BYTES, the page again and again ──► bytes per second

The worker's loop, and with it every stream, waits meanwhile; so a read is asked after only `SPINS` times, some tens of
milliseconds. One that is not DONE by then is looked at with every poll, and for as long no other peer is probed, for
all probes land in one page. It is never released, and goes with its reader when that is fenced: see `fetches`.

A moment in which either side was busy says nothing about the link: one that seems slow is measured again with its next
fetches, the best of `PROBES_MAX` times counts, and only then it is called slow. Knows nothing of requests.
Doubtful: one page read again and again stays in the processor's cache, so where the kernel copies (CMA) the figure is
that of the cache, two or three times what a long prompt sees; over a network the wire decides.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from shared.baton import Holder
from shared.transfer.memory import PageMemory
from shared.transfer.protocol import KvLink
from shared.transfer.reader import PEERS_MAX, NotPostedError, Reader, ReadState, Span, peer_name

PATTERN = bytes(range(1, 252))  # a prime length: a shifted page does not look right
PROBE_BYTES = 4 * 2**20  # 4 ms at 1 GB/s: long beside a round trip, short beside a step
SPINS = 10_000  # 20 to 40 ms over NIXL: what 4 MiB take at 1 Gbit/s
PROBES_MAX = 3
SLOW_SHARE = 0.25  # of the best link: less is another transport or a sick one, not a busy machine's noise

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Peer:
    """What is known of one other worker."""

    name: str
    transport: str = ""
    bytes_per_second: float = 0.0  # the best of its probes
    probes: int = 0  # that were measured
    connected: bool = False  # its known page has been here
    late: bool = False  # it was measured beside a fetch, and from poll to poll
    refusal: str = ""
    warned: bool = False


@dataclass(slots=True)
class _Probe:
    """A read of a known page under way."""

    peer: _Peer
    holder: Holder
    reader: Reader
    handle: int
    posted: float
    read_bytes: int
    broken: bool = False  # it FAILED: only the fence can end it


class LinkProbe:
    """The links of one worker, and the one probe that may be under way."""

    def __init__(self, own: Holder, pages: PageMemory, clock: Callable[[], float]):
        self._own = _Peer(peer_name(own))
        self._pages = pages
        self._clock = clock
        self._peers: dict[str, _Peer] = {}  # those met, least recently first; not this worker itself
        self._transports: list[str] = []  # by which others are read
        self._probe: _Probe | None = None
        if own.known_page >= 0 and own.memory == "DRAM":
            write_pattern(pages, own.known_page)

    @property
    def links(self) -> dict[str, KvLink]:
        """The links that have been measured, by peer."""
        return {peer.name: _link(peer) for peer in self._peers.values() if peer.probes}

    @property
    def own_link(self) -> KvLink | None:
        """How this worker reads its own pages, if it has."""
        return _link(self._own) if self._own.probes else None

    @property
    def slow_links(self) -> int:
        """How many are far below the best, as far as is known."""
        slow_below = self._slow_below()
        return sum(0 < peer.bytes_per_second < slow_below for peer in self._peers.values())

    @property
    def under_way(self) -> bool:
        """Whether a probe has not ended."""
        return self._probe is not None

    def meet(self, holder: Holder, reader: Reader) -> str:
        """Pages are about to be read from the holder: probe the link if need be. Why not to read them; mostly empty."""
        peer = self._acquaintance(holder)
        if min(holder.known_page, self._pages.known_page) < 0:
            return ""  # one of the two is of a version that has none
        if self._probe is None and self._unsure(peer):
            peer.late = False
            if peer.connected:
                self._measure(peer, holder, reader)
            else:
                self._connect(peer, holder, reader)
        return peer.refusal

    def poll(self) -> None:
        """See how the probe stands, if one was not done at once."""
        if self._probe:
            self._probe.peer.late = True
            self._look(self._probe)

    def broken(self, reader: Reader) -> bool:
        """Whether a probe of this reader can be ended by the fence alone."""
        return self._probe is not None and self._probe.reader is reader and self._probe.broken

    def forget(self, reader: Reader) -> None:
        """The reader is closed: nothing that it was asked for lands any more."""
        if self._probe and self._probe.reader is reader:
            self._probe = None

    def _acquaintance(self, holder: Holder) -> _Peer:
        name = peer_name(holder)
        if name == self._own.name:
            return self._own
        peer = self._peers.pop(name, None)
        if peer is None:
            peer = _Peer(name)
            for other in [name for name in self._peers if name.startswith(f"{holder.uid}/")]:
                del self._peers[other]  # it has started anew
            while len(self._peers) >= PEERS_MAX:
                del self._peers[next(iter(self._peers))]
        self._peers[name] = peer
        return peer

    def _connect(self, peer: _Peer, holder: Holder, reader: Reader) -> None:
        if self._pages.memory == "DRAM":
            ctypes.memset(self._pages.address_of(self._pages.scratch_page), 0, self._pages.page_bytes)
        reader.new_transport()  # what is said from now on is said of this connection
        self._read(peer, holder, reader, 1)

    def _measure(self, peer: _Peer, holder: Holder, reader: Reader) -> None:
        self._read(peer, holder, reader, -(-PROBE_BYTES // self._pages.page_bytes))

    def _read(self, peer: _Peer, holder: Holder, reader: Reader, times: int) -> None:
        size = self._pages.page_bytes
        source = holder.pages_address + holder.known_page * size
        span = Span(source, self._pages.address_of(self._pages.scratch_page), size)
        posted = self._clock()
        try:
            handle = reader.read_pages(holder, [span] * times)
        except NotPostedError:
            return  # the fetch will say so
        self._probe = probe = _Probe(peer, holder, reader, handle, posted, times * size)
        for _ in range(SPINS):
            self._look(probe)
            if self._probe is not probe or probe.broken:
                return
            os.sched_yield()

    def _look(self, probe: _Probe) -> None:
        if probe.broken:
            return
        state = probe.reader.state(probe.handle)
        probe.broken = state is ReadState.FAILED
        if state is ReadState.DONE:
            probe.reader.release(probe.handle)
            self._probe = None
            if probe.peer.connected:
                self._note_speed(probe)
            else:
                self._note_bytes(probe)

    def _note_speed(self, probe: _Probe) -> None:
        peer, seconds = probe.peer, max(self._clock() - probe.posted, 1e-9)
        peer.bytes_per_second = max(peer.bytes_per_second, probe.read_bytes / seconds)
        peer.probes += 1
        self._warn()

    def _note_bytes(self, probe: _Probe) -> None:
        peer = probe.peer
        peer.connected = True
        peer.transport = self._name_transport(peer, probe.reader.new_transport())
        in_reach = self._pages.memory == probe.holder.memory == "DRAM"  # into VRAM this process does not look
        if in_reach and not holds_pattern(self._pages, self._pages.scratch_page):
            peer.refusal = f"the known page of {peer.name} came with other bytes: so would its KV"
            log.error("a peer's known page has other bytes", peer=peer.name, transport=peer.transport)
        else:
            self._measure(peer, probe.holder, probe.reader)

    def _name_transport(self, peer: _Peer, new: str) -> str:
        """Where nothing new was said, the connection is of a kind that there was before: one of these."""
        if peer is self._own:
            return new or "unknown"
        transports = [new] if new else self._transports or [self._own.transport or "unknown"]
        self._transports += [transport for transport in transports if transport not in self._transports]
        return " or ".join(transports)

    def _slow_below(self) -> float:
        return SLOW_SHARE * max((peer.bytes_per_second for peer in self._peers.values()), default=0.0)

    def _unsure(self, peer: _Peer) -> bool:
        doubtful = peer.late or peer.bytes_per_second < self._slow_below()
        return not peer.refusal and (peer.probes == 0 or (doubtful and peer.probes < PROBES_MAX))

    def _warn(self) -> None:
        slow_below = self._slow_below()
        for peer in self._peers.values():
            if peer.bytes_per_second < slow_below and peer.probes == PROBES_MAX and not peer.warned:
                peer.warned = True
                log.warning(
                    "a KV link is far below the best",
                    peer=peer.name,
                    transport=peer.transport,
                    megabytes_per_second=round(peer.bytes_per_second / 1e6),
                    best_megabytes_per_second=round(slow_below / SLOW_SHARE / 1e6),
                )


def write_pattern(pages: PageMemory, page: int) -> None:
    """Make it a known page."""
    ctypes.memmove(pages.address_of(page), _pattern(pages), pages.page_bytes)


def holds_pattern(pages: PageMemory, page: int) -> bool:
    """Whether it has the bytes of a known page."""
    return ctypes.string_at(pages.address_of(page), pages.page_bytes) == _pattern(pages)


def _pattern(pages: PageMemory) -> bytes:
    return (PATTERN * (pages.page_bytes // len(PATTERN) + 1))[: pages.page_bytes]


def _link(peer: _Peer) -> KvLink:
    return KvLink(peer.transport, peer.bytes_per_second)
