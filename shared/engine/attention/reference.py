"""Attention in plain torch: what `PagedBatch` means, and what kernels are compared with.

Slow, and rows may round otherwise in another batch. On any device, with any layout of the cache's pages. Shapes depend
on nothing but the sizes of arrays, so it can be captured in a graph; and as FlashInfer does, it reads where pages begin
from a plan that the host wrote, so a stale plan gives wrong tokens here as well.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from shared.engine.attention.heads import HeadTransform, kept
from shared.engine.attention.protocol import PagedBatch, PlanGuard, soft_cap
from shared.engine.checkpoint.kv_cache import KVCache
from shared.engine.checkpoint.model_config import ModelConfig
from shared.engine.streams import Stream


class ReferenceAttention:
    """`Attention` and, given a stream, `StreamAttention` over a `KVCache`."""

    def __init__(
        self, config: ModelConfig, cache: KVCache, stream: Stream | None = None, rows: int = 0
    ) -> None:
        """`rows`: the most requests in a step that is planned for the stream."""
        self._config = config
        self._cache = cache
        if stream is not None:
            # As with FlashInfer, both kinds share a place on the device, and have memory of their own on the host.
            on_device = torch.zeros(rows + 1, dtype=torch.int32, device=cache.store.device)
            self._decode_plan, self._extend_plan = _Plan(stream, on_device), _Plan(stream, on_device)
            self._stream = stream
            self._graph_plan: _Plan | None = None

    def plan(self, batch: PagedBatch) -> ReferenceStep:
        """See `Attention`."""
        return ReferenceStep(self._config, self._cache, batch, *_largest(batch))

    def plan_extend(self, host: PagedBatch, device: PagedBatch) -> ReferenceStep:
        """See `StreamAttention`."""
        planned = self._extend_plan.of(len(host.kv_last_page_len))
        self._extend_plan.write(host.kv_indptr)
        return ReferenceStep(self._config, self._cache, replace(device, kv_indptr=planned), *_largest(host))

    def for_extend(self, device: PagedBatch, tokens: int) -> ReferenceExtend:
        """See `StreamAttention`."""
        if self._graph_plan is None:  # all graphs share it
            self._graph_plan = _Plan(self._stream, torch.zeros_like(device.kv_indptr))
        batch = replace(device, kv_indptr=self._graph_plan.of(len(device.kv_last_page_len)))
        rows = len(device.positions)
        return ReferenceExtend(self._config, self._cache, batch, rows, tokens, self._graph_plan)

    def for_decode(self, device: PagedBatch) -> ReferenceDecode:
        """See `StreamAttention`."""
        rows = len(device.kv_last_page_len)
        batch = replace(device, kv_indptr=self._decode_plan.of(rows))
        width = len(device.kv_indices) // rows
        return ReferenceDecode(
            self._config, self._cache, batch, 1, width * device.page_size, self._decode_plan
        )


def _largest(batch: PagedBatch) -> tuple[int, int]:
    """Rows of the request with most of them, tokens of the longest."""
    return int(batch.query_lens.max()), int(batch.kv_lens.max())


class _Plan:
    """What FlashInfer keeps in its integer workspace: here just where each request's pages begin."""

    def __init__(self, stream: Stream, on_device: Tensor) -> None:
        """`on_device`: int32 [rows + 1]."""
        self._stream = stream
        self._host = stream.buffer(len(on_device))
        self._device = on_device
        self._guard = PlanGuard(stream.record)

    def of(self, rows: int) -> Tensor:
        """The plan as steps of so many requests read it, int32 [rows + 1]."""
        return self._device[: rows + 1]

    def write(self, kv_indptr: Tensor) -> None:
        """Make the plan of the next step."""
        with self._guard:
            self._host[: len(kv_indptr)] = kv_indptr
            self._stream.upload(self._device[: len(kv_indptr)], self._host[: len(kv_indptr)])


