"""`Ops` in plain torch: on any device, in any type, and what kernels of a GPU are compared with.

In float32, with linears that promise it, every operation gives a row the same bits in any batch: products and sums of
two numbers are exact by IEEE 754, and the few others were chosen for it (SiLU by its formula: torch's own rounds the
last elements of a tensor another way than the rest). In narrower types each operation computes in float32 and rounds
its result once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear

from shared.engine.attention.heads import rms_norm
from shared.engine.checkpoint.experts_config import Routing
from shared.engine.model.experts import GroupedExperts, SeparateExperts, UnpackedProducts
from shared.engine.model.ops import Bank, ExpertChoice, ExpertProducts, Gated, Head, Linear
from shared.engine.model.routing import Router
from shared.engine.parallel.shares import Share
from shared.engine.quantized.linears import ON_HOST, NarrowWeight

# ---- linear layers: one whose row results do not depend on the other rows of the batch, and torch's own --------------
# oneDNN's prepacked inner product computes each output row with the same instructions whatever the number of rows, from
# two rows up: it blocks over the inputs in a fixed order and never splits a sum between threads. A single row is
# another kernel (it splits sums over more than 1,024 inputs), so one row is computed as two. MKL's sgemm behind
# `torch.nn.functional.linear` chooses its kernel by shape, as cuBLAS does on a GPU. Tests check this for the shapes at
# hand.


MakeLinear = Callable[[Tensor, Tensor | None], Linear]  # of weight [outputs, inputs] and bias [outputs]


class PackedLinear:
    """y = x Wᵀ + b in float32 on CPU, with the weight reordered once into oneDNN's layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.output_size, self.input_size = weight.shape
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, inputs] → [rows, outputs]."""
        rows = x.shape[0]
        if rows == 1:
            x = x.expand(2, -1)
        y: Tensor = torch.ops.mkldnn._linear_pointwise(
            x.contiguous(), self._weight, self._bias, "none", [], ""
        )
        return y[:rows]


def plain_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """y = x Wᵀ + b on any device and in any type; a row's last bits depend on the rows beside it."""
    return partial(linear, weight=weight, bias=bias)


_GELU_SLOPE = 2 * math.sqrt(2 / math.pi)


class TorchOps:
    """See `Ops`."""

    share = Share()

    def __init__(self, linear: MakeLinear = plain_linear) -> None:
        """With another linear than torch's own a row has the same bits in any batch.

        Experts are computed one by one then: steps look at values, and cannot be captured.
        """
        self.linear = linear
        self._unpacked = UnpackedProducts()

    def routing(self, routing: Routing, correction: Tensor | None, device: torch.device) -> ExpertChoice:
        """See `Ops`."""
        return Router(routing, correction, device)

    def experts(self, bank: Bank, gated: Gated) -> ExpertProducts:
        """See `Ops`."""
        if self.linear is plain_linear:
            return GroupedExperts(bank, gated, self._unpacked)
        return SeparateExperts(bank, gated, self.linear)

    def narrow_linear(self, weight: NarrowWeight, bias: Tensor | None) -> Linear:
        """See `Ops`."""
        return ON_HOST.linear(weight, bias)

    def head(self, weight: Tensor) -> Head:
        """See `Ops`."""
        if weight.is_cuda and weight.dtype != torch.float32:
            return partial(_wide_product, weight)
        # a CPU has no product whose results are wider than its factors
        linear = self.linear(weight.float(), None)
        return lambda x, logits: logits.copy_(linear(x.float()))

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """See `Ops`."""
        return rms_norm(x, weight, epsilon)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        """See `Ops`."""
        total = x + residual
        return rms_norm(total, weight, epsilon), total

    def sum(self, x: Tensor) -> Tensor:
        """See `Ops`."""
        return x

    def sum_add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        """See `Ops`."""
        return self.add_rms_norm(x, residual, weight, epsilon)

    def gather(self, x: Tensor) -> Tensor:
        """See `Ops`."""
        return x.unsqueeze(0)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """See `Ops`."""
        gate, up = gate_up.float().chunk(2, dim=-1)
        return (gate / (1.0 + torch.exp(-gate)) * up).to(gate_up.dtype)

    def gelu_and_mul(self, gate_up: Tensor) -> Tensor:
        """See `Ops`. (1 + tanh u) / 2 is 1 / (1 + e^-2u) (Hendrycks and Gimpel, 2016)."""
        gate, up = gate_up.float().chunk(2, dim=-1)
        doubled = _GELU_SLOPE * (gate + 0.044715 * gate * gate * gate)
        return (gate / (1.0 + torch.exp(-doubled)) * up).to(gate_up.dtype)


def _wide_product(weight: Tensor, x: Tensor, logits: Tensor) -> Tensor:
    return torch.mm(x, weight.t(), out_dtype=torch.float32, out=logits)
