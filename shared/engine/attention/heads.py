"""What a layer does to heads around its attention: norms, a rotation and sinks, in plain torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shared.engine.checkpoint.dtypes import EIGHT_BITS


@dataclass(frozen=True, slots=True)
class HeadTransform:
    """What a layer does to each head of its queries and keys: a norm, then a rotation, or neither; and its sinks."""

    q_norm: Tensor | None = None  # [head_dim]
    k_norm: Tensor | None = None
    epsilon: float = 0.0  # of the norms
    cos_sin: Tensor | None = None  # float32 [context_len, rotary_dim]: cosines first, of the first dimensions
    # float32 [heads]: the score of a key that every query sees, whose value is 0 (Xiao et al., 2023)
    sinks: Tensor | None = None

    def __call__(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Transform q and k [rows, heads, head_dim] at positions int32 [rows], in plain torch."""
        if self.q_norm is not None and self.k_norm is not None:
            q, k = rms_norm(q, self.q_norm, self.epsilon), rms_norm(k, self.k_norm, self.epsilon)
        if self.cos_sin is None:
            return q, k
        cos, sin = self.cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
        return _rotated(q, cos, sin), _rotated(k, cos, sin)


def weaken_by_sinks(attended: Tensor, log_sums: Tensor, sinks: Tensor) -> Tensor:
    """Let each head's sink have its part of the weights, as if it had been among the keys.

    attended [rows, heads, head_dim], overwritten and returned; log_sums float32 [rows, heads], natural logarithms of
    the sums of the exponentials of scores; sinks float32 [heads].
    """
    return attended.mul_(torch.sigmoid(log_sums - sinks).unsqueeze(-1))


def kept(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys or values in the type of a cache. What is beyond the largest number of 8 bits becomes that, not NaN."""
    if dtype is EIGHT_BITS:
        largest = torch.finfo(dtype).max
        x = x.clamp(-largest, largest)
    return x.to(dtype)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMSNorm of x [..., size] by weight [size] (Zhang and Sennrich, 2019), computed in float32."""
    wide = x.float()
    scale = (wide.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return weight * (wide * scale).to(x.dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, halves rotated; cos and sin float32 [rows, 1, rotary_dim / 2]."""
    size = cos.shape[-1]
    first, second, kept = torch.split(x, [size, size, x.shape[-1] - 2 * size], dim=-1)
    # A narrow one becomes float32 by the angles.
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    return torch.cat((turned, kept), dim=-1) if kept.shape[-1] else turned
