"""`Ops` by FlashInfer's kernels, and by cuBLAS where torch has the better one. Has not run on a GPU yet."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from shared.engine.model.ops import Linear


class FlashInferOps:
    """See `Ops`."""

    def __init__(self, flashinfer: Any) -> None:
        """`flashinfer` is the package, see `flashinfer_package`."""
        self._flashinfer = flashinfer

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """See `Ops`."""
        return partial(torch.nn.functional.linear, weight=weight, bias=bias)

    def head(self, weight: Tensor) -> Linear:
        """See `Ops`."""
        return partial(torch.mm, mat2=weight.t(), out_dtype=torch.float32)

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """See `Ops`; x [tokens, size] or [tokens, heads, size], whose rows may lie apart."""
        normed: Tensor = self._flashinfer.rmsnorm(x, weight, epsilon)
        return normed

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        """See `Ops`; both are overwritten."""
        self._flashinfer.fused_add_rmsnorm(x, residual, weight, epsilon)
        return x, residual

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """See `Ops`."""
        product: Tensor = self._flashinfer.silu_and_mul(gate_up)
        return product

    def gelu_and_mul(self, gate_up: Tensor) -> Tensor:
        """See `Ops`; of torch, as no family that needs it has been brought to GPUs yet."""
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.gelu(gate, approximate="tanh") * up

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
        """See `Ops`; both are overwritten."""
        self._flashinfer.apply_rope_with_cos_sin_cache_inplace(
            positions, q, k, q.shape[-1], cos_sin, is_neox=True
        )
        return q, k

    def top_k_floor(self, logits: Tensor, top_k: Tensor) -> Tensor:
        """See `Ops`, but the lowest above -inf where fewer than k are.

        torch.topk takes one k for all rows, as a number of the host; sorting 256 rows of 150,000 needs half a GB.
        """
        kept = self._flashinfer.top_k_mask_logits(
            logits, top_k
        )  # the k-th highest, its equals, and above; or -inf
        return torch.where(kept == -torch.inf, torch.inf, kept).amin(-1)

    def top_p_floor(self, logits: Tensor, top_p: Tensor) -> Tensor:
        """See `Ops`. Sums are exact, by integers: run after run, and in any batch, the same tokens are held."""
        shares = self._flashinfer.top_p_renorm_probs(logits.softmax(-1), top_p, is_deterministic=True)
        floor = torch.where(shares > 0, logits, torch.inf).amin(-1)
        return torch.where(top_p < 1, floor, -torch.inf)
