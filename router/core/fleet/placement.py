"""Which worker gets a request: pure functions of the request and the fleet.

First who *may* have it (model, KV format, size, room), then who *should* (the policy, by name). Among equals the
worker that was chosen longest ago wins, so that light traffic uses the whole fleet. In a large fleet only a handful is
compared, see `_rounds`; chance there comes from the request's id, so that the same inputs give the same choices.
The names of the policies are those that SGLang's router and its data-parallel controller use.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from router.config import RouterConfig
from router.core.fleet.prefix_index import PrefixIndex
from router.core.fleet.workers import Fleet, Worker
from shared.wire.messages import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What placement must know of a request that waits for a worker."""

    rid: str
    model_name: str
    tenant: str = ""
    tokens: int  # prompt and output so far
    tokens_max: int  # … when it has all its output
    blocks: tuple[int, ...] = ()  # names of its prefix blocks, see `prefix_index`
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


@dataclass(frozen=True, slots=True)
class Placement:
    """A worker, and why."""

    worker: Worker
    why: str
    hit_tokens: int = 0  # expected in its prefix cache
    shared_tokens: int = 0  # whose pages a sibling holds there


def prefill_workers(need: Need, fleet: Fleet) -> list[Worker]:
    """Workers that could compute this prompt and, if more than one token is to come, have a decode worker for it."""
    return [worker for worker in fleet.of_role("prefill") if could_prefill(need, worker, fleet)]


def decode_workers(need: Need, fleet: Fleet) -> list[Worker]:
    """Workers that could fetch these pages and hold the request until its end."""
    return [worker for worker in fleet.of_role("decode") if could_decode(need, worker, fleet)]


def prefill_rounds(need: Need, fleet: Fleet, settings: RouterConfig) -> Iterator[list[Worker]]:
    """Workers that could compute this prompt: first a handful, then all that take anything now. See `_rounds`."""
    return _rounds("prefill", settings.prefill_policy, could_prefill, need, fleet, settings)


def decode_rounds(need: Need, fleet: Fleet, settings: RouterConfig) -> Iterator[list[Worker]]:
    """Workers that could fetch these pages: first a handful, then all that take anything now. See `_rounds`."""
    return _rounds("decode", settings.decode_policy, could_decode, need, fleet, settings)


Could = Callable[[Need, Worker, Fleet], bool]


