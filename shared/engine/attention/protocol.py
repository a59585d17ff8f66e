"""What a model asks of attention: plan once a step, attend once a layer."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from shared.engine.attention.paged import PagedBatch


class PlannedAttention(Protocol):
    """Attention of one step."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write k, v [rows, kv_heads, head_dim], then attend with q [rows, heads, head_dim]; shaped as q."""


class Attention(Protocol):
    """Attention of one model over one cache."""

    def plan(self, batch: PagedBatch) -> PlannedAttention:
        """Everything about a step that all layers share."""
