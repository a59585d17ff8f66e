"""Attention in plain torch: what `PagedBatch` means, and what kernels are compared with.

Slow, and rows may round otherwise in another batch. On any device, with any layout of the cache's pages. Shapes depend
on nothing but the sizes of arrays, so it can be captured in a graph; and as FlashInfer does, it reads where pages begin
from a plan that the host wrote, so a stale plan gives wrong tokens here as well.

What is computed once keys are written is one operation of torch: a graph on the CPU keeps each operation's result for
good, and gathered keys are a thousand times as large as what attention returns. There it also computes with the
requests and keys that are there, where a graph of a GPU computes with as many as there may be.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

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
        config = self._config
        window, cap = config.windows[layer], config.attention_cap
        sizes = [batch.page_size, self._rows, self._tokens, _NO_WINDOW if window is None else window]
        scores = [config.attention_scale, *([] if cap is None else [cap])]
        attended: Tensor = torch.ops.segue.attend_to_pages(
            q, list(cells), [getattr(batch, name) for name in _ARRAYS], transform.sinks, sizes, scores
        )
        return attended


_NO_WINDOW = -1
_ARRAYS = [field.name for field in fields(PagedBatch) if field.name != "page_size"]
_LIBRARY: Any = Library("segue", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "attend_to_pages(Tensor q, Tensor[] cells, Tensor[] batch, Tensor? sinks, int[] sizes, float[] scores) -> Tensor"
)


def _attend_to_pages(
    q: Tensor,
    cells: list[Tensor],
    arrays: list[Tensor],
    sinks: Tensor | None,
    sizes: list[int],
    scores: list[float],
) -> Tensor:
    """Attend with q [rows, heads, head_dim] to `cells`, keys and values [pages, kv_heads, page_size, head_dim]; as q.

    `arrays`: those of `PagedBatch`; `sizes`: of a page, of the most rows and keys of a request, and of the window;
    `scores`: what they are multiplied by, and perhaps capped at.
    """
    page_size, rows, tokens, window = sizes
    batch = PagedBatch(page_size, **dict(zip(_ARRAYS, arrays, strict=True)))
    request = batch.batch_indices.long()
    row = torch.arange(len(q), device=q.device) - batch.qo_indptr[request]
    first_entries, kv_lens = batch.kv_indptr[:-1], batch.kv_lens
    if q.device.type == "cpu":
        used, request = torch.unique(request, return_inverse=True)
        first_entries, kv_lens = first_entries[used], kv_lens[used]
        rows, tokens = min(rows, int(row.max()) + 1), min(tokens, int(kv_lens.max()))
    requests, (heads, head_dim) = len(kv_lens), q.shape[1:]
    queries = torch.zeros(requests, rows, heads, head_dim, device=q.device)
    queries[request, row] = q.float()
    place = torch.full((requests, rows), -1, dtype=torch.int32, device=q.device)
    place[request, row] = batch.positions
    shared = heads // cells[0].shape[1]  # query heads of a key-value head
    gathered = _gathered(cells, batch, first_entries, kv_lens, tokens)
    keys, values = (each.repeat_interleave(shared, dim=2) for each in gathered)
    scale, cap = scores[0], scores[1] if len(scores) > 1 else None
    weights = _weights(torch.einsum("nqhd,nkhd->nhqk", queries, keys), place, sinks, window, (scale, cap))
    return torch.einsum("nhqk,nkhd->nqhd", weights, values)[request, row].to(q.dtype)


_LIBRARY.impl("attend_to_pages", _attend_to_pages, "CompositeExplicitAutograd")


def _gathered(
    cells: list[Tensor], batch: PagedBatch, first_entries: Tensor, kv_lens: Tensor, tokens: int
) -> list[Tensor]:
    """Gather each [pages, kv_heads, page_size, head_dim] to [requests, tokens, kv_heads, head_dim], then zeros.

    Requests are those whose pages begin at `first_entries` of the batch's, and have `kv_lens` tokens.
    """
    token = torch.arange(tokens, device=cells[0].device)
    entry = first_entries.unsqueeze(1) + token // batch.page_size
    page = batch.kv_indices[entry.clamp(max=len(batch.kv_indices) - 1)].long()
    held = token < kv_lens.unsqueeze(1)
    page, slot = torch.where(held, page, 0), token % batch.page_size
    return [torch.where(held[:, :, None, None], cell[page, :, slot].float(), 0.0) for cell in cells]


def _weights(
    scores: Tensor, place: Tensor, sinks: Tensor | None, window: int, scale: tuple[float, float | None]
) -> Tensor:
    """What each query [requests, heads, rows, tokens] takes of each key; place [requests, rows]: its position."""
    tokens, (factor, cap) = scores.shape[-1], scale
    scores = soft_cap(scores * factor, cap)
    token = torch.arange(tokens, device=scores.device)
    hidden = token > place.unsqueeze(2)
    if window != _NO_WINDOW:
        hidden |= token <= place.unsqueeze(2) - window
    scores = scores.masked_fill(hidden.unsqueeze(1), -torch.inf)
    if sinks is not None:
        column = sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, column), dim=-1)
    return scores.softmax(-1)[..., :tokens]


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
