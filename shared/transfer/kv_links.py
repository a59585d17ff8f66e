"""The KV links of one worker: whether each peer may be read from, by which transport, and how fast.

A peer is the identity of a holder, who it is and where it is read: none answers for another one.

Every worker has a *known page*, which holds the same bytes everywhere. The first fetch from a peer reads that page
before any KV (see `fetches`) and reports the result here: after wrong bytes nothing is ever fetched from that peer.

Speed is measured by real fetches, from the first post to the last page: those of at least `MEASURED_BYTES_MIN`, for
smaller ones measure the worker's loop. The best of a peer's last `RECENT_FETCHES` counts, since either side may be busy
at times. A link is slow when it stays below `SLOW_SHARE` of the best link; each slow link is logged once.

Logs what an operator must know of a peer, and knows no requests. Doubtful: a fetch is seen to be done only when the
loop looks, so a fetch that is short beside a step looks slower than its link is.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import structlog

from shared.transfer.counters import KvCounters
from shared.transfer.protocol import KvLink
from shared.transfer.reader import PEERS_MAX
from shared.wire.baton import Holder, HolderIdentity

UNKNOWN = "unknown"  # transport of a peer that was never checked, or where UCX has printed nothing
MEASURED_BYTES_MIN = 2**20
RECENT_FETCHES = 8
SLOW_FETCHES_MIN = 3  # fetches of a peer that are measured before its link is called slow
SLOW_SHARE = 0.25  # of the best link: less means another transport or a fault, not a busy moment

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Peer:
    """What is known of one checked peer."""

    name: str
    transport: str
    refusal: str = ""
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_FETCHES))  # bytes per second
    reported: bool = False  # as slow

    @property
    def bytes_per_second(self) -> float:
        return max(self.recent, default=0.0)


class KvLinks:
    """The peers that were checked, at most `PEERS_MAX`; the one used least recently is forgotten first."""

    def __init__(self, own: Holder, counters: KvCounters):
        self._own = own.identity
        self._counters = counters
        self._own_transport = ""
        self._peers: dict[HolderIdentity, _Peer] = {}  # least recently used first; this worker is among them
        self._transports: list[str] = []  # by which others are read

    @property
    def links(self) -> dict[str, KvLink]:
        """The measured links to other workers, by name."""
        return {
            peer.name: KvLink(peer.transport, peer.bytes_per_second) for peer in self._others() if peer.recent
        }

    @property
    def slow_links(self) -> int:
        """How many of them are slow."""
        return sum(self._is_slow(peer) for peer in self._others())

    def link(self, holder: Holder) -> KvLink | None:
        """The link to a worker, itself included; None before it was checked."""
        peer = self._peers.get(holder.identity)
        return KvLink(peer.transport, peer.bytes_per_second) if peer else None

    def needs_check(self, holder: Holder) -> bool:
        """Whether the holder's known page has not been compared yet."""
        return holder.known_page >= 0 and holder.identity not in self._peers

    def refusal(self, holder: Holder) -> str:
        """Why nothing is fetched from this worker; empty: it may be read."""
        peer = self._peers.get(holder.identity)
        return peer.refusal if peer else ""

    def note_use(self, holder: Holder) -> None:
        """A fetch from this worker begins."""
        if peer := self._peers.pop(holder.identity, None):
            self._peers[holder.identity] = peer

    def note_check(self, holder: Holder, printed_transport: str, *, right_bytes: bool) -> None:
        """The holder's known page was read. `printed_transport` is `Reader.new_transport` after that."""
        if holder.identity not in self._peers:
            self._add(holder, printed_transport)
        peer = self._peers[holder.identity]
        if not right_bytes and not peer.refusal:
            peer.refusal = f"the known page of {holder.name} came with other bytes: so would its KV"
            log.error("transfer.wrong_bytes", peer=holder.name, transport=peer.transport)

    def note_fetch(self, holder: Holder, fetched_bytes: int, seconds: float) -> None:
        """The pages of a fetch have arrived, `seconds` after the first of them was asked for."""
        peer = self._peers.get(holder.identity)
        if fetched_bytes and holder.identity != self._own:
            transport = peer.transport if peer else UNKNOWN
            self._counters.fetches[transport] += 1
            self._counters.fetched_bytes[transport] += fetched_bytes
        if peer is None or fetched_bytes < MEASURED_BYTES_MIN:
            return
        peer.recent.append(fetched_bytes / max(seconds, 1e-9))
        self._report_slow()

    def _add(self, holder: Holder, printed_transport: str) -> None:
        former = [each for each in self._peers if each[0] == holder.uid and each[1] != holder.epoch]
        for each in former:  # before it restarted
            del self._peers[each]
        while len(self._peers) >= PEERS_MAX:
            del self._peers[next(iter(self._peers))]
        transport = self._name_transport(holder, printed_transport)
        self._peers[holder.identity] = _Peer(holder.name, transport)

    def _others(self) -> list[_Peer]:
        return [peer for identity, peer in self._peers.items() if identity != self._own]

    def _name_transport(self, holder: Holder, printed: str) -> str:
        """UCX prints a kind of connection once: without a print-out the link is of a kind that was printed before."""
        if holder.identity == self._own:
            self._own_transport = printed or self._own_transport or UNKNOWN
            return self._own_transport
        names = [printed] if printed else self._transports or [self._own_transport or UNKNOWN]
        self._transports += [transport for transport in names if transport not in self._transports]
        return " or ".join(names)

    def _best(self) -> float:
        return max((peer.bytes_per_second for peer in self._others()), default=0.0)

    def _is_slow(self, peer: _Peer) -> bool:
        measured = len(peer.recent) >= SLOW_FETCHES_MIN
        return measured and peer.bytes_per_second < SLOW_SHARE * self._best()

    def _report_slow(self) -> None:
        for peer in self._others():
            if not peer.reported and self._is_slow(peer):
                peer.reported = True
                log.warning(
                    "transfer.slow_link",
                    peer=peer.name,
                    transport=peer.transport,
                    megabytes_per_second=round(peer.bytes_per_second / 1e6),
                    best_megabytes_per_second=round(self._best() / 1e6),
                )
