"""Linear layers: one whose row results do not depend on the other rows of the batch, and torch's own.

oneDNN's prepacked inner product computes each output row with the same instructions whatever the number of rows,
from two rows up: it blocks over the inputs in a fixed order and never splits a sum between threads. A single row is
another kernel (it splits sums over more than 1,024 inputs), so one row is computed as two. MKL's sgemm behind
`torch.nn.functional.linear` chooses its kernel by shape, as cuBLAS does on a GPU. Tests check this for the shapes at
hand.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear


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


@dataclass(frozen=True)
class PlainLinear:
    """y = x Wᵀ + b on any device and in any type; a row's last bits depend on the rows beside it."""

    weight: Tensor  # [outputs, inputs]
    bias: Tensor | None  # [outputs]

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, inputs] → [rows, outputs]."""
        return linear(x, self.weight, self.bias)
