"""What a model asks of attention: plan once a step, attend once a layer.

Keys and values are written to the cache first, and attention reads the cache alone. So a token's result cannot
depend on whether the tokens before it were computed in this step, in an earlier one, or on another machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from shared.engine.kv_cache import INVALID_PAGE
from shared.errors import InvariantError


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """A ragged, packed batch: request r has `query_lens[r]` consecutive rows, its last at `kv_lens[r] - 1`."""

    query_lens: Tensor  # [requests] int64, tokens computed in this step, each > 0
    kv_lens: Tensor  # [requests] int64, tokens in the cache once this step's are written
    positions: Tensor  # [tokens] int64, absolute
    requests: Tensor  # [tokens] int64, which request each row belongs to
    page_tables: Tensor  # [requests, pages] int32, padded with INVALID_PAGE

    def cells(self, page_size: int) -> tuple[Tensor, Tensor]:
        """Where each row's key and value belong: page and slot, each [tokens].

        Raises `InvariantError` if a request has fewer pages than tokens.
        """
        needed = (self.kv_lens - 1) // page_size  # [requests] index of the last page
        if int(needed.max()) >= self.page_tables.shape[1]:
            raise InvariantError(f"a request of {int(self.kv_lens.max())} tokens exceeds its page table")
        if bool((self.page_tables.gather(1, needed.unsqueeze(1)) == INVALID_PAGE).any()):
            raise InvariantError("a request has fewer pages than tokens")
        return self.page_tables[self.requests, self.positions // page_size].long(), self.positions % page_size


class PlannedAttention(Protocol):
    """Attention of one step."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write k, v [tokens, kv_heads, head_dim], then attend with q [tokens, heads, head_dim]; shaped as q."""


class Attention(Protocol):
    """Attention of one model over one cache."""

    def plan(self, batch: BatchLayout) -> PlannedAttention:
        """Everything about a step that all layers share; `InvariantError` if a page table is too short."""
