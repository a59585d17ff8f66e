"""Attention on CPU that gives a token the same bits in every batch.

Queries are cut into tiles of `TILE` positions and the cache into blocks of `BLOCK` positions, both at absolute
positions; every (tile, block) pair is a matrix product of one fixed shape, whatever else is in the batch:

    positions   0      128      256     384
    blocks      |  b0   |  b1   |  b2   |         a tile meets every block up to its own, in order;
    tiles       ……………………………………[t]                only the last of them (the diagonal one) is masked

A tile's rows that are not in the batch are computed and thrown away. Softmax takes two passes: the maximum is exact
in any order, sums and weighted values are added block after block. All pairs of a group are computed at once; block
j's pairs lie together and belong to the group's first `n` tiles, because tiles are sorted by their number of blocks.
The products are exact in the batch count because MKL's batched sgemm treats each matrix alone; tests check it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.engine.attention.heads import HeadTransform
from shared.engine.attention.protocol import PagedBatch, soft_cap
from shared.engine.checkpoint.kv_cache import KVCache
from shared.engine.checkpoint.model_config import ModelConfig
from shared.primitives.errors import ConfigError

TILE = 4  # positions; wider tiles read the cache less often in prefill and waste more of a decode step
BLOCK = 128  # positions
GROUP_PAIRS = 16  # pairs computed at once: their keys, values and scores should stay in the cache of a core


@dataclass(frozen=True, slots=True)
class _Mask:
    pairs: Tensor  # [masked] which pairs it touches
    hidden: Tensor  # [masked, 1, TILE, 1, BLOCK] True where a query must not look


@dataclass(frozen=True, slots=True)
class _Group:
    """Tiles computed together, most blocks first, and their pairs, block by block."""

    tiles: Tensor  # [tiles] which tiles of the step
    pair_tiles: Tensor  # [pairs] which tile of the group each pair belongs to
    spans: tuple[tuple[int, int], ...]  # per block: its first pair, and how many
    rows: Tensor  # [pairs, kv_heads, pages in a block] rows of the cache at layer 0, keys
    masks: dict[int | None, _Mask]  # by window
    diagonal: Tensor  # [tiles] each tile's last pair
    unwritten: Tensor  # [tiles, 1, BLOCK, 1] cells of that pair's block beyond the request's kv_len


class BlockedAttention:
    """`Attention` over a `KVCache` in host memory."""

    def __init__(self, config: ModelConfig, cache: KVCache) -> None:
        if BLOCK % cache.page_size:
            raise ConfigError(f"page_size must divide {BLOCK}, got {cache.page_size}")
        self.config = config
        self.cache = cache
        self.scratch = (Scratch(), Scratch())  # for keys and values

    def plan(self, batch: PagedBatch) -> BlockedStep:
        """Pairs, masks and cache rows of a step."""
        kv_lens, requests, positions = batch.kv_lens, batch.batch_indices.long(), batch.positions.long()
        first = (kv_lens - batch.query_lens) // TILE  # [requests] first tile of each
        counts = (kv_lens - 1) // TILE - first + 1
        offsets = counts.cumsum(0) - counts
        tile_requests = torch.repeat_interleave(torch.arange(len(counts)), counts)
        tile_numbers = torch.arange(len(tile_requests)) - offsets[tile_requests] + first[tile_requests]
        row_tiles = offsets[requests] + positions // TILE - first[requests]
        blocks = tile_numbers * TILE // BLOCK + 1
        groups = tuple(
            self._group(batch, kv_lens, tiles, tile_requests[tiles], tile_numbers[tiles], blocks[tiles])
            for tiles in _grouped(blocks)
        )
        pages, slots = batch.cells()
        return BlockedStep(
            self,
            groups,
            len(tile_requests),
            _Places(batch.positions, row_tiles, positions % TILE, pages, slots),
        )

    def _group(
        self,
        batch: PagedBatch,
        kv_lens: Tensor,
        tiles: Tensor,
        requests: Tensor,
        numbers: Tensor,
        blocks: Tensor,
    ) -> _Group:
        most = int(blocks[0])
        pair_blocks, pair_tiles = torch.nonzero(
            torch.arange(most).unsqueeze(1) < blocks.unsqueeze(0), as_tuple=True
        )
        sizes = torch.bincount(pair_blocks, minlength=most).tolist()
        starts = [sum(sizes[:block]) for block in range(most)]
        diagonal = torch.tensor(starts)[blocks - 1] + torch.arange(len(blocks))
        keys = pair_blocks.unsqueeze(1) * BLOCK + torch.arange(BLOCK)  # [pairs, BLOCK] positions
        queries = (numbers * TILE)[pair_tiles].unsqueeze(1) + torch.arange(TILE)  # [pairs, TILE] positions
        masks = {window: _mask(window, queries, keys, diagonal) for window in set(self.config.windows)}
        unwritten = keys[diagonal] >= kv_lens[requests].unsqueeze(1)
        return _Group(
            tiles=tiles,
            pair_tiles=pair_tiles,
            spans=tuple(zip(starts, sizes, strict=True)),
            rows=self._rows(batch, kv_lens, requests[pair_tiles], pair_blocks),
            masks=masks,
            diagonal=diagonal,
            unwritten=unwritten[:, None, :, None],
        )

    def _rows(self, batch: PagedBatch, kv_lens: Tensor, requests: Tensor, blocks: Tensor) -> Tensor:
        """Rows of the cache that hold each pair's keys; a block's missing pages are read as its first page."""
        size = self.cache.page_size
        indices = blocks.unsqueeze(1) * (BLOCK // size) + torch.arange(BLOCK // size)
        written = indices * size < kv_lens[requests].unsqueeze(1)
        indices = torch.where(written, indices, indices[:, :1])
        entries = batch.kv_indptr[requests].unsqueeze(1) + indices  # [pairs, pages in a block]
        pages = batch.kv_indices[entries].long()
        heads = torch.arange(self.config.kv_heads)
        return (pages * (self.config.layers * 2 * self.config.kv_heads)).unsqueeze(1) + heads[:, None]


@dataclass(frozen=True, slots=True)
class _Places:
    """Where each row of a step is computed, and where its own key and value lie."""

    positions: Tensor  # [tokens] int32
    tiles: Tensor  # [tokens] its tile
    tile_slots: Tensor  # [tokens] its place in the tile
    pages: Tensor  # [tokens]
    page_slots: Tensor  # [tokens] its place in the page


class BlockedStep:
    """`PlannedAttention` of one step on CPU."""

    def __init__(
        self, attention: BlockedAttention, groups: tuple[_Group, ...], tiles: int, rows: _Places
    ) -> None:
        self._config = attention.config
        self._cache = attention.cache
        self._scratch = attention.scratch
        self._rows = attention.cache.store.view(-1, attention.cache.page_size * attention.config.head_dim)
        self._groups = groups
        self._tiles = tiles
        self._positions = rows.positions
        self._row_tiles, self._row_slots = rows.tiles, rows.tile_slots
        self._pages, self._page_slots = rows.pages, rows.page_slots

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, transform: HeadTransform) -> Tensor:
        """See `PlannedAttention`."""
        config = self._config
        q, k = transform(q, k, self._positions)
        dtype = self._cache.store.dtype
        keys, values = self._cache.layer(layer)
        # Finite: an infinite value times weight 0 is NaN, and would spoil rows that must not see the value.
        largest = torch.finfo(dtype).max
        keys[self._pages, :, self._page_slots] = k.clamp(-largest, largest).to(dtype)
        values[self._pages, :, self._page_slots] = v.clamp(-largest, largest).to(dtype)
        shared = config.heads // config.kv_heads  # query heads of a key-value head
        tiles = torch.zeros(self._tiles, config.kv_heads, TILE, shared, config.head_dim)
        scaled = q.float() * config.attention_scale
        tiles[self._row_tiles, :, self._row_slots] = scaled.view(-1, config.kv_heads, shared, config.head_dim)
        for group in self._groups:
            tiles[group.tiles] = self._attend_group(layer, group, tiles[group.tiles], transform.sinks)
        return tiles[self._row_tiles, :, self._row_slots].reshape(q.shape).to(q.dtype)

    def _attend_group(self, layer: int, group: _Group, q: Tensor, sinks: Tensor | None) -> Tensor:
        """q and result [tiles, kv_heads, TILE, heads per kv head, head_dim]."""
        pairs, heads, shape = len(group.pair_tiles), self._config.kv_heads, q.shape[1:]
        keys, values = self._keys(group, layer), self._values(group, layer)
        by_pair = values.view(pairs, heads, BLOCK, -1)
        by_pair[group.diagonal] = by_pair[group.diagonal].masked_fill_(group.unwritten, 0.0)
        q_pairs = q[group.pair_tiles].view(pairs * heads, -1, self._config.head_dim)
        # [pairs · kv_heads, TILE · shared, BLOCK]
        scores = soft_cap(torch.bmm(q_pairs, keys), self._config.attention_cap)
        mask = group.masks[self._config.windows[layer]]
        by_place = scores.view(pairs, *shape[:-1], BLOCK)
        by_place[mask.pairs] = by_place[mask.pairs].masked_fill_(mask.hidden, -torch.inf)
        scores = scores.view(pairs, heads, -1, BLOCK)
        highest = _fold(group, scores.amax(-1), _maximum_)
        scores.sub_(highest[group.pair_tiles].unsqueeze(-1)).exp_()
        total = _fold(group, scores.sum(-1), Tensor.add_)
        if sinks is not None:  # beside the highest score, as all others
            total.add_(torch.exp(sinks.view(heads, 1, -1).expand(-1, TILE, -1).reshape(heads, -1) - highest))
        partial = torch.bmm(scores.view(pairs * heads, -1, BLOCK), values)
        weighted = _fold(group, partial.view(pairs, heads, -1, self._config.head_dim), Tensor.add_)
        return weighted.div_(total.unsqueeze(-1)).view(len(q), *shape)

    def _keys(self, group: _Group, layer: int) -> Tensor:
        """Keys of all pairs, copied out of their pages: [pairs · kv_heads, head_dim, BLOCK]."""
        pages = self._gather(group, layer, 0)  # [pairs · kv_heads · pages in a block, page_size · head_dim]
        shape = (-1, BLOCK // self._cache.page_size, self._config.head_dim, self._cache.page_size)
        return pages.view(shape).transpose(1, 2).reshape(-1, self._config.head_dim, BLOCK)

    def _values(self, group: _Group, layer: int) -> Tensor:
        """Values of all pairs, copied out of their pages: [pairs · kv_heads, BLOCK, head_dim]."""
        return self._gather(group, layer, 1).view(-1, BLOCK, self._config.head_dim)

    def _gather(self, group: _Group, layer: int, half: int) -> Tensor:
        rows = (group.rows + (2 * layer + half) * self._config.kv_heads).view(-1)
        found = self._scratch[half].take(len(rows), self._rows)
        torch.index_select(self._rows, 0, rows, out=found)
        return found.float()


class Scratch:
    """Memory that every step reuses: fresh memory costs a page fault for every 4 KiB, more than the copy itself."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def take(self, rows: int, like: Tensor) -> Tensor:
        """An uninitialized tensor [rows, …] with the rest of its shape and its dtype as `like`."""
        if self._memory is None or len(self._memory) < rows:
            self._memory = like.new_empty(rows, *like.shape[1:])
        return self._memory[:rows]


