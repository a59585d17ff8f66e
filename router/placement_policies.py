"""How one of the workers that may have a request is chosen: the policies, by name.

A policy is a function of its candidates, its row in `POLICIES` and its name in `PolicyName`; settings and placement
ask no more of it. Who may be a candidate is decided in `router.core.fleet.placement`. This file is below
`router.config`, so it knows workers and settings by what it asks of them. Among equals the worker that was chosen
longest ago wins. The names are those that SGLang's router and its data-parallel controller use.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

from shared.wire.messages import Hello, Load


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What placement must know of a request that waits for a worker."""

    rid: str
    model_name: str
    tenant: str = ""
    tokens: int  # prompt and output so far
    tokens_max: int  # … when it has all its output
    blocks: tuple[bytes, ...] = ()  # names of its prefix blocks, see `prefix_index`
    session: str = ""
    model: str = ""  # fingerprint it must continue on; "": any
    kv_format: str = ""  # fingerprint of the pages it brings; "": it brings none
    determinism: str = ""  # fingerprint it had better continue on
    avoided: tuple[str, ...] = ()  # peers that have failed it
    features: frozenset[str] = frozenset()  # what its worker must know of sampling

    @property
    def group(self) -> tuple[str, str, str]:
        """Requests of a group compete for the same workers."""
        return (self.model_name, self.model, self.kv_format)


