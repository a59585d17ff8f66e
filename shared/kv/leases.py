"""Leases: how long the pages of a request stay locked for the holder of their baton.

Both kinds of worker lease pages: prefill those of every prompt it has computed, decode those of requests that migrate.
A lease binds a request's locked pages to one *word* that readers can check (`baton` draws the timeline). The
word is a nonce that nobody can guess, so who has it was given the baton. Ending a lease clears the word first; only
then are the pages unlocked.

The router that was given the baton renews the lease, releases it once the pages have arrived, or cancels it. A lease
ends by itself `lease_seconds` after its last renewal, and the router is sent a refusal. The number of words bounds the
leases at a time.
"""

from __future__ import annotations

import enum
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from shared.batch.effects import Send, WorkerEffect
from shared.batch.req import Req
from shared.kv.kv_memory import KvMemory
from shared.primitives.errors import InvariantError
from shared.primitives.metric_fields import CounterMetric, all_declared, counted
from shared.transfer.protocol import LeaseWords
from shared.wire.baton import Baton, Holder
from shared.wire.messages import Refused, Release, Renew


class LeaseEnd(enum.Enum):
    """Why a lease has ended."""

    RELEASED = "released"  # the pages have arrived elsewhere
    EXPIRED = "expired"  # it was not renewed in time
    CANCELLED = "cancelled"  # the request was cancelled, or the session of its router has ended


@dataclass(slots=True, eq=False)
class Lease:
    """The pages of `req` are locked until `expires_at` (seconds on the worker's own clock)."""

    index: int
    nonce: int
    req: Req
    tokens: int  # of the request, which get no more
    expires_at: float


LEASES_GRANTED = CounterMetric("segue_leases_granted_total", "Leases that a worker granted.")
LEASES_ENDED = CounterMetric("segue_leases_ended_total", "Leases that ended, by how.", ("cause",))


@all_declared
@dataclass(slots=True)
class LeaseCounters:
    """What has happened to leases so far."""

    leases_granted: int = counted(LEASES_GRANTED)
    leases_released: int = counted(LEASES_ENDED, cause="released")
    leases_expired: int = counted(LEASES_ENDED, cause="expired")


class LeaseTable:
    """All leases of one worker, by request id. Effects are appended in the order of their causes.

    `on_end` is called with the request of every lease that has ended, after its pages are unlocked.
    """

    def __init__(
        self,
        memory: KvMemory,
        holder: Holder,
        words: LeaseWords,
        kv_format: str,
        lease_seconds: float,
        counters: LeaseCounters,
        effects: list[WorkerEffect],
        on_end: Callable[[Req, LeaseEnd], None],
    ):
        self._memory = memory
        self._holder = holder
        self._words = words
        self._kv_format = kv_format
        self._lease_seconds = lease_seconds
        self._counters = counters
        self._effects = effects
        self._on_end = on_end
        self._free_words = deque(range(len(words)))
        self._leases: dict[str, Lease] = {}
        self._holds: Counter[int] = Counter()  # leases by page
        self._tokens: Counter[str] = Counter()  # of their requests, by tenant

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def free(self) -> int:
        """How many more leases can be granted now."""
        return len(self._free_words)

    @property
    def pages(self) -> int:
        """Pages held by leases, one that several hold counted once."""
        return len(self._holds)

    @property
    def tokens_by_tenant(self) -> Counter[str]:
        """The tokens of the requests of each tenant, a copy: a sum over all of them would be dear."""
        return self._tokens.copy()

    @property
    def reqs(self) -> list[Req]:
        """The requests whose pages are leased, oldest lease first."""
        return [lease.req for lease in self._leases.values()]

    def find(self, rid: str) -> Lease | None:
        """The lease of this request, of whatever attempt."""
        return self._leases.get(rid)

    def grant(self, req: Req, now: float) -> Baton:
        """Lease the settled pages of a request that is in no step any more; the caller has made sure of a word."""
        if req.rid in self._leases:
            raise InvariantError(f"request {req.rid} already has a lease")
        index, pages = self._free_words.popleft(), tuple(req.pages[: self._memory.pages_for(req.kv_len)])
        lease = Lease(
            index, self._words.open(index, pages), req, len(req.token_ids), now + self._lease_seconds
        )
        self._leases[req.rid] = lease
        self._tokens[req.tenant] += lease.tokens
        self._holds.update(req.pages)
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
            pages=pages,
        )

    def on_command(self, command: Renew | Release, now: float) -> None:
        """The router that has the baton extends the lease or ends it; without effect if it has ended already."""
        lease = self._leases.get(command.rid)
        if lease is None or lease.req.attempt != command.attempt:
            return
        if isinstance(command, Renew):
            lease.expires_at = now + self._lease_seconds
        else:
            self._counters.leases_released += 1
            self._end(lease, LeaseEnd.RELEASED)

    def cancel(self, rid: str, attempt: int) -> bool:
        """End the lease of this attempt or an older one; whether there was any."""
        lease = self._leases.get(rid)
        if lease is None or lease.req.attempt > attempt:
            return False
        self._end(lease, LeaseEnd.CANCELLED)
        return True

    def forget_router(self, router: str) -> None:
        """End the leases of this router's requests: no other router can release them."""
        for lease in [lease for lease in self._leases.values() if lease.req.router == router]:
            self._end(lease, LeaseEnd.CANCELLED)

    def expire(self, now: float) -> None:
        """End the leases that were not renewed in time, and refuse them to their routers."""
        for lease in [lease for lease in self._leases.values() if lease.expires_at <= now]:
            self._counters.leases_expired += 1
            self._end(lease, LeaseEnd.EXPIRED)
            refused = Refused(lease.req.rid, lease.req.attempt, "stale", "the lease was not renewed")
            self._effects.append(Send(lease.req.router, refused))

    def next_expiry(self) -> float | None:
        """When the next lease ends by itself."""
        return min((lease.expires_at for lease in self._leases.values()), default=None)

    def _end(self, lease: Lease, end: LeaseEnd) -> None:
        """Clear the word, then unlock the pages: in this order."""
        del self._leases[lease.req.rid]
        self._words.clear(lease.index)
        self._free_words.append(lease.index)
        self._tokens[lease.req.tenant] -= lease.tokens
        if not self._tokens[lease.req.tenant]:
            del self._tokens[lease.req.tenant]
        for page in lease.req.pages:
            self._holds[page] -= 1
            if not self._holds[page]:
                del self._holds[page]
        self._memory.release(lease.req)
        self._on_end(lease.req, end)
