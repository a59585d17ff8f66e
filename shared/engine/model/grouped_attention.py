"""Attention whose query heads share key-value heads in groups, with what stands around it in a layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shared.engine.attention.heads import HeadTransform
from shared.engine.attention.protocol import PlannedAttention
from shared.engine.checkpoint.model_config import ModelConfig
from shared.engine.model.ops import Linear, Ops


@dataclass(frozen=True)
class GroupedAttention:
    """See `AttentionBlock`: one product for q, k and v, norms and rotation of heads, attention, and the output."""

    number: int  # of the layer
    config: ModelConfig
    ops: Ops
    qkv: Linear
    whole_norms: tuple[Tensor, Tensor] | None  # of q and k over all of their heads, [heads · head_dim]
    heads: HeadTransform
    output: Linear

    def __call__(self, x: Tensor, planned: PlannedAttention) -> Tensor:
        """x [tokens, hidden] → [tokens, hidden]."""
        attended = planned.attend(self.number, *self._qkv(x), self.heads)
        return self.output(attended.reshape(len(x), -1))

    def _qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [tokens, hidden] → three of [tokens, heads, head_dim]."""
        config = self.config
        sizes = [config.heads, config.kv_heads, config.kv_heads]
        q, k, v = torch.split(self.qkv(x).view(len(x), sum(sizes), config.head_dim), sizes, dim=1)
        if self.whole_norms is not None:
            if self.ops.share.ranks > 1:
                q, k = self._normed_over_ranks(q, k, self.whole_norms)
            else:
                pairs, epsilon = zip((q, k), self.whole_norms, strict=True), config.rms_norm_eps
                q, k = (self.ops.rms_norm(x.flatten(1), weight, epsilon).view(x.shape) for x, weight in pairs)
        return q, k, v

    def _normed_over_ranks(
        self, q: Tensor, k: Tensor, weights: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """RMSNorm over the heads of all ranks, which have equally many, and each head on equally many ranks."""
        squares = torch.stack([x.float().square().mean((1, 2)) for x in (q, k)])  # [2, tokens]
        scales = (self.ops.sum(squares) / self.ops.share.ranks + self.config.rms_norm_eps).rsqrt()
        q, k = (
            weight.view(x.shape[1:]) * (x.float() * scale.view(-1, 1, 1)).to(x.dtype)
            for x, weight, scale in zip((q, k), weights, scales, strict=True)
        )
        return q, k
