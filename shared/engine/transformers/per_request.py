"""Attention over pages in plain torch, request by request: for models that say only at each call what they want.

Slower than the others, in little memory: a request's keys are brought together once a layer, and its rows attend in
blocks. A row's last bits depend on the rows beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shared.engine.attention.paged import PagedBatch
from shared.engine.attention.protocol import soft_cap
from shared.engine.checkpoint.kv_cache import KVCache

BLOCK_ROWS = 256  # of queries whose scores are in memory at a time


@dataclass(frozen=True)
class Scores:
    """What becomes of the products of queries and keys."""

    scale: float
    window: int | None = None  # tokens that a row sees, itself among them; None: all
    cap: float | None = None  # see `soft_cap`


@dataclass(frozen=True)
class _Request:
    rows: slice
    first: int  # position of the first row
    tokens: int  # in the cache
    pages: Tensor  # [pages] int64


class PerRequestStep:
    """Attention of one step."""

    def __init__(self, cache: KVCache, batch: PagedBatch) -> None:
        self._cache = cache
        self._cells = batch.cells()
        rows, pages, lens = batch.qo_indptr.tolist(), batch.kv_indptr.tolist(), batch.kv_lens.tolist()
        self._requests = [
            _Request(
                slice(rows[number], rows[number + 1]),
                length - (rows[number + 1] - rows[number]),
                length,
                batch.kv_indices[pages[number] : pages[number + 1]].long(),
            )
            for number, length in enumerate(lens)
        ]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
        """Write k, v [rows, kv_heads, head_dim], then attend with q [rows, heads, head_dim]; shaped as q."""
        cells = self._cache.layer(layer)
        pages, slots = self._cells
        largest = torch.finfo(self._cache.store.dtype).max
        for cell, new in zip(cells, (k, v), strict=True):
            cell[pages, :, slots] = new.clamp(-largest, largest).to(cell.dtype)
        out = torch.empty_like(q)
        for request in self._requests:
            first = 0 if scores.window is None else max(0, request.first + 1 - scores.window)
            first -= first % self._cache.page_size
            keys, values = (self._tokens(cell, request, first) for cell in cells)
            for start in range(request.rows.start, request.rows.stop, BLOCK_ROWS):
                rows = slice(start, min(start + BLOCK_ROWS, request.rows.stop))
                position = request.first + start - request.rows.start
                out[rows] = _attend(q[rows], keys, values, position - first, scores)
        return out

    def _tokens(self, cell: Tensor, request: _Request, first: int) -> Tensor:
        """Keys or values of a request from a position on, float32 [kv_heads, tokens, head_dim]."""
        found = cell[request.pages[first // self._cache.page_size :]].transpose(0, 1)
        return found.reshape(found.shape[0], -1, found.shape[3])[:, : request.tokens - first].float()


def _attend(q: Tensor, keys: Tensor, values: Tensor, position: int, scores: Scores) -> Tensor:
    """q [rows, heads, head_dim], the first row at `position` among the keys → as q."""
    rows, heads, head_dim = q.shape
    kv_heads = len(keys)
    grouped = q.view(rows, kv_heads, -1, head_dim).transpose(0, 1).reshape(kv_heads, -1, head_dim)
    products = soft_cap(torch.bmm(grouped * scores.scale, keys.transpose(1, 2)), scores.cap)
    own = position + torch.arange(rows).view(-1, 1)
    token = torch.arange(keys.shape[1])
    hidden = token > own
    if scores.window is not None:
        hidden |= token <= own - scores.window
    by_row = products.view(kv_heads, rows, heads // kv_heads, -1)
    weights = by_row.masked_fill(hidden.unsqueeze(1), -torch.inf).softmax(-1)
    found = torch.bmm(weights.view(kv_heads, -1, keys.shape[1]), values)
    return found.view(kv_heads, rows, -1, head_dim).transpose(0, 1).reshape(q.shape)