def _fold(group: _Group, of_pairs: Tensor, combine_into: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Combine the pairs of each tile in place, block after block: [pairs, …] → [tiles, …]."""
    result = of_pairs[: group.spans[0][1]]  # every tile has block 0
    for start, count in group.spans[1:]:
        combine_into(result[:count], of_pairs[start : start + count])
    return result


def _maximum_(into: Tensor, other: Tensor) -> Tensor:
    return torch.maximum(into, other, out=into)


def _grouped(blocks: Tensor) -> Iterator[Tensor]:
    """Cut tiles, those with most blocks first, into groups of at most `GROUP_PAIRS` pairs (or one tile)."""
    order = torch.argsort(blocks, descending=True, stable=True)
    start, pairs = 0, 0
    for place, count in enumerate(blocks[order].tolist()):
        if pairs and pairs + count > GROUP_PAIRS:
            yield order[start:place]
            start, pairs = place, 0
        pairs += count
    yield order[start:]


def _mask(window: int | None, queries: Tensor, keys: Tensor, diagonal: Tensor) -> _Mask:
    """Causality hides cells of a tile's last block only; a window may hide cells of any block."""
    pairs = diagonal if window is None else torch.arange(len(keys))
    query = queries[pairs].unsqueeze(2)  # [masked, TILE, 1]
    key = keys[pairs].unsqueeze(1)  # [masked, 1, BLOCK]
    hidden = key > query
    if window is not None:
        hidden |= key <= query - window
    return _Mask(pairs, hidden[:, None, :, None, :])
