"""Linears in fewer than 16 bits, whatever their format: read, joined, computed with, or given as if they were wide."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.engine.quantized import fp8, int4_packings
from shared.engine.quantized.formats import Quantization, WeightFormat
from shared.engine.quantized.fp8 import IN_TORCH, Fp8Linear, Fp8Products, Fp8Weight, Rounding
from shared.engine.quantized.int4 import Dequantize, Int4Linear, Int4Products, Tiles
from shared.engine.quantized.int4_formats import Int4Format
from shared.engine.quantized.int4_packings import Int4Weight
from shared.engine.quantized.weight_source import Part, WeightSource

NarrowWeight = Fp8Weight | Int4Weight


def take(
    source: WeightSource, form: WeightFormat, name: str, outputs: int, inputs: int, part: Part | None = None
) -> NarrowWeight:
    """Read the linear of this name; `ModelError` names the tensor that is missing, misshapen or of another type.

    Of a `part` no more is read than the blocks that it lies in.
    """
    if isinstance(form, Int4Format):
        return int4_packings.take(source, form, name, outputs, inputs, part)
    return fp8.take(source, form, name, outputs, inputs, part)


def joined(parts: Sequence[NarrowWeight]) -> NarrowWeight:
    """One linear for several of one format that share their input."""
    if isinstance(parts[0], Int4Weight):
        return int4_packings.joined([part for part in parts if isinstance(part, Int4Weight)])
    return fp8.joined([part for part in parts if isinstance(part, Fp8Weight)])


@dataclass(frozen=True, slots=True)
class NarrowProducts:
    """What a device multiplies in fewer than 16 bits."""

    fp8: Fp8Products
    int4: Int4Products

    @classmethod
    def on_gpu(
        cls,
        capability: tuple[int, int],
        *,
        deterministic: bool,
        dequantize: Dequantize = Tiles.dequantized,
        rounding: Rounding = IN_TORCH,
    ) -> NarrowProducts:
        """Products of a GPU of this compute capability."""
        return cls(
            Fp8Products.on_gpu(capability, deterministic=deterministic, rounding=rounding),
            Int4Products.on_gpu(capability, deterministic=deterministic, dequantize=dequantize),
        )

    def way(self, form: WeightFormat) -> str:
        """How linears of this format are computed, for descriptions and fingerprints."""
        return self.int4.way(form) if isinstance(form, Int4Format) else self.fp8.way(form)

    def linear(self, weight: NarrowWeight, bias: Tensor | None) -> Fp8Linear | Int4Linear:
        """y = x Wᵀ + b."""
        if isinstance(weight, Int4Weight):
            return self.int4.linear(weight, bias)
        return self.fp8.linear(weight, bias)

    def check(self, quantization: Quantization | None, dtype: torch.dtype) -> None:
        """Raise `ConfigError` for a type that the kernels do not compute."""
        if quantization and isinstance(quantization.format, Int4Format):
            self.int4.check(quantization.format, dtype)
        self.fp8.check(quantization, dtype)

    def dequantized_bytes(
        self, quantization: Quantization | None, linears: Iterable[Sequence[tuple[str, int, int]]]
    ) -> int:
        """Memory for the largest linear that is dequantized for a call; `linears` as `ModelConfig` gives them."""
        if quantization and isinstance(quantization.format, Int4Format):
            return self.int4.dequantized_bytes(quantization, linears)
        return self.fp8.dequantized_bytes(quantization, linears)


ON_HOST = NarrowProducts(fp8.ON_HOST, Int4Products())
NONE = NarrowProducts(Fp8Products(), Int4Products())  # all are dequantized for each call


class _Dequantized:
    """`WeightSource` of a checkpoint with such linears."""

    def __init__(self, source: WeightSource, quantization: Quantization) -> None:
        self._source = source
        self._quantization = quantization

    def __contains__(self, name: str) -> bool:
        return name in self._source

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, part: Part | None = None) -> Tensor:
        """See `WeightSource`. A linear in 4 bits is read whole, as files pack it along either side, and then cut."""
        linear = name.removesuffix(".weight")
        form = self._quantization.format_of(linear) if len(shape) == 2 and linear != name else None
        if form is None:
            return self._source.take(name, shape, dtype, part)
        outputs, inputs = shape
        if isinstance(form, Int4Format):
            whole = int4_packings.take(self._source, form, linear, outputs, inputs).dequantized()
            return (whole if part is None else whole[part.index_in(shape)]).to(dtype)
        return fp8.take(self._source, form, linear, outputs, inputs, part).dequantized().to(dtype)


def dequantized(source: WeightSource, quantization: Quantization | None) -> WeightSource:
    """Weights of a source, those of quantized linears in the type that is asked for."""
    return source if quantization is None else _Dequantized(source, quantization)