class ReferenceStep:
    """`PlannedAttention` of one step: at most `rows` a request, at most `tokens` in the cache."""

    def __init__(
        self, config: ModelConfig, cache: KVCache, batch: PagedBatch, rows: int, tokens: int
    ) -> None:
        self._config = config
        self._cache = cache
        self._batch = batch
        self._rows = rows
        self._tokens = tokens

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, transform: HeadTransform) -> Tensor:
        """See `PlannedAttention`."""
        batch, cells = self._batch, self._cache.layer(layer)
        q, k = transform(q, k, batch.positions)
        pages, slots = batch.cells()
        for cell, new in zip(cells, (k, v), strict=True):
            cell[pages, :, slots] = kept(new, cell.dtype)
        request = batch.batch_indices.long()
        row = torch.arange(len(q), device=q.device) - batch.qo_indptr[request]
        requests, (heads, head_dim) = len(batch.kv_last_page_len), q.shape[1:]
        queries = torch.zeros(requests, self._rows, heads, head_dim, device=q.device)
        queries[request, row] = q.float()
        place = torch.full((requests, self._rows), -1, dtype=torch.int32, device=q.device)
        place[request, row] = batch.positions
        keys, values = self._gather(cells)
        return self._attend(layer, queries, keys, values, place, transform.sinks)[request, row].to(q.dtype)

    def _gather(self, cells: tuple[Tensor, Tensor]) -> list[Tensor]:
        """Gather each [pages, kv_heads, page_size, head_dim] to [requests, tokens, kv_heads, head_dim], then zeros."""
        batch, token = self._batch, torch.arange(self._tokens, device=self._cache.store.device)
        entry = batch.kv_indptr[:-1].unsqueeze(1) + token // batch.page_size
        page = batch.kv_indices[entry.clamp(max=len(batch.kv_indices) - 1)].long()
        held = token < batch.kv_lens.unsqueeze(1)
        page, slot = torch.where(held, page, 0), token % batch.page_size
        return [torch.where(held[:, :, None, None], cell[page, :, slot].float(), 0.0) for cell in cells]

    def _attend(
        self, layer: int, q: Tensor, keys: Tensor, values: Tensor, place: Tensor, sinks: Tensor | None
    ) -> Tensor:
        """q [requests, rows, heads, head_dim], place [requests, rows]: the position of each query → as q."""
        shared = self._config.heads // self._config.kv_heads  # query heads of a key-value head
        keys, values = (each.repeat_interleave(shared, dim=2) for each in (keys, values))
        scores = torch.einsum("nqhd,nkhd->nhqk", q, keys) * self._config.attention_scale
        scores = soft_cap(scores, self._config.attention_cap)
        token = torch.arange(self._tokens, device=q.device)
        hidden = token > place.unsqueeze(2)
        if (window := self._config.windows[layer]) is not None:
            hidden |= token <= place.unsqueeze(2) - window
        scores = scores.masked_fill(hidden.unsqueeze(1), -torch.inf)
        if sinks is not None:
            column = sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
            scores = torch.cat((scores, column), dim=-1)
        weights = scores.softmax(-1)[..., : self._tokens]
        return torch.einsum("nhqk,nkhd->nqhd", weights, values)


class _StaticStep(ReferenceStep):
    """Attention over static arrays, by a plan."""

    def __init__(
        self, config: ModelConfig, cache: KVCache, batch: PagedBatch, rows: int, tokens: int, plan: _Plan
    ) -> None:
        super().__init__(config, cache, batch, rows, tokens)
        self._plan = plan


class ReferenceExtend(_StaticStep):
    """See `ExtendAttention`."""

    def plan(self, host: PagedBatch) -> None:
        """See `ExtendAttention`."""
        self._plan.write(host.kv_indptr)


class ReferenceDecode(_StaticStep):
    """See `DecodeAttention`."""

    def plan(self, kv_indptr: Tensor, kv_last_page_len: Tensor) -> bool:
        """See `DecodeAttention`."""
        assert len(kv_last_page_len) == len(kv_indptr) - 1
        self._plan.write(kv_indptr)
        return True
