"""How much fits into one EXTEND step: the admission of waiting requests, whole or in chunks.

It plans rows and takes pages; it launches nothing, removes nothing from a queue and knows no role: a prefill worker,
whose requests grow elsewhere, is one with `new_token_ratio=0`. The rules are SGLang's (schedule_policy.py).
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from shared.baton import pages_of
from shared.errors import InvariantError
from shared.kv.page_pool import PagePool, PageState
from shared.kv.radix_cache import Match, RadixCache
from shared.req import Req


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