class Candidate(Protocol):
    """A worker, as far as a policy looks at it."""

    peer: str
    hello: Hello
    arrival: int
    last_chosen: int
    salt: int  # `salt_of` its uid
    load: Load
    pool_tokens: int

    @property
    def tokens_to_fetch(self) -> int: ...
    @property
    def requests(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def fullness(self) -> float: ...
    def work(self, now: float) -> float: ...


class PolicySettings(Protocol):
    """Settings of `router.config` that policies read."""

    @property
    def cache_hit_tokens_min(self) -> int: ...
    @property
    def cache_miss_weight(self) -> float: ...
    @property
    def own_worker_tokens_max(self) -> int: ...
    @property
    def imbalance_tokens_max(self) -> int: ...
    @property
    def imbalance_ratio_max(self) -> float: ...


OWN_BLOCK = 2  # of 64 tokens: prompts that differ behind it, as turns of a chat do, have the same own worker
MASK = (1 << 64) - 1
SLOWNESS_MAX = 16.0  # of a decode worker's step: what a worker tells does not keep others without work
HELD_WEIGHT = 0.1  # of a token that a decode worker holds, by one that it must fetch
FOUND_SHARE_MIN = 0.1  # below, the own worker of a prefix only breaks ties: there is one router, or no prefix
# of a prompt, what its own decode worker is taken to have while such workers have what other routers sent there: a turn
# of a conversation is mostly what was said before
OWN_HIT_SHARE = 0.9
OWN_AHEAD_TOKENS = 500  # … and a new prefix goes there if that costs no more tokens than it would elsewhere
# a worker that has lately computed so many times as much as another …
SPREAD_RATIO = 2
# … and so many times the prefix besides gives the other one a prefix that both have from then on
SPREAD_MISSES = 2

W = TypeVar("W", bound=Candidate)


# It has the prefix; it is the prefix's own worker; it has done least lately; those that have the prefix are far behind;
# it has least, by the policy; it has the session; it has the prompt from a sibling; it computes the prompt sooner;
# prompts wait and it has most streams; the worker that it leaves lacks pages
PlacementReason = Literal[
    "cached", "own", "spread", "balance", "least", "session", "group", "sooner", "packed", "headroom"
]


@dataclass(frozen=True, slots=True)
class Placement(Generic[W]):
    """A worker, and why."""

    worker: W
    why: str
    reason: PlacementReason  # … in one word
    hit_tokens: int = 0  # expected in its prefix cache
    shared_tokens: int = 0  # whose pages a sibling holds there
    own: bool = False  # is to have more of the prompt than is known, as its prefix's own worker


@dataclass(slots=True)
class Candidates(Generic[W]):
    """What a policy chooses by."""

    need: Need
    workers: Sequence[W]  # one at least
    look_up: Callable[[], Callable[[str], int]]  # finds the prompt in the index: a peer → its tokens of it
    settings: PolicySettings
    now: float  # seconds
    found_share: float  # of prompts that a cache had although nobody was known to have them

    def least(self, cost: Callable[[W], float]) -> W:
        """The worker that costs least."""
        return _least(self.workers, cost)


def _least(workers: Sequence[W], cost: Callable[[W], float]) -> W:
    return min(workers, key=lambda worker: (cost(worker), worker.last_chosen, worker.arrival))


def _round_robin(among: Candidates[W]) -> Placement[W]:
    return Placement(among.least(lambda _: 0), "its turn", "least")


def _total_requests(among: Candidates[W]) -> Placement[W]:
    best = among.least(lambda worker: worker.requests)
    return Placement(best, f"fewest requests: {best.requests}", "least")


def _total_tokens(among: Candidates[W]) -> Placement[W]:
    best = among.least(lambda worker: worker.fullness)
    return Placement(best, f"fewest tokens for its size: {best.tokens}", "least")


def _cache_aware(among: Candidates[W]) -> Placement[W]:
    """Fewest tokens to compute before the first token comes; a miss counts for more than its tokens.

    Where nobody is known to have the prompt, its own worker: so routers agree that do not hear of each other. A worker
    that is far behind the others, or that has computed several times as much lately, is relieved of a hot prefix.
    """
    need, settings = among.need, among.settings
    if need.kv_format:
        return _fewest_to_fetch(among)
    cached_tokens = among.look_up()

    def hit_of(worker: W) -> int:
        hit = min(cached_tokens(worker.peer), need.tokens - 1)
        return hit if hit >= settings.cache_hit_tokens_min else 0

    def cost(worker: W) -> float:
        return worker.tokens + settings.cache_miss_weight * (need.tokens - hit_of(worker))

    least = among.least(lambda worker: worker.tokens)
    abreast = [worker for worker in among.workers if not _is_far_behind(worker, least, settings)]
    best = _least(abreast, cost)
    hit, queued = hit_of(best), f"{best.tokens} queued"
    if not hit:
        if any(hit_of(worker) for worker in among.workers):
            return Placement(best, f"those that have it have too much to do, {queued}", "balance")
        own = next(by_rendezvous(need, among.workers), None)
        may_have_it = among.found_share >= FOUND_SHARE_MIN
        most = min(settings.own_worker_tokens_max, settings.cache_miss_weight * need.tokens) * may_have_it
        if own is not None and own.tokens <= least.tokens + most:
            return Placement(own, f"the prefix's own worker, {own.tokens} queued", "own", own=True)
        return Placement(best, f"fewest queued: {best.tokens}", "least")
    idlest = among.least(lambda worker: worker.work(among.now))
    spare = best.work(among.now) - SPREAD_RATIO * idlest.work(among.now)
    missing = hit - hit_of(idlest)
    if 0 < SPREAD_MISSES * missing < spare and idlest.tokens <= best.tokens:
        return Placement(
            idlest, f"has computed least lately, {idlest.tokens} queued", "spread", hit_of(idlest)
        )
    return Placement(best, f"{hit} of {need.tokens} tokens expected in its cache, {queued}", "cached", hit)


def _fewest_to_fetch(among: Candidates[W]) -> Placement[W]:
    """The decode worker with fewest tokens to fetch and a tenth of those held, by the size of its pool and its step.

    What its links have to bring before it is fetched before, too.

    A worker whose step takes four times as long as another's counts as one that holds four times as much. The own
    worker of a prompt is taken to have most of it, while such workers have what nobody was known to have: other routers
    send the turns of a conversation there. Where no prefix was found lately it counts where nobody has the prompt.
    """
    need, settings = among.need, among.settings
    cached_tokens = among.look_up()
    pool = max(worker.pool_tokens for worker in among.workers)
    told = [worker.load.step_seconds for worker in among.workers if worker.load.step_seconds]
    fastest = min(told, default=0.0)
    may_have_it = among.found_share >= FOUND_SHARE_MIN

    def hit_of(worker: W) -> int:
        hit = min(cached_tokens(worker.peer), need.tokens - 1)
        return hit if hit >= settings.cache_hit_tokens_min else 0

    def cost(worker: W) -> float:
        slowness = min(SLOWNESS_MAX, worker.load.step_seconds / fastest) if worker.load.step_seconds else 1.0
        larger = pool / worker.pool_tokens if worker.pool_tokens else 1.0
        to_fetch = need.tokens - hit_of(worker) + worker.tokens_to_fetch
        return to_fetch + HELD_WEIGHT * slowness * larger * (worker.tokens + need.tokens)

    best = among.least(cost)
    hit = hit_of(best)
    is_new = not hit and not any(hit_of(worker) for worker in among.workers)
    own = next(by_rendezvous(need, among.workers), None) if is_new or may_have_it else None
    if own is not None and (is_new or own is not best):
        there = hit_of(own)
        if is_new:
            worth = need.tokens + OWN_AHEAD_TOKENS * may_have_it
        else:
            worth = max(0, int(OWN_HIT_SHARE * need.tokens) - there)
        if cost(own) <= cost(best) + worth:
            return Placement(own, f"the prefix's own worker, {own.tokens} held", "own", there, own=True)
    why = f"{hit} of {need.tokens} tokens expected in its cache, {best.tokens} held"
    return Placement(best, why, "cached" if hit else "least", hit)


def _is_far_behind(worker: W, least: W, settings: PolicySettings) -> bool:
    """Whether a worker has so much more to do than another that no cache hit is worth it."""
    gap = worker.tokens - least.tokens
    return gap > settings.imbalance_tokens_max and worker.tokens > settings.imbalance_ratio_max * least.tokens


def by_rendezvous(need: Need, workers: Sequence[W]) -> Iterator[W]:
    """The workers, a prefix's own one first: where it is lost only its prefixes get another one.

    Empty for a prompt so short that it is no prefix. Mostly the first is enough, so the others are sorted behind it.
    """
    if len(need.blocks) < OWN_BLOCK or not workers:
        return
    early = int.from_bytes(need.blocks[OWN_BLOCK - 1])

    def rank(worker: W) -> tuple[int, str]:
        return early * worker.salt & MASK, worker.peer

    own = max(workers, key=rank)
    yield own
    yield from sorted((worker for worker in workers if worker is not own), key=rank, reverse=True)


def salt_of(uid: str) -> int:
    """What a worker's weight for a prefix is made with: a product of 64 bits, which costs less than a digest."""
    return int.from_bytes(hashlib.blake2b(uid.encode(), digest_size=8).digest()) | 1


def _power_of_two(among: Candidates[W]) -> Placement[W]:
    """Two by the request's own hash, then the less full one."""
    rid, workers = among.need.rid.encode(), among.workers
    first = zlib.crc32(rid) % len(workers)
    step = 1 + zlib.crc32(rid, 1) % max(1, len(workers) - 1)
    pair = [workers[first], workers[(first + step) % len(workers)]]
    best = _least(pair, lambda worker: worker.fullness)
    return Placement(best, f"the less full of two: {best.tokens} tokens", "least")


def _follow_bootstrap_room(among: Candidates[W]) -> Placement[W]:
    """One session, one worker, by rendezvous hashing: only the sessions of a lost worker get another one."""
    session = among.need.session
    if not session:
        return _total_tokens(among)
    best = max(among.workers, key=lambda worker: (_weight(session, worker.hello.uid), worker.peer))
    return Placement(best, "its session's worker", "session")


def _weight(session: str, uid: str) -> bytes:
    return hashlib.blake2b(f"{session}@{uid}".encode(), digest_size=8).digest()


class Choose(Protocol):
    """Chooses one of the candidates."""

    def __call__(self, among: Candidates[W], /) -> Placement[W]: ...


@dataclass(frozen=True, slots=True)
class PlacementPolicy:
    """How it chooses, and what placement does for it."""

    choose: Choose
    # the index has workers of its role, and a handful has those with most of a prompt
    reads_prefixes: bool = False
    keeps_sessions: bool = False  # a request with a session has the whole fleet as candidates


LocalPrefill = Literal["never", "fallback", "short", "always"]  # whether decode workers compute prompts

# Prompts are computed by prefill workers; by decode workers; by whoever has done it sooner; by nobody
Serving = Literal["disaggregated", "aggregated", "conditional", "none"]


def serving_of(local_prefill: LocalPrefill, *, prefill: bool, decode: bool, extends: bool) -> Serving:
    """Who computes prompts where such workers take requests; `extends`: one of decode may be given prompts."""
    if extends and (local_prefill == "always" or not prefill):
        return "aggregated"
    if extends and local_prefill == "short":
        return "conditional"
    return "disaggregated" if prefill and decode else "none"


PolicyName = Literal[
    "round_robin", "total_requests", "total_tokens", "cache_aware", "follow_bootstrap_room", "power_of_two"
]
POLICIES: dict[PolicyName, PlacementPolicy] = {
    "round_robin": PlacementPolicy(_round_robin),
    "total_requests": PlacementPolicy(_total_requests),
    "total_tokens": PlacementPolicy(_total_tokens),
    "cache_aware": PlacementPolicy(_cache_aware, reads_prefixes=True),
    "follow_bootstrap_room": PlacementPolicy(_follow_bootstrap_room, keeps_sessions=True),
    "power_of_two": PlacementPolicy(_power_of_two),
}
