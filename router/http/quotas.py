"""What the holder of an API key has left: requests and tokens of this minute, and requests at a time.

A key's limits are for all routers of a release together. They do not ask each other: each enforces its share, which is
the limit divided by the routers that are Ready, at least one request and one token. So the sum is right where
connections are spread, and a client whose connections all end at one router gets one share. How many run is exact.

A request is let in while tokens are left, and pays when they are known: its prompt when it is tokenized, its output as
it comes. So the level can fall below zero, and the next request waits longer (`TokenBucket`).

The quota of a name that is in the file no more goes with its last request.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from router.core.token_bucket import TokenBucket
from shared.api_keys import ApiKey

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class QuotaRefusal:
    """Why one more request is not let in."""

    limit: Literal["rpm", "tpm", "concurrent"]
    message: str
    seconds: float | None  # until it may come again; None: nobody knows


class KeyQuota:
    """What is left for one name. `now` in seconds, of a clock that never goes back."""

    def __init__(self) -> None:
        self.running = 0
        self._key: ApiKey | None = None
        self._routers = 0
        self._running_max = 0
        self._requests: TokenBucket | None = None
        self._tokens: TokenBucket | None = None

    def follow(self, key: ApiKey, routers: int, now: float) -> None:
        """Take on the limits of the file, shared with so many routers."""
        if self._key is not key or self._routers != routers:
            self._key, self._routers = key, routers
            self._running_max = math.ceil(key.concurrent / routers)
            self._requests = _bucket(self._requests, key.rpm, routers, now)
            self._tokens = _bucket(self._tokens, key.tpm, routers, now)

    def enter(self, now: float) -> QuotaRefusal | None:
        """Let one more request in, and count it; or say why not. Each one let in must `leave`."""
        if self._running_max and self.running >= self._running_max:
            message = f"this key may have {self._running_max} requests at a time here, and has them"
            return QuotaRefusal("concurrent", message, None)
        refusal = _empty("rpm", "requests", self._requests, now) or _empty("tpm", "tokens", self._tokens, now)
        if refusal is not None:
            return refusal
        if self._requests is not None:
            self._requests.take(1, now)
        self.running += 1
        return None

    def leave(self) -> None:
        """A request that was let in has ended."""
        assert self.running > 0
        self.running -= 1

    def spend(self, tokens: int, now: float) -> None:
        """Pay for tokens; a negative number gives back."""
        if self._tokens is not None:
            self._tokens.take(tokens, now)

    def headers(self, now: float) -> Headers:
        """What is left, as OpenAI's API says it; nothing of what has no limit."""
        headers: Headers = []
        for unit, bucket in ((b"requests", self._requests), (b"tokens", self._tokens)):
            if bucket is not None:
                reset = bucket.seconds_until_full(now)
                headers += [
                    (b"x-ratelimit-limit-" + unit, b"%d" % bucket.per_minute),
                    (b"x-ratelimit-remaining-" + unit, b"%d" % max(0, math.floor(bucket.level(now)))),
                    (b"x-ratelimit-reset-" + unit, b"%.3fs" % reset),
                ]
        return headers


class Quotas:
    """The quotas of all names that were used. `routers` gives how many are Ready, this one included."""

    def __init__(self, routers: Callable[[], int], valid_names: Callable[[], set[str]]):
        self._routers = routers
        self._valid_names = valid_names
        self._by_name: dict[str, KeyQuota] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    def of(self, key: ApiKey, now: float) -> KeyQuota:
        """The quota of this key's name."""
        quota = self._by_name.get(key.name)
        if quota is None:
            self._forget_the_invalid()
            quota = self._by_name[key.name] = KeyQuota()
        quota.follow(key, max(1, self._routers()), now)
        return quota

    def _forget_the_invalid(self) -> None:
        valid = self._valid_names()
        self._by_name = {
            name: quota for name, quota in self._by_name.items() if name in valid or quota.running
        }


def _empty(
    limit: Literal["rpm", "tpm"], unit: str, bucket: TokenBucket | None, now: float
) -> QuotaRefusal | None:
    seconds = bucket.seconds_until(1, now) if bucket is not None else 0.0
    if bucket is None or seconds <= 0:
        return None
    message = (
        f"this key has used its {math.floor(bucket.per_minute)} {unit} a minute here; "
        f"try again in {math.ceil(seconds)} s"
    )
    return QuotaRefusal(limit, message, seconds)


def _bucket(old: TokenBucket | None, limit: int, routers: int, now: float) -> TokenBucket | None:
    if not limit:
        return None
    share = max(1.0, limit / routers)
    if old is None:
        return TokenBucket(share, now)
    old.resize(share, now)
    return old
