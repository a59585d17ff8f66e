"""The order in which waiting requests are tried, and which of them wait a round for a shared prefix.

Pure functions over requests and the radix cache. They launch nothing and remove nothing from a queue. The rules and
their constants are SGLang's (schedule_policy.py), except where a function says otherwise.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from math import inf
from typing import Literal

from shared.batch.req import Req
from shared.kv.radix_cache import Node, RadixCache, ancestry

# What the setting may say; a new one is here, in QUEUE_POLICIES, and told in `order_waiting`.
QueuePolicy = Literal["fcfs", "lpm", "dfs-weight", "lof", "random", "routing-key", "priority"]


def order_waiting(
    policy: QueuePolicy,
    waiting: Sequence[Req],
    cache: RadixCache,
    running: Sequence[Req] = (),
    *,
    prefix_aware_queue_max: int,
) -> list[Req]:
    """`waiting` in the order in which to try them; ties go by arrival.

    fcfs: by arrival. lpm: longest cached prefix first. dfs-weight: by subtree of the radix cache, the one with most
    waiting first. lof: most output to come first. random: shuffled anew with every arrival, the same on every run.
    routing-key: those first whose `extra_key` most of `running` share. priority: highest first. With more
    than `prefix_aware_queue_max` waiting, lpm and dfs-weight are fcfs. Most of them would starve a request; see
    `aged_first`. Raises `ValueError` for any other name.
    """
    if policy not in QUEUE_POLICIES:
        raise ValueError(f"queue policy must be one of {sorted(QUEUE_POLICIES)}, got {policy!r}")
    arrived = sorted(waiting, key=lambda req: req.sequence)
    if len(arrived) > prefix_aware_queue_max and policy in ("lpm", "dfs-weight"):
        return arrived
    return QUEUE_POLICIES[policy](arrived, cache, running)


def aged_first(ordered: Sequence[Req], came_by: float) -> list[Req]:
    """`ordered`, but those that came until `came_by` go first, by arrival: so no policy starves a request.

    Ageing by steps of priority, as operating systems do it, would not help one that others pass for another reason.
    """
    return sorted(ordered, key=lambda req: req.sequence if req.arrived_at <= came_by else inf)


def _fcfs(arrived: list[Req], cache: RadixCache, running: Sequence[Req]) -> list[Req]:
    del cache, running
    return arrived


def _lpm(arrived: list[Req], cache: RadixCache, running: Sequence[Req]) -> list[Req]:
    del running
    return sorted(arrived, key=lambda req: -_cached_tokens(req, cache)[1])


def _dfs_weight(arrived: list[Req], cache: RadixCache, running: Sequence[Req]) -> list[Req]:
    del running
    if not arrived:
        return arrived
    ends_at: dict[Node, list[Req]] = {}
    children: dict[Node, dict[Node, None]] = {}
    weights: Counter[Node] = Counter()
    root = None
    for req in arrived:
        node, _ = _cached_tokens(req, cache)
        ends_at.setdefault(node, []).append(req)
        for root in ancestry(node):  # the last one is the root, of every request
            weights[root] += 1
            if root.parent is not None:
                children.setdefault(root.parent, {})[root] = None
    assert root is not None
    backwards: list[Req] = []
    pending = [root]
    # Visits each node before its children, the lightest child first. Backwards: deepest and heaviest first.
    while pending:
        node = pending.pop()
        backwards.extend(reversed(ends_at.get(node, [])))
        pending.extend(sorted(children.get(node, {}), key=lambda child: -weights[child]))
    return backwards[::-1]


def _lof(arrived: list[Req], cache: RadixCache, running: Sequence[Req]) -> list[Req]:
    del cache, running
    return sorted(arrived, key=lambda req: -req.remaining_new_tokens)


def _random(arrived: list[Req], cache: RadixCache, running: Sequence[Req]) -> list[Req]:
    del cache, running
    newest = arrived[-1].sequence if arrived else 0  # in the hash, so that the same rid is not always last

    def draw(req: Req) -> bytes:
        return hashlib.blake2b(f"{newest} {req.rid}".encode(), digest_size=8).digest()

    return sorted(arrived, key=draw)


def _routing_key(arrived: list[Req], cache: RadixCache, running: Sequence[Req]) -> list[Req]:
    del cache
    sharing = Counter(req.extra_key for req in running)
    return sorted(arrived, key=lambda req: -sharing[req.extra_key])


def _priority(arrived: list[Req], cache: RadixCache, running: Sequence[Req]) -> list[Req]:
    del cache, running
    return sorted(arrived, key=lambda req: -req.priority)


QUEUE_POLICIES: dict[QueuePolicy, Callable[[list[Req], RadixCache, Sequence[Req]], list[Req]]] = {
    "fcfs": _fcfs,
    "lpm": _lpm,
    "dfs-weight": _dfs_weight,
    "lof": _lof,
    "random": _random,
    "routing-key": _routing_key,
    "priority": _priority,
}


def _cached_tokens(req: Req, cache: RadixCache) -> tuple[Node, int]:
    return cache.probe(req.token_ids[:-1], req.extra_key)


class InBatchPrefix:
    """Lets one of several waiting requests with a common prefix compute it, so that the others find it cached.

    A request with at most `cached_tokens_max` tokens cached that shares `shared_tokens_min` or more (and at least
    a page) with one before it is put off, for one round only: whether the first was admitted or not. Only the first
    `queue_max` requests are compared.
    """

    def __init__(self, cache: RadixCache, *, cached_tokens_max: int, shared_tokens_min: int, queue_max: int):
        self._cache = cache
        self._cached_tokens_max = cached_tokens_max
        self._shared_tokens = max(shared_tokens_min, cache.page_size)
        self._queue_max = queue_max
        self.put_off: dict[int, None] = {}  # sequence numbers

    def go_now(self, ordered: Sequence[Req]) -> list[Req]:
        """Requests of `ordered`, which are all that wait, to try in this round, in the same order."""
        firsts: dict[tuple[str, tuple[int, ...]], Req] = {}
        now: list[Req] = []
        put_off: dict[int, None] = {}
        for place, req in enumerate(ordered):
            first = req
            if place < self._queue_max and len(req.token_ids) >= self._shared_tokens:
                prefix = req.extra_key, tuple(req.token_ids[: self._shared_tokens])
                first = firsts.setdefault(prefix, req)
            if req.sequence in self.put_off:
                put_off[req.sequence] = None
            elif first is not req and _cached_tokens(req, self._cache)[1] <= self._cached_tokens_max:
                put_off[req.sequence] = None
                continue
            now.append(req)
        self.put_off = put_off
        return now
