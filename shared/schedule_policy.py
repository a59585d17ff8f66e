"""Who goes next, and how much fits: queue order, admission of EXTEND, and the guess at how much output will come.

Pure functions and small objects over requests, the radix cache and the page pool. They plan and take pages; they
launch nothing, remove nothing from a queue and know no role: a prefill worker, whose requests grow elsewhere, is
one with `new_token_ratio=0`.

The rules and their constants are SGLang's (schedule_policy.py), but for what each function says otherwise.
"""

from __future__ import annotations

import enum
import hashlib
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shared.baton import pages_of
from shared.errors import InvariantError
from shared.page_pool import PagePool, PageState
from shared.radix_cache import Match, Node, RadixCache, ancestry
from shared.req import Req

PREFIX_AWARE_WAITING_MAX = 128  # with more waiting, looking each one up costs more than it brings
RETRACTION_HEADROOM_STEPS = 20  # decode steps that must fit after a retraction


# ---- order -----------------------------------------------------------------------------------------------------


def order_waiting(
    policy: str,
    waiting: Sequence[Req],
    cache: RadixCache,
    running: Sequence[Req] = (),
    *,
    prefix_aware_max: int = PREFIX_AWARE_WAITING_MAX,
) -> list[Req]:
    """`waiting` in the order in which to try them; ties go by arrival.

    fcfs: by arrival. lpm: longest cached prefix first. dfs-weight: by subtree of the radix cache, the one with most
    waiting first. lof: most output to come first. random: shuffled anew with every arrival, the same on every run.
    routing-key: those first whose `extra_key` most of `running` share. priority: highest first. With more
    than `prefix_aware_max` waiting, lpm and dfs-weight are fcfs. Only fcfs and random starve nobody. Raises
    `ValueError` for any other name.
    """
    if policy not in QUEUE_POLICIES:
        raise ValueError(f"queue policy must be one of {sorted(QUEUE_POLICIES)}, got {policy!r}")
    arrived = sorted(waiting, key=lambda req: req.arrival)
    if len(arrived) > prefix_aware_max and policy in ("lpm", "dfs-weight"):
        return arrived
    return QUEUE_POLICIES[policy](arrived, cache, running)


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
    while (
        pending
    ):  # each node before its children, the lightest first: read backwards, deepest and heaviest first
        node = pending.pop()
        backwards.extend(reversed(ends_at.get(node, [])))
        pending.extend(sorted(children.get(node, {}), key=lambda child: -weights[child]))
    return backwards[::-1]


def _lof(arrived: list[Req], cache: RadixCache, running: Sequence[Req]) -> list[Req]:
    del cache, running
    return sorted(arrived, key=lambda req: -req.remaining_new_tokens)


def _random(arrived: list[Req], cache: RadixCache, running: Sequence[Req]) -> list[Req]:
    del cache, running
    newest = arrived[-1].arrival if arrived else 0  # in the hash, so that no rid is unlucky for ever

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


