"""What a worker lends: the pages of requests that continue elsewhere, from the baton to the end of its lease.

Both kinds of worker lend: prefill every prompt it has computed, decode those it was asked to move. The router that
was given the baton renews the lease, releases it once the pages have arrived, or cancels it; a lease nobody renews
ends by itself, and the router is told.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.baton import Baton, Holder
from shared.effects import Effect, Send
from shared.kv.kv_memory import KvMemory
from shared.kv.leases import Lease, Leases
from shared.messages import Refused, Release, Renew
from shared.req import Req
from shared.transfer.protocol import LeaseWords, PagesRead


@dataclass(slots=True)
class LeaseCounters:
    """What has happened to leases so far."""

    leases_granted: int = 0
    leases_released: int = 0
    leases_expired: int = 0
    collected: int = 0
    late_collections: int = 0  # notifications of leases that had ended


class Lending:
    """The leases of one worker and the pages they lock. Effects are appended in the order of their causes."""

    def __init__(
        self,
        memory: KvMemory,
        holder: Holder,
        words: LeaseWords,
        kv_format: str,
        lease_seconds: float,
        counters: LeaseCounters,
        effects: list[Effect],
    ):
        self.leases = Leases(words, holder.epoch, lease_seconds)
        self._memory = memory
        self._holder = holder
        self._kv_format = kv_format
        self._counters = counters
        self._effects = effects

    def __len__(self) -> int:
        return len(self.leases)

    @property
    def reqs(self) -> list[Req]:
        """The requests whose pages are lent, oldest lease first."""
        return [lease.req for lease in self.leases.all()]

    def lend(self, req: Req, now: float) -> Baton:
        """Lease the settled pages of a request that is in no step any more; the caller has made sure of a word."""
        lease = self.leases.grant(req, now)
        self._counters.leases_granted += 1
        return Baton(
            rid=req.rid,
            attempt=req.attempt,
            holder=self._holder,
            kv_format=self._kv_format,
            lease=lease.index,
            nonce=lease.nonce,
            kv_len=req.kv_len,
            prompt_len=req.prompt_len,
            pages=tuple(req.pages[: self._memory.pages_for(req.kv_len)]),
        )

    def on_command(self, command: Renew | Release, now: float) -> None:
        """The router that has the baton wants the pages for longer, or no more."""
        if isinstance(command, Renew):
            self.leases.renew(command.rid, command.attempt, now)
        elif lease := self.leases.of(command.rid, command.attempt):
            self._counters.leases_released += 1
            self._end(lease)

    def on_collected(self, event: PagesRead) -> None:
        """A reader tells that it is done; the router's Release ends the lease."""
        if self.leases.collect(event):
            self._counters.collected += 1
        else:
            self._counters.late_collections += 1

    def cancel(self, rid: str, attempt: int) -> bool:
        """End the lease of this attempt or an older one; whether there was any."""
        lease = self.leases.find(rid)
        if lease is None or lease.req.attempt > attempt:
            return False
        self._end(lease)
        return True

    def forget_router(self, router: str) -> None:
        """Nobody is left to release its leases."""
        for lease in self.leases.of_router(router):
            self._end(lease)

    def expire(self, now: float) -> None:
        """End the leases nobody renewed."""
        for lease in self.leases.expired(now):
            self._counters.leases_expired += 1
            self._end(lease)
            refused = Refused(lease.req.rid, lease.req.attempt, "stale", "nobody renewed the lease")
            self._effects.append(Send(lease.req.router, refused))

    def next_expiry(self) -> float | None:
        """When the next lease ends by itself."""
        return self.leases.next_expiry()

    def _end(self, lease: Lease) -> None:
        self._memory.release(self.leases.end(lease))
