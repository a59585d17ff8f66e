"""The arithmetic of a layer, behind one value: plain torch here, FlashInfer's kernels in `shared.engine.cuda.platform`.

None of them looks at a value on the host, and none keeps a tensor, so a step may be captured as a CUDA graph.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Linear(Protocol):
    """y = x Wᵀ + b."""

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, inputs] → [rows, outputs]."""


class Ops(Protocol):
    """What a decoder's layers are made of. x [tokens, …] in the model's dtype."""

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """weight [outputs, inputs], bias [outputs], kept as they are best read."""

    def head(self, weight: Tensor) -> Linear:
        """As `linear`, but the results are float32: no two logits are equal only because they were rounded."""

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Over the last dimension of x [..., size]."""

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        """The norm of x + residual, and that sum; both may overwrite the arguments."""

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """[tokens, 2 · inner], gate first → [tokens, inner]."""

    def gelu_and_mul(self, gate_up: Tensor) -> Tensor:
        """As `silu_and_mul`, of GELU as approximated by tanh."""

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotary embedding, halves rotated. q and k [tokens, heads, head_dim] may be overwritten.

        positions [tokens] int32; cos_sin [context_len, rotary_dim] float32, cosines in the first half: so many
        dimensions of each head are rotated, the first ones.
        """
