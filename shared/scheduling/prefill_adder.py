"""How much fits into one EXTEND step: the admission of waiting requests, whole or in chunks.

It plans rows and allocates their pages. It launches nothing, removes nothing from a queue and reserves nothing for
output: a prefill worker samples one token of a request. The rules are SGLang's (schedule_policy.py), but for this one:
a prompt that is cut does not take the whole step. It leaves input to short ones, and takes back what they do not use.

    step of 8 pages │ chunk … chunk │ short │ short │ chunk │      `short_tokens` 3 pages, two of them used
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from shared.batch.req import Req
from shared.kv.kv_memory import KvMemory
from shared.primitives.errors import InvariantError


class AddResult(enum.Enum):
    """Whether the request was added; if not, no later one should be tried in this pass."""

    CONTINUE = "continue"  # added
    NO_TOKENS = "no tokens"  # not added: no pages for its KV
    OTHER = "other"  # not added: the input tokens of this pass are spent


@dataclass(frozen=True, slots=True)
class Extend:
    """One row of an EXTEND step: tokens `start` … `end` - 1. `end` is page-aligned unless `last`."""

    req: Req
    start: int
    end: int
    last: bool  # reaches the end of the request's tokens: the row samples


def step_input(max_prefill_tokens: int, chunked_prefill_size: int, page_size: int) -> int:
    """Input tokens of a step: the lesser of both settings, but at least a page."""
    return max(min(max_prefill_tokens, chunked_prefill_size), page_size)


class PrefillAdder:
    """Fills one EXTEND step: the chunked request first (`add_chunked`), then waiting ones (`add`), into `extends`.

    Two budgets, in tokens: what the memory can hold beside the rest of a request that was cut in this step; and the
    input of a step (`step_input`). A request that exceeds the input left is cut at a page boundary and becomes the
    chunked one. It leaves `short_tokens` of the input, in whole pages, to those added after it, but keeps a page.
    They are added whole: one request is cut in a step. `fill` ends the step.
    """

    def __init__(self, memory: KvMemory, input_tokens: int, short_tokens: float = 0):
        self.extends: list[Extend] = []
        self.cut: Extend | None = None  # the one of `extends` that does not reach the end of its request
        self._memory = memory
        self._input_left = input_tokens
        self._short_pages = int(short_tokens) // memory.page_size
        self._cut_end = 0  # where `cut` would end if it were alone
        self._reserved_tokens = 0  # the rest of what was cut in this step

    def add_chunked(self, req: Req) -> AddResult:
        """Add the next chunk of a request that was added in an earlier pass, from `req.launched_len` on."""
        if req.node is None or req.launched_len >= len(req.token_ids):
            raise InvariantError(f"request {req.rid} has no chunk to continue")
        return self._add_row(req, req.launched_len)

    def add(self, req: Req) -> AddResult:
        """Admit a waiting request, whole or with its first chunk.

        If added, its cached prefix is locked (`req.node`, `req.cached_len`) and `req.pages` hold its KV up to the
        row's end; if not, it holds nothing, and `req.cached_len` is what was found.
        """
        if req.node is not None or req.pages:
            raise InvariantError(f"request {req.rid} is admitted already")
        if self._input_left <= 0:
            return AddResult.OTHER
        # Locked first, so that its own prefix does not count as available for the rest of it.
        self._memory.match(req, req.reusable_len)
        result = self._add_matched(req)
        if result is not AddResult.CONTINUE:
            self._memory.unmatch(req)
        return result

    def fill(self) -> int:
        """Give the row that was cut what others have left of the input; returns the tokens that they cost it."""
        if self.cut is None:
            return 0
        req, start, end = self.cut.req, self.cut.start, self.cut.end
        longer = min(self._cut_end, self._whole_pages(end + self._input_left))
        if self._memory.allocate(req, self._memory.pages_missing(req, longer)) is not None:
            row = Extend(req, start, longer, last=False)
            self.extends[self.extends.index(self.cut)] = self.cut = row
            self._input_left -= longer - end
        return self._cut_end - longer

    def _add_matched(self, req: Req) -> AddResult:
        page_size = self._memory.page_size
        needed = self._memory.pages_for(len(req.token_ids)) * page_size - req.cached_len
        if needed > self._memory.available_pages * page_size - self._reserved_tokens:
            return AddResult.NO_TOKENS
        return self._add_row(req, req.cached_len)

    def _add_row(self, req: Req, start: int) -> AddResult:
        """Add the row from `start` on; without effect unless the result is CONTINUE."""
        end = self._end_of_row(start, len(req.token_ids))
        if end is None:
            return AddResult.OTHER
        if self._memory.allocate(req, self._memory.pages_missing(req, end)) is None:
            return AddResult.NO_TOKENS
        row = Extend(req, start, end, last=end == len(req.token_ids))
        self.extends.append(row)
        if not row.last:
            self.cut, self._cut_end = row, self._whole_pages(start + self._input_left)
        self._input_left -= end - start
        self._reserved_tokens += len(req.token_ids) - end
        return AddResult.CONTINUE

    def _end_of_row(self, start: int, full: int) -> int | None:
        """Where a row from `start` ends, given the input left; None if it cannot begin in this step."""
        if full - start <= self._input_left:
            return full
        end = self._whole_pages(start + self._input_left)
        if self.cut is not None or end <= start:
            return None
        page_size = self._memory.page_size
        return max(start + page_size, end - self._short_pages * page_size)

    def _whole_pages(self, tokens: int) -> int:
        return tokens // self._memory.page_size * self._memory.page_size
