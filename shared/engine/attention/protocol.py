"""What a model asks of attention: plan once a step, attend once a layer; and the cap of scores that all apply."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shared.engine.attention.heads import HeadTransform
from shared.engine.checkpoint.kv_cache import INVALID_PAGE
from shared.engine.streams import Mark
from shared.primitives.errors import InvariantError

# ---- what a step asks of attention: a ragged, packed batch over a paged cache, in FlashInfer's own arrays ------------
#     request            0        1    2              positions are absolute: a request's rows are its last ones
#     rows               0 1 2  | 3  | 4 5            qo_indptr   [0, 3, 4, 6]
#     pages              7 2    | 9  | 4              kv_indptr   [0, 2, 3, 4], kv_indices [7, 2, 9, 4]
#
# Keys and values of the rows are written to the cache first, and attention reads the cache alone. So a token's result
# cannot depend on whether the tokens before it were computed in this step, in an earlier one, or on another machine.
# The names are those of https://docs.flashinfer.ai/tutorials/kv_layout.html.


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


class PlannedAttention(Protocol):
    """Attention of one step."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, transform: HeadTransform) -> Tensor:
        """Transform q and k, write k and v [rows, kv_heads, head_dim], attend with q [rows, heads, head_dim]; as q.

        `transform.sinks` are among the keys.
        """


class Attention(Protocol):
    """Attention of one model over one cache, in the memory that also plans: the CPU's."""

    def plan(self, batch: PagedBatch) -> PlannedAttention:
        """Everything about a step that all layers share."""


class HeadWriter(Protocol):
    """`HeadTransform`, and the write of keys and values to the pages of a layer."""

    def write(
        self, q: Tensor, k: Tensor, v: Tensor, transform: HeadTransform, batch: PagedBatch, cells: Tensor
    ) -> Tensor:
        """Write k and v of a step to their pages; returns the queries to attend with.

        q [rows, heads, head_dim], k and v [rows, kv_heads, head_dim], and what is returned is as q; q and k may be
        overwritten. cells [pages, 2, kv_heads, page_size, head_dim], see `KVCache.paged_layer`.
        """


class DecodeAttention(PlannedAttention, Protocol):
    """Attention of DECODE steps of one batch size. `attend` is captured in a graph, `plan` is not."""

    def plan(self, kv_indptr: Tensor, kv_last_page_len: Tensor) -> bool:
        """Plan a step, on the host, before the graph is replayed: both int32 in pinned host memory, [rows + 1], [rows].

        They are copies of what the graph's own arrays will hold. False: the captured graph does not fit this plan, so
        the step must run eagerly.
        """


class ExtendAttention(PlannedAttention, Protocol):
    """Attention of EXTEND steps of as many rows and requests. `attend` is captured in a graph, `plan` is not.

    Requests without rows, and rows behind those of all requests, are padding.
    """

    def plan(self, host: PagedBatch) -> None:
        """Plan a step, on the host, before the graph is replayed: what its own arrays will hold, in pinned memory."""


class StreamAttention(Protocol):
    """Attention that the host plans and a stream computes later. Nothing here waits for the stream.

    What a plan leaves in host memory is read later, so it may be rewritten only after the stream has copied it:
    whoever implements this guards its own buffers.
    """

    def plan_extend(self, host: PagedBatch, device: PagedBatch) -> PlannedAttention:
        """Plan an EXTEND step: the same arrays in pinned host memory, and where the stream will find them."""

    def for_decode(self, device: PagedBatch) -> DecodeAttention:
        """Attention over static arrays: one row a request; `kv_indices` is as long as it can ever be."""

    def for_extend(self, device: PagedBatch, tokens: int) -> ExtendAttention | None:
        """Attention over static arrays as long as they can ever be, `tokens` in the cache at most a request.

        It is planned first for all rows. None: no graph gives the bits that are asked for.
        """


def soft_cap(x: Tensor, cap: float | None) -> Tensor:
    """cap * tanh(x / cap), or x itself where there is no cap; float32 of any shape."""
    return x if cap is None else (x / cap).tanh() * cap


class PlanGuard:
    """`with guard:` around each plan: waits until the stream has copied the plan before. Mostly it long has.

    It guards host memory that a plan fills and a stream copies later: a plan for step N + 1 that is made while the copy
    for step N still waits in its stream would change what step N reads.
    """

    def __init__(self, record: Callable[[], Mark]) -> None:
        self._record = record
        self._copied: Mark | None = None

    def __enter__(self) -> None:
        if self._copied is not None:
            self._copied.wait()

    def __exit__(self, *_: object) -> None:
        self._copied = self._record()