def _rounds(
    role: Role, policy: str, could: Could, need: Need, fleet: Fleet, settings: RouterConfig
) -> Iterator[list[Worker]]:
    """Lists of workers to choose from, in turn until one of them takes the request; the last one is never empty,
    unless no worker of the fleet could ever take it.

    In a fleet of up to `candidates_max` workers there is one list, with all of them. In a larger one the first list has
    as many workers, drawn at random by the request, and those that have most of its prompt. So the cost of a request
    does not grow with the fleet, and routers that know the same loads do not all choose the one that is least loaded.
    Where none of the handful has room, every worker is asked that takes anything at all.
    """
    everyone, candidates_max = fleet.of_role(role), settings.candidates_max
    if len(everyone) <= candidates_max or (need.session and policy == "follow_bootstrap_room"):
        yield [worker for worker in everyone if could(need, worker, fleet)]
        return
    takers = fleet.open_to(role)
    seed = zlib.crc32(need.rid.encode()) ^ fleet.choices
    drawn = takers.draw(candidates_max, seed)
    if policy == "cache_aware":
        best = fleet.prefixes.hits(need.blocks).best(role, candidates_max // 2, seed)
        drawn += [fleet.workers[peer] for peer in best if fleet.workers[peer] not in drawn]
    yield [
        worker
        for worker in drawn
        if could(need, worker, fleet)
        and worker.peer not in need.avoided
        and need.determinism in ("", worker.hello.determinism)
    ]
    yield [worker for worker in takers.all if could(need, worker, fleet)] or list(
        islice((worker for worker in everyone if could(need, worker, fleet)), 1)
    )


def could_prefill(need: Need, worker: Worker, fleet: Fleet) -> bool:
    """Whether the worker could compute this prompt, busy or not."""
    return (
        worker.hello.model_name == need.model_name
        and need.model in ("", worker.hello.model)
        and worker.fits(need.tokens)
        and need.features <= worker.features
        and (need.tokens_max - need.tokens <= 1 or fleet.paired(worker))
    )


def could_decode(need: Need, worker: Worker, _fleet: Fleet) -> bool:
    """Whether the worker could fetch these pages and hold the request until its end, full or not."""
    hello = worker.hello
    return (
        hello.model == need.model
        and hello.kv_format == need.kv_format
        and worker.fits(need.tokens_max)
        and need.features <= worker.features
    )


def place_prefill(
    need: Need, workers: Sequence[Worker], prefixes: PrefixIndex, settings: RouterConfig, now: float
) -> Placement | None:
    """The prefill worker for a request, or None while all of them have enough to do."""
    free = [worker for worker in workers if _takes_prefill(worker, need, settings, now)]
    return _choose(need, free, prefixes, settings.prefill_policy, settings)


def place_decode(
    need: Need, workers: Sequence[Worker], prefixes: PrefixIndex, settings: RouterConfig, now: float
) -> Placement | None:
    """The decode worker for a request: room first, then the policy; None while none has room."""
    sizes = {worker.hello.limits.page_size: worker for worker in workers}
    pages = {size: worker.pages_for(need.tokens) for size, worker in sizes.items()}
    tenant, share_max = need.tenant, settings.tenant_share_max
    roomy = [
        worker
        for worker in workers
        if worker.has_room(pages[worker.hello.limits.page_size], tenant, share_max, now)
    ]
    return _choose(need, roomy, prefixes, settings.decode_policy, settings)


def place_beside_group(
    need: Need, worker: Worker, shared_tokens: int, settings: RouterConfig, now: float
) -> Placement | None:
    """The decode worker where a sibling holds the pages of `shared_tokens`, if it has room for the rest."""
    pages = worker.pages_for(need.tokens, shared_tokens)
    if not worker.has_room(pages, need.tenant, settings.tenant_share_max, now):
        return None
    return Placement(worker, "its sibling's worker", shared_tokens=shared_tokens)


def _takes_prefill(worker: Worker, need: Need, settings: RouterConfig, now: float) -> bool:
    return worker.takes_prefill(settings.tenant_share_max, need.tenant, now)


def _choose(
    need: Need, workers: Sequence[Worker], prefixes: PrefixIndex, policy: str, settings: RouterConfig
) -> Placement | None:
    if not workers:
        return None
    preferred = _preferred(need, workers)
    if policy == "cache_aware":
        return _cache_aware(need, preferred, prefixes, settings)
    return POLICIES[policy](need, preferred)


def _preferred(need: Need, workers: Sequence[Worker]) -> Sequence[Worker]:
    untried = [worker for worker in workers if worker.peer not in need.avoided] or workers
    equal = [worker for worker in untried if need.determinism in ("", worker.hello.determinism)]
    return equal or untried


def _least(workers: Sequence[Worker], cost: Callable[[Worker], float]) -> Worker:
    return min(workers, key=lambda worker: (cost(worker), worker.last_chosen, worker.arrival))


def _round_robin(_need: Need, workers: Sequence[Worker]) -> Placement:
    return Placement(_least(workers, lambda _: 0), "its turn")


def _total_requests(_need: Need, workers: Sequence[Worker]) -> Placement:
    best = _least(workers, lambda worker: worker.requests)
    return Placement(best, f"fewest requests: {best.requests}")


def _total_tokens(_need: Need, workers: Sequence[Worker]) -> Placement:
    best = _least(workers, lambda worker: worker.fullness)
    return Placement(best, f"fewest tokens for its size: {best.tokens}")


def _cache_aware(
    need: Need, workers: Sequence[Worker], prefixes: PrefixIndex, settings: RouterConfig
) -> Placement:
    """Fewest tokens to compute before the first token comes; a hot prefix must not starve its pod."""
    queued = [worker.tokens for worker in workers]
    gap = max(queued) - min(queued)
    if gap > settings.imbalance_tokens_max and max(queued) > settings.imbalance_ratio_max * min(queued):
        best = _least(workers, lambda worker: worker.tokens)
        return Placement(best, f"fleet out of balance by {gap} tokens; fewest queued: {best.tokens}")
    known = prefixes.hits(need.blocks)

    def hit_of(worker: Worker) -> int:
        hit = min(known.tokens(worker.peer), need.tokens - 1)
        return hit if hit >= settings.cache_hit_tokens_min else 0

    best = _least(workers, lambda worker: worker.tokens + need.tokens - hit_of(worker))
    hit = hit_of(best)
    return Placement(best, f"{hit} of {need.tokens} tokens expected in its cache, {best.tokens} queued", hit)


def _power_of_two(need: Need, workers: Sequence[Worker]) -> Placement:
    """Two by the request's own hash, then the less full one."""
    first = zlib.crc32(need.rid.encode()) % len(workers)
    step = 1 + zlib.crc32(need.rid.encode(), 1) % max(1, len(workers) - 1)
    pair = [workers[first], workers[(first + step) % len(workers)]]
    best = _least(pair, lambda worker: worker.fullness)
    return Placement(best, f"the less full of two: {best.tokens} tokens")


def _follow_bootstrap_room(need: Need, workers: Sequence[Worker]) -> Placement:
    """One session, one worker, by rendezvous hashing: only the sessions of a lost worker get another one."""
    if not need.session:
        return _total_tokens(need, workers)
    best = max(workers, key=lambda worker: (_weight(need.session, worker.hello.uid), worker.peer))
    return Placement(best, "its session's worker")


def _weight(session: str, uid: str) -> bytes:
    return hashlib.blake2b(f"{session}@{uid}".encode(), digest_size=8).digest()


Policy = Callable[[Need, Sequence[Worker]], Placement]
POLICIES: dict[str, Policy] = {  # cache_aware is not among them: it reads an index
    "round_robin": _round_robin,
    "total_requests": _total_requests,
    "total_tokens": _total_tokens,
    "power_of_two": _power_of_two,
    "follow_bootstrap_room": _follow_bootstrap_room,
}
