"""What a step asks of attention: a ragged, packed batch over a paged cache, in FlashInfer's own arrays.

    request            0        1    2              positions are absolute: a request's rows are its last ones
    rows               0 1 2  | 3  | 4 5            qo_indptr   [0, 3, 4, 6]
    pages              7 2    | 9  | 4              kv_indptr   [0, 2, 3, 4], kv_indices [7, 2, 9, 4]

Keys and values of the rows are written to the cache first, and attention reads the cache alone. So a token's result
cannot depend on whether the tokens before it were computed in this step, in an earlier one, or on another machine.
The names are those of https://docs.flashinfer.ai/tutorials/kv_layout.html.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shared.engine.checkpoint.kv_cache import INVALID_PAGE
from shared.primitives.errors import InvariantError


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Requests with at least one row each; all arrays are int32."""

    page_size: int
    qo_indptr: Tensor  # [requests + 1] where each request's rows begin, and the number of rows
    kv_indptr: Tensor  # [requests + 1] where each request's pages begin in kv_indices, and their number
    kv_indices: Tensor  # [entries] pages, those that hold a token once this step's are written
    kv_last_page_len: Tensor  # [requests] tokens in the last page, 1 … page_size
    batch_indices: Tensor  # [rows] which request each row belongs to
    positions: Tensor  # [rows] absolute

    @classmethod
    def of(cls, query_lens: Tensor, kv_lens: Tensor, page_tables: Tensor, page_size: int) -> PagedBatch:
        """The last `query_lens` [requests] tokens of requests with `kv_lens` [requests] tokens, both int64.

        `page_tables` [requests, pages] int32 are padded with INVALID_PAGE. Raises `InvariantError` if a request has
        fewer pages than tokens.
        """
        counts = (kv_lens - 1) // page_size + 1
        if int(counts.max()) > page_tables.shape[1]:
            raise InvariantError(f"a request of {int(kv_lens.max())} tokens exceeds its page table")
        kv_indices = page_tables[torch.arange(page_tables.shape[1]) < counts.unsqueeze(1)]
        if bool((kv_indices == INVALID_PAGE).any()):
            raise InvariantError("a request has fewer pages than tokens")
        qo_indptr = _starts(query_lens)
        requests = torch.repeat_interleave(torch.arange(len(query_lens)), query_lens)
        positions = torch.arange(len(requests)) - (qo_indptr[1:] - kv_lens)[requests]
        return cls(
            page_size=page_size,
            qo_indptr=qo_indptr.int(),
            kv_indptr=_starts(counts).int(),
            kv_indices=kv_indices,
            kv_last_page_len=((kv_lens - 1) % page_size + 1).int(),
            batch_indices=requests.int(),
            positions=positions.int(),
        )

    @property
    def query_lens(self) -> Tensor:
        """Rows of each request, [requests] int64."""
        return self.qo_indptr.long().diff()

    @property
    def kv_lens(self) -> Tensor:
        """Tokens of each request in the cache once this step's are written, [requests] int64."""
        return (self.kv_indptr.long().diff() - 1) * self.page_size + self.kv_last_page_len

    def cells(self) -> tuple[Tensor, Tensor]:
        """Where each row's key and value belong: page and slot, each [rows] int64."""
        entries = self.kv_indptr[self.batch_indices] + self.positions // self.page_size
        return self.kv_indices[entries].long(), (self.positions % self.page_size).long()


def _starts(lens: Tensor) -> Tensor:
    return torch.cat([lens.new_zeros(1), lens.cumsum(0)])
