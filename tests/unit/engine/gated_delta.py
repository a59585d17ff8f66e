"""One layer of gated delta attention (Yang et al., 2024) as Qwen3-Next has it, in plain torch, by what it keeps.

Not part of the product: decision 48 says what such a state would mean for leases, fetches and prefixes, and rests on
what the tests show of this.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, silu, softplus

_EPSILON = 1e-6  # of the lengths of queries and keys


@dataclass(frozen=True)
class DeltaShape:
    """Heads of keys share those of values in groups, as queries do in attention the other way round."""

    key_heads: int
    value_heads: int
    key_dim: int  # of a head
    value_dim: int
    kernel: int  # tokens that the convolution sees

    @property
    def channels(self) -> int:
        """Of the convolution: q, k and v of a token."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def state_bytes(self, conv_bytes: int = 2) -> int:
        """What a request keeps of a layer, however long it is; the memory is float32."""
        return 4 * self.value_heads * self.key_dim * self.value_dim + conv_bytes * self.channels * (
            self.kernel - 1
        )


@dataclass(frozen=True)
class DeltaState:
    """All that later tokens need of those before: of no token by itself, and so not to be cut by tokens."""

    conv: Tensor  # [channels, kernel - 1]: what the convolution still sees
    memory: Tensor  # float32 [value_heads, key_dim, value_dim]

    @staticmethod
    def empty(shape: DeltaShape) -> DeltaState:
        """Before the first token."""
        return DeltaState(
            torch.zeros(shape.channels, shape.kernel - 1),
            torch.zeros(shape.value_heads, shape.key_dim, shape.value_dim),
        )


class GatedDelta:
    """The layer, with transformers' names of weights."""

    def __init__(self, shape: DeltaShape, weights: Mapping[str, Tensor], epsilon: float) -> None:
        self._shape, self._weights, self._epsilon = shape, weights, epsilon

    def __call__(self, x: Tensor, state: DeltaState) -> tuple[Tensor, DeltaState]:
        """The next tokens of one request, x [tokens, hidden] → [tokens, hidden], and the state behind them."""
        shape, weights = self._shape, self._weights
        group = shape.value_heads // shape.key_heads
        sizes = [shape.key_dim, shape.key_dim, group * shape.value_dim, group * shape.value_dim]
        qkvz = linear(x, weights["in_proj_qkvz.weight"]).view(len(x), shape.key_heads, sum(sizes))
        q, k, v, z = torch.split(qkvz, sizes, dim=-1)
        ba = linear(x, weights["in_proj_ba.weight"]).view(len(x), shape.key_heads, 2 * group)
        b, a = ba.chunk(2, dim=-1)
        seen = torch.cat((state.conv, torch.cat([each.flatten(1) for each in (q, k, v)], dim=1).t()), dim=1)
        windows = seen.unfold(1, shape.kernel, 1)  # [channels, tokens, kernel]
        mixed = silu(torch.einsum("ctk,ck->tc", windows, weights["conv1d.weight"].squeeze(1)))
        keys = shape.key_heads * shape.key_dim
        q, k, v = torch.split(mixed, [keys, keys, shape.value_heads * shape.value_dim], dim=-1)
        q, k = (self._unit(each).repeat_interleave(group, dim=1) for each in (q, k))
        beta = b.flatten(1).sigmoid()
        decay = torch.exp(-weights["A_log"].exp() * softplus(a.flatten(1) + weights["dt_bias"]))
        memory, read = state.memory, []
        for token in range(len(x)):
            memory = memory * decay[token, :, None, None]
            known = torch.einsum("hkv,hk->hv", memory, k[token])
            delta = (v[token].view(shape.value_heads, -1) - known) * beta[token, :, None]
            memory = memory + k[token].unsqueeze(2) * delta.unsqueeze(1)
            read.append(torch.einsum("hkv,hk->hv", memory, q[token]) * shape.key_dim**-0.5)
        found = torch.stack(read)
        scale = (found.square().mean(-1, keepdim=True) + self._epsilon).rsqrt()
        gated = weights["norm.weight"] * found * scale * silu(z.reshape(found.shape))
        after = DeltaState(seen[:, seen.shape[1] - (shape.kernel - 1) :], memory)
        return linear(gated.flatten(1), weights["out_proj.weight"]), after

    def _unit(self, x: Tensor) -> Tensor:
        """Heads of length one, [tokens, key_heads, key_dim]."""
        heads = x.view(len(x), self._shape.key_heads, -1)
        return heads * (heads.square().sum(-1, keepdim=True) + _EPSILON).rsqrt()
