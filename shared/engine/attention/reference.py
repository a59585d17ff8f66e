"""Attention in plain torch, request by request: what `PagedBatch` means, and what kernels are compared with.

Slow, and rows may round otherwise in another batch. On any device, with any layout of the cache's pages.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shared.engine.attention.paged import PagedBatch
from shared.engine.kv_cache import KVCache
from shared.engine.model_config import ModelConfig


class ReferenceAttention:
    """`Attention` over a `KVCache`."""

    def __init__(self, config: ModelConfig, cache: KVCache) -> None:
        self.config = config
        self.cache = cache

    def plan(self, batch: PagedBatch) -> ReferenceStep:
        """See `Attention`."""
        return ReferenceStep(self.config, self.cache, batch)


class ReferenceStep:
    """`PlannedAttention` of one step."""

    def __init__(self, config: ModelConfig, cache: KVCache, batch: PagedBatch) -> None:
        self._config = config
        self._cache = cache
        self._cells = batch.cells()
        self._rows = list(zip(batch.qo_indptr[:-1].tolist(), batch.qo_indptr[1:].tolist(), strict=True))
        self._pages = torch.split(batch.kv_indices.long(), batch.kv_indptr.diff().tolist())
        self._kv_lens = batch.kv_lens.tolist()

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `PlannedAttention`."""
        keys, values = self._cache.layer(layer)  # [pages, kv_heads, page_size, head_dim] each
        pages, slots = self._cells
        keys[pages, :, slots] = k.to(keys.dtype)
        values[pages, :, slots] = v.to(values.dtype)
        out = torch.empty_like(q)
        for (start, end), own, kv_len in zip(self._rows, self._pages, self._kv_lens, strict=True):
            gathered = (cells[own].transpose(1, 2).flatten(0, 1)[:kv_len].float() for cells in (keys, values))
            out[start:end] = self._attend_request(layer, q[start:end].float(), *gathered).to(q.dtype)
        return out

    def _attend_request(self, layer: int, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """q [rows, heads, head_dim], keys and values [tokens, kv_heads, head_dim] → as q."""
        shared = self._config.heads // self._config.kv_heads  # query heads of a key-value head
        keys, values = (each.repeat_interleave(shared, dim=1) for each in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", q, keys) * self._config.head_dim**-0.5
        token = torch.arange(len(keys), device=q.device)
        row = token[len(keys) - len(q) :].unsqueeze(1)
        hidden = token > row
        if (window := self._config.windows[layer]) is not None:
            hidden |= token <= row - window
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values)
