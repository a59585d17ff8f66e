"""EXTEND without a graph: where its arrays lie in staging, and their plan. Each rank does this with the same words."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shared.engine.attention.protocol import PagedBatch, PlannedAttention
from shared.engine.cuda.engine_parts import EngineParts
from shared.engine.cuda.graphs import DecodeGraphs
from shared.engine.cuda.staging import Staging


@dataclass(frozen=True, slots=True)
class ExtendSizes:
    """How many of each an EXTEND has."""

    requests: int
    pages: int
    tokens: int
    needed: int  # tokens whose logits are computed

    @property
    def arrays(self) -> list[int]:
        """Words of each array, in the order in which they lie."""
        starts = self.requests + 1
        return [starts, starts, self.pages, self.requests, self.tokens, self.tokens, self.tokens, self.needed]


class EagerExtends:
    """For one device. A plan overwrites that of a DECODE step, which is told before."""

    def __init__(self, parts: EngineParts, staging: Staging, decode: DecodeGraphs) -> None:
        self._stream = parts.forward
        self._attention = parts.attention
        self._page_size = parts.cache.page_size
        self._staging = staging
        self._forget_plan = decode.forget_plan

    def planned(self, place: int, sizes: ExtendSizes) -> tuple[Tensor, PlannedAttention, Tensor]:
        """Plan what is staged at this place; the ids of its tokens, attention, and the rows that need logits."""
        host, device = (
            torch.split(words, sizes.arrays) for words in self._staging.at(place, sum(sizes.arrays))
        )
        self._forget_plan()
        with self._stream.on_host():
            attention = self._attention.plan_extend(self._batch(host), self._batch(device))
        return device[6], attention, device[7]

    def _batch(self, arrays: tuple[Tensor, ...]) -> PagedBatch:
        qo_indptr, kv_indptr, kv_indices, kv_last_page_len, batch_indices, positions, *_ = arrays
        return PagedBatch(
            page_size=self._page_size,
            qo_indptr=qo_indptr,
            kv_indptr=kv_indptr,
            kv_indices=kv_indices,
            kv_last_page_len=kv_last_page_len,
            batch_indices=batch_indices,
            positions=positions,
        )