QUEUE_POLICIES: dict[str, Callable[[list[Req], RadixCache, Sequence[Req]], list[Req]]] = {
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
    a page) with one before it is put off, for one round only: whether the first was admitted or not.
    """

    def __init__(self, cache: RadixCache, *, cached_tokens_max: int = 32, shared_tokens_min: int = 32):
        self._cache = cache
        self._cached_tokens_max = cached_tokens_max
        self._shared_tokens = max(shared_tokens_min, cache.page_size)
        self._put_off: dict[int, None] = {}  # arrival numbers

    def go_now(self, ordered: Sequence[Req]) -> list[Req]:
        """Those of `ordered`, all the requests waiting, to try in this round, in the same order."""
        firsts: dict[tuple[str, tuple[int, ...]], Req] = {}
        now: list[Req] = []
        put_off: dict[int, None] = {}
        for place, req in enumerate(ordered):
            prefix = req.extra_key, tuple(req.token_ids[: self._shared_tokens])
            whole = len(prefix[1]) == self._shared_tokens and place < PREFIX_AWARE_WAITING_MAX
            first = firsts.setdefault(prefix, req) if whole else req
            if req.arrival in self._put_off:
                put_off[req.arrival] = None
            elif first is not req and _cached_tokens(req, self._cache)[1] <= self._cached_tokens_max:
                put_off[req.arrival] = None
                continue
            now.append(req)
        self._put_off = put_off
        return now


# ---- admission -------------------------------------------------------------------------------------------------


class AddResult(enum.Enum):
    """Whether the request was added; if not, no later one should be tried in this pass."""

    CONTINUE = "continue"  # added
    NO_TOKENS = "no tokens"  # not added: no room for its KV
    OTHER = "other"  # not added: the input or chunk tokens of this pass are spent


@dataclass(frozen=True, slots=True)
class Extend:
    """One row of an EXTEND step: tokens `start` … `end` - 1. `end` is page-aligned unless `last`."""

    req: Req
    start: int
    end: int
    last: bool  # reaches the end of the request's tokens: the row samples


class PrefillAdder:
    """Fills one EXTEND step: the chunked request first (`add_chunked`), then waiting ones (`add`), into `extends`.

    Budgets, in tokens: what the pool can hold beside `reserved_tokens`, which running requests will still need;
    `max_prefill_tokens` of input a step; and of these `chunked_prefill_size`, beyond which a request is cut at a
    page boundary and becomes the chunked one (None: never cut; then the first of a step may exceed the
    budget). Both are at least a page. Of the output still to come, up to `max_output_reserve` tokens, the share
    `new_token_ratio` is reserved: 0 where requests leave after their first token.
    """

    def __init__(
        self,
        cache: RadixCache,
        pool: PagePool,
        *,
        page_size: int,
        max_prefill_tokens: int,
        chunked_prefill_size: int | None,
        max_output_reserve: int = 4096,
        new_token_ratio: float = 0.0,
        reserved_tokens: int = 0,
    ):
        self.extends: list[Extend] = []
        self._cache = cache
        self._pool = pool
        self._page_size = page_size
        self._cuts = chunked_prefill_size is not None
        budget = min(max_prefill_tokens, chunked_prefill_size or max_prefill_tokens)
        self._input_left = max(budget, page_size)
        self._max_output_reserve = max_output_reserve
        self._new_token_ratio = new_token_ratio
        self._reserved_tokens = reserved_tokens

    def add_chunked(self, req: Req) -> AddResult:
        """Take the next chunk of a request that was added in an earlier pass, from `req.launched_len` on."""
        if req.node is None or req.launched_len >= len(req.token_ids):
            raise InvariantError(f"request {req.rid} has no chunk to continue")
        end = self._end_of_row(req.launched_len, len(req.token_ids))
        if end is None:
            return AddResult.OTHER
        if not self._cache.make_room(req.pages_missing(end, self._page_size)):
            return AddResult.NO_TOKENS
        self._take(req, req.launched_len, end)
        return AddResult.CONTINUE

    def add(self, req: Req) -> AddResult:
        """Admit a waiting request, whole or with its first chunk.

        If added, its cached prefix is locked (`req.node`, `req.cached_len`) and `req.pages` hold its KV up to the
        row's end; if not, `req` is untouched.
        """
        if req.node is not None or req.pages:
            raise InvariantError(f"request {req.rid} is admitted already")
        if self._input_left <= 0:
            return AddResult.OTHER
        match = self._cache.match_prefix(req.token_ids[:-1], req.extra_key)
        self._cache.lock(match.node)  # so that what it needs is not counted as room
        result = self._add_matched(req, match)
        if result is not AddResult.CONTINUE:
            self._cache.unlock(match.node, last_step=0)
        return result

    def _add_matched(self, req: Req, match: Match) -> AddResult:
        start = len(match.pages) * self._page_size
        if self._tokens_needed(req, len(match.pages)) > self._tokens_left():
            return AddResult.NO_TOKENS
        end = self._end_of_row(start, len(req.token_ids))
        if end is None:
            return AddResult.OTHER
        if not self._cache.make_room(pages_of(end, self._page_size) - len(match.pages)):
            return AddResult.NO_TOKENS
        req.node, req.pages, req.cached_len = match.node, list(match.pages), start
        self._take(req, start, end)
        return AddResult.CONTINUE

    def _tokens_left(self) -> int:
        return (self._pool.free + self._cache.evictable) * self._page_size - self._reserved_tokens

    def _tokens_needed(self, req: Req, cached_pages: int) -> int:
        """Uncached tokens, output reserve and a page; never more than the request can fill, or one that fills
        the pool would wait for ever."""
        output = self._output_reserve(req)
        most = max(req.final_kv_len, len(req.token_ids)) if output else len(req.token_ids)
        wanted = len(req.token_ids) + output + self._page_size
        return min(wanted, pages_of(most, self._page_size) * self._page_size) - cached_pages * self._page_size

    def _output_reserve(self, req: Req) -> int:
        return math.ceil(min(req.remaining_new_tokens, self._max_output_reserve) * self._new_token_ratio)

    def _end_of_row(self, start: int, full: int) -> int | None:
        """Where a row from `start` ends, given the input left; None: there is no room for it in this step."""
        if full - start <= self._input_left or not (self._cuts or self.extends):
            return full
        if not self._cuts:
            return None
        # Rows start at page boundaries, so a cut leaves less than a page of input: there is no second one.
        end = (start + self._input_left) // self._page_size * self._page_size
        return end if end > start else None

    def _take(self, req: Req, start: int, end: int) -> None:
        pages = self._pool.allocate(req.pages_missing(end, self._page_size), PageState.OWNED)
        req.pages.extend(pages)
        req.owned.extend(pages)
        self.extends.append(Extend(req, start, end, last=end == len(req.token_ids)))
        self._input_left -= end - start
        self._reserved_tokens += len(req.token_ids) - end + self._output_reserve(req)


# ---- how much output will come ---------------------------------------------------------------------------------


class NewTokenRatio:
    """The share of the output still allowed that requests are expected to use: a congestion window for KV memory.

    Falls linearly while all goes well, to `min_factor` of its start over `decay_steps` decode steps, and jumps up
    when a retraction proves it too low.
    """

    def __init__(
        self,
        init: float = 0.7,
        conservativeness: float = 1.0,
        min_factor: float = 0.14,
        decay_steps: int = 600,
    ):
        self._init = min(1.0, init * conservativeness)
        self._least = self._init * min_factor
        self._decay = (self._init - self._least) / decay_steps
        self.value = self._init

    def decay(self) -> None:
        """A decode step went well."""
        self.value = max(self._least, self.value - self._decay)

    def after_retraction(self, output_lens: Sequence[int], max_new_tokens: Sequence[int]) -> None:
        """Set to what the requests that stayed have used, and will after the steps that now fit."""
        used = sum(output_lens) + RETRACTION_HEADROOM_STEPS * len(output_lens)
        self.value = min(1.0, used / (sum(max_new_tokens) + 1))

    def reset(self) -> None:
        """Nobody is left: start over."""
        self.value = self._init
