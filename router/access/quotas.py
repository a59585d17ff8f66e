"""What the holder of an API key has left: requests and tokens of this minute, and requests at a time.

A key's limits are for all routers of a release together. They do not ask each other: each enforces its share, which is
the limit divided by the routers that are Ready, at least one request and one token. So the sum is right where
connections are spread, and a client whose connections all end at one router gets one share. How many run is exact.

    enter ──► reserve ──► spend, give back ──► leave

A request enters before its body is read, while any tokens are left. When it is tokenized, what it will need is
reserved: its prompt, and for each answer its `max_tokens`, at most RESERVED_OUTPUT_MAX. What comes is paid from that,
what comes beyond it from the level, which can then fall below zero: the next request waits longer (`TokenBucket`). What
is left of a reservation goes back. So requests that come at once are not let in on the same tokens, and one with a
large `max_tokens` that it does not use keeps few others out. Each answer counts among those that run (`concurrent`).

The quota of a name that is in the file no more goes with its last request.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from router.core.requests.token_bucket import TokenBucket
from shared.process.api_keys import ApiKey

RESERVED_OUTPUT_MAX = 256  # tokens of one answer that are reserved; most chats end before

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class QuotaRefusal:
    """Why one more request is not let in."""

    limit: Literal["rpm", "tpm", "concurrent"]
    message: str
    seconds: float | None  # until it may come again; None: nobody knows
    never: bool = False  # it asks for more than the key may ever have


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
        refusal = _short_of("rpm", "requests", self._requests, 1, now) or _short_of(
            "tpm", "tokens", self._tokens, 1, now
        )
        if refusal is not None:
            return refusal
        if self._requests is not None:
            self._requests.take(1, now)
        self.running += 1
        return None

    def reserve(self, tokens: int, answers: int, now: float) -> QuotaRefusal | None:
        """Take the tokens that a request which was let in will need, and count its answers; or say why not."""
        if self._running_max and answers > self._running_max:
            message = (
                f"this request asks for {answers} answers at a time, and this key may have {self._running_max} here: "
                "ask for fewer (n, prompts) in one request"
            )
            return QuotaRefusal("concurrent", message, None, never=True)
        if self._running_max and self.running + answers - 1 > self._running_max:
            message = (
                f"this key may have {self._running_max} answers at a time here; {self.running - 1} run, and this "
                f"request asks for {answers}"
            )
            return QuotaRefusal("concurrent", message, None)
        bucket = self._tokens
        if bucket is not None:
            if answers > 1 and tokens > bucket.per_minute:
                message = (
                    f"this request may take {tokens} tokens, and this key may have {math.floor(bucket.per_minute)} a "
                    "minute here: ask for fewer answers (n, prompts), or for a smaller max_tokens"
                )
                return QuotaRefusal("tpm", message, None, never=True)
            if refusal := _short_of("tpm", "tokens", bucket, tokens, now):
                return refusal
            bucket.take(tokens, now)
        self.running += answers - 1
        return None

    def leave(self, answers: int = 1) -> None:
        """A request that was let in has ended, and had so many answers."""
        assert self.running >= answers
        self.running -= answers

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


def _short_of(
    limit: Literal["rpm", "tpm"], unit: str, bucket: TokenBucket | None, needed: int, now: float
) -> QuotaRefusal | None:
    seconds = bucket.seconds_until(needed, now) if bucket is not None else 0.0
    if bucket is None or seconds <= 0:
        return None
    level = max(0, math.floor(bucket.level(now)))
    left = f"; {level} are left, and this request may take {needed}" if needed > 1 else ""
    message = (
        f"this key has used its {math.floor(bucket.per_minute)} {unit} a minute here{left}; "
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
