"""Tenants: in whose name requests come, what each has live, what it may spend, and its part of the prefix caches.

A tenant is a name that the HTTP side gives: today the client's address. It is known while it has a live request, and
afterwards only until its tokens of this minute have flowed back, so that memory is bounded. Workers see a hash of the
name, equal at all routers. This file knows neither queues nor workers; who goes first is decided in `VirtualTime`.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field

from router.config import RouterConfig, weight_of
from router.core.requests.lifecycle import RequestState
from router.core.requests.token_bucket import TokenBucket

IDLE_TENANTS_MAX = 10_000  # remembered for what they have spent; about 5 MB


@dataclass(slots=True, eq=False)
class Tenant:
    """One tenant; `RequestTable` is the only writer of its counts."""

    name: str
    weight: float  # its share of the workers' time is in proportion to it
    key: str  # what workers know it by; empty for the tenant without a name
    bucket: TokenBucket | None  # None: it may spend what it likes
    by_state: Counter[RequestState] = field(default_factory=Counter)  # its live requests
    # by KV group: those in front of decode, and those whose prompt a decode worker computes
    begun: Counter[tuple[str, str]] = field(default_factory=Counter)

    @property
    def live(self) -> int:
        """Requests of the tenant between arrival and end."""
        return self.by_state.total()

    @property
    def waiting(self) -> int:
        """Requests of the tenant that no worker has."""
        return self.by_state[RequestState.WAITING]

    @property
    def running(self) -> int:
        """Requests of the tenant that a worker has computed something of."""
        return self.live - self.waiting

    @property
    def before_decode(self) -> int:
        """Requests of the tenant that tie up, or soon will, pages of a prefill worker."""
        return self.by_state[RequestState.PREFILLING] + self.by_state[RequestState.READY]

    def spend(self, tokens: int, now: float) -> None:
        """Count tokens of a prompt or an output against its tokens per minute."""
        if self.bucket is not None:
            self.bucket.take(tokens, now)

    def seconds_until(self, tokens: int, now: float) -> float:
        """Seconds until it may send a prompt of `tokens` tokens; 0.0: now."""
        return self.bucket.seconds_until(tokens, now) if self.bucket is not None else 0.0

    def cache_key(self, salt: str, *, shared: bool) -> str:
        """Names the prefix caches of its requests with this salt. `shared`: all tenants have the same ones."""
        return _digest("cache", salt) if shared else _digest("cache", salt, self.key)


class Tenants:
    """Tenants that have a live request, and those that still owe tokens."""

    def __init__(self, settings: RouterConfig):
        self._tokens_per_minute = settings.tenant_tokens_per_minute
        self._weights = dict(map(weight_of, settings.tenant_weights))
        self._live: dict[str, Tenant] = {}
        self._idle: OrderedDict[str, Tenant] = OrderedDict()  # longest idle first

    def __len__(self) -> int:
        """How many have a live request."""
        return len(self._live)

    @property
    def remembered(self) -> int:
        """How many are known, those without a live request included."""
        return len(self._live) + len(self._idle)

    def find(self, name: str, now: float) -> Tenant:
        """The tenant of this name; it is not remembered before it enters."""
        return self._live.get(name) or self._idle.get(name) or self._new(name, now)

    def enter(self, tenant: Tenant) -> None:
        """Note that the tenant has a live request."""
        self._idle.pop(tenant.name, None)
        self._live[tenant.name] = tenant

    def leave(self, tenant: Tenant, now: float) -> None:
        """Forget it, unless it has another live request or owes tokens."""
        if not tenant.live:
            self.forget(tenant, now)

    @property
    def all_live(self) -> Collection[Tenant]:
        """Tenants that have a live request."""
        return self._live.values()

    def forget(self, tenant: Tenant, now: float) -> None:
        """Note that the tenant has no live request; a no-op where that is known."""
        if self._live.pop(tenant.name, None) is None:
            return
        if tenant.bucket is not None:
            self._idle[tenant.name] = tenant
        while self._idle and (len(self._idle) > IDLE_TENANTS_MAX or self._owes_nothing(now)):
            self._idle.popitem(last=False)

    def _owes_nothing(self, now: float) -> bool:
        bucket = next(iter(self._idle.values())).bucket
        return bucket is None or bucket.full(now)

    def _new(self, name: str, now: float) -> Tenant:
        per_minute = self._tokens_per_minute
        bucket = TokenBucket(per_minute, now) if per_minute else None
        return Tenant(name, self._weights.get(name, 1.0), _digest("tenant", name), bucket)


def _digest(kind: str, *words: str) -> str:
    """Differs for different words, reveals none, and is the same in every process. Empty when all words are."""
    if not any(words):
        return ""
    digest = hashlib.blake2b(digest_size=16, person=f"segue {kind}".encode())
    for word in words:
        data = word.encode()
        digest.update(len(data).to_bytes(4) + data)
    return digest.hexdigest()
