"""Linears in fewer than 16 bits, whatever their format, as if they were not."""

from __future__ import annotations

import torch
from torch import Tensor

from shared.engine.quantized.formats import Quantization
from shared.engine.quantized.fp8 import take
from shared.engine.weight_source import WeightSource


class _Dequantized:
    """`WeightSource` of a checkpoint with such linears."""

    def __init__(self, source: WeightSource, quantization: Quantization) -> None:
        self._source = source
        self._quantization = quantization

    def __contains__(self, name: str) -> bool:
        return name in self._source

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """See `WeightSource`."""
        linear = name.removesuffix(".weight")
        form = self._quantization.format_of(linear) if len(shape) == 2 and linear != name else None
        if form is None:
            return self._source.take(name, shape, dtype)
        outputs, inputs = shape
        return take(self._source, form, linear, outputs, inputs).dequantized().to(dtype)


def dequantized(source: WeightSource, quantization: Quantization | None) -> WeightSource:
    """Weights of a source, those of quantized linears in the type that is asked for."""
    return source if quantization is None else _Dequantized(source, quantization)
