"""Linears whose weights are 8-bit floats (e4m3): read with their scales, dequantized, and computed with.

A weight is `values * scales` in float32, whatever the format: scales are kept for each row, and for each 128 columns
where the file has blocks. So linears that share their input are joined as any weights are, each row with its own scale.

    CPU engine                        dequantized at load, into the engine's type
    channel, tensor                   `torch._scaled_mm` by rows; a token's numbers are rounded to e4m3 with one scale
    block, compute capability 9.0     `scaled_mm` by blocks; a token's numbers are rounded with a scale for each 128
    elsewhere, and deterministic      dequantized for each call, and inputs are not rounded

Nothing looks at a value, so all may be captured as a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from shared.engine.quantized.formats import Quantization
from shared.engine.quantized.fp8_formats import BLOCK, Fp8Format, Scales
from shared.engine.quantized.weight_source import Part, WeightSource
from shared.primitives.errors import ConfigError

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3
_NAN = 0x7F  # but for its sign
SMALLEST = 1e-12  # what a row of zeros counts as
# cuBLASLt reads scales of inputs by so many rows, and those of a weight by so many blocks of inputs: with others it
# computes wrong, and says nothing.
_ROWS_STEP, _BLOCKS_STEP = 4, 4
_DEQUANTIZED_BYTES = 4 + 2  # a number, while a linear is dequantized
_STEP = 16  # sizes that a GPU multiplies in FP8
_FP8_CAPABILITY, _BLOCKS_CAPABILITY = (8, 9), (9, 0)


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """A weight in 8 bits: `values * scales`."""

    values: Tensor  # e4m3 [outputs, inputs]
    scales: Tensor  # float32 [outputs, 1], or with blocks [outputs, ⌈inputs / 128⌉]
    input_scale: Tensor | None  # float32 [], of all inputs; None: each token finds its own
    blocks: bool
    whole: bool  # each 128 rows from the first have the same scales

    def has_nan(self) -> Tensor:
        """Whether a code is no number, a scalar where the weight is: nobody waits for it yet."""
        return (self.values.view(torch.uint8) & _NAN == _NAN).any()

    def dequantized(self) -> Tensor:
        """float32 [outputs, inputs]: what every way to compute is compared with."""
        wide, inputs = self.values.float(), self.values.shape[1]
        if not self.blocks:
            return wide.mul_(self.scales)
        blocks = inputs // BLOCK
        if blocks:
            wide[:, : blocks * BLOCK].view(-1, blocks, BLOCK).mul_(self.scales[:, :blocks, None])
        if inputs % BLOCK:
            wide[:, blocks * BLOCK :].mul_(self.scales[:, -1:])
        return wide


def take(
    source: WeightSource, form: Fp8Format, name: str, outputs: int, inputs: int, part: Part | None = None
) -> Fp8Weight:
    """Read the linear of this name; `ModelError` names the tensor that is missing, misshapen or of another type.

    Of a `part` the blocks that it lies in are read too; columns begin with a block.
    """
    values = source.take(f"{name}.weight", (outputs, inputs), E4M3, part)
    stored = _named(source, name, form.scale_names)
    shape, rows = form.scale_shape(outputs, inputs), part if part and part.dim == 0 else Part(0, outputs)
    if form.scales is Scales.BLOCK:
        cut = None if part is None else _blocks_of(part)
        scales = source.take(stored, shape, torch.float32, cut)
        spread = scales.repeat_interleave(BLOCK, dim=0, output_size=len(scales) * BLOCK)
        scales = spread[rows.start % BLOCK :][: len(values)]
    elif form.scales is Scales.CHANNEL:
        scales = source.take(stored, shape, torch.float32, rows)
    else:
        scales = source.take(stored, shape, torch.float32).reshape(-1, 1).expand(len(values), 1)
    input_scale = None
    if form.static_inputs:
        input_scale = source.take(_named(source, name, form.input_scale_names), (), torch.float32)
    whole = rows.start % BLOCK == 0
    return Fp8Weight(values, scales, input_scale, blocks=form.scales is Scales.BLOCK, whole=whole)


def _blocks_of(part: Part) -> Part:
    assert part.dim == 0 or part.start % BLOCK == 0, f"{part} does not begin with a block"
    return replace(part, start=part.start // BLOCK, stop=-(-part.stop // BLOCK))


def _named(source: WeightSource, linear: str, names: Sequence[str]) -> str:
    """The first of the names that there is; the first of all, if there is none."""
    full = [f"{linear}.{name}" for name in names]
    return next((name for name in full if name in source), full[0])


def joined(parts: Sequence[Fp8Weight]) -> Fp8Weight:
    """One linear for several that share their input, whose static scale is then the largest of theirs."""
    input_scales = [part.input_scale for part in parts if part.input_scale is not None]
    return Fp8Weight(
        torch.cat([part.values for part in parts]),
        torch.cat([part.scales for part in parts]),
        torch.stack(input_scales).amax() if input_scales else None,
        blocks=parts[0].blocks,
        whole=all(len(part.values) % BLOCK == 0 for part in parts[:-1]),
    )


# ---- ways to compute -------------------------------------------------------------------------------------------------


class Rounding(Protocol):
    """How inputs of linears become numbers of 8 bits and their scales."""

    def rows(self, x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See `rounded`."""

    def blocks(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """See `rounded_by_blocks`, of as many rows as `padded_rows` says; scales lie column by column."""


@dataclass(frozen=True, slots=True)
class TorchRounding:
    """`Rounding` in plain torch: what kernels are compared with."""

    def rows(self, x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See `rounded`."""
        return rounded(x, scale)

    def blocks(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """See `Rounding`."""
        rows = len(x)
        values, scales = rounded_by_blocks(functional.pad(x, (0, 0, 0, padded_rows(rows) - rows)))
        return values, scales.t().contiguous().t()


IN_TORCH = TorchRounding()


def padded_rows(rows: int) -> int:
    """Rows that a product by blocks of so many takes."""
    return rows + -rows % _ROWS_STEP


@dataclass(frozen=True, slots=True)
class Fp8Products:
    """What torch multiplies in 8 bits on a device."""

    by_rows: bool = False
    by_blocks: bool = False
    step: int = 1  # of which numbers of inputs and outputs are multiples
    rounding: Rounding = IN_TORCH  # by a kernel on a GPU

    @classmethod
    def on_gpu(
        cls, capability: tuple[int, int], *, deterministic: bool, rounding: Rounding = IN_TORCH
    ) -> Fp8Products:
        """Products of a GPU. How kernels divide one may depend on the rows, so deterministic mode has none."""
        if deterministic:
            return cls()
        return cls(capability >= _FP8_CAPABILITY, capability == _BLOCKS_CAPABILITY, _STEP, rounding)

    def way(self, form: Fp8Format) -> str:
        """How linears of this format are computed, for descriptions and fingerprints."""
        return f"{form.name} {'multiplied' if self._able(form) else 'dequantized'}"

    def linear(self, weight: Fp8Weight, bias: Tensor | None) -> Fp8Linear:
        """y = x Wᵀ + b by the device's kernel if it takes these sizes, else dequantized for each call."""
        outputs, inputs = weight.values.shape
        if not self._takes(weight.blocks, outputs, inputs) or (weight.blocks and not weight.whole):
            return _ByDequantized(weight, bias)
        made = ByBlocks if weight.blocks else _ByRows
        return made(weight, bias, self.rounding)

    def check(self, quantization: Quantization | None, dtype: torch.dtype) -> None:
        """Raise `ConfigError` for a type that the kernels do not compute: those by rows give bfloat16 alone."""
        if (
            quantization
            and isinstance(quantization.format, Fp8Format)
            and self.step == _STEP
            and self._able(quantization.format)
            and dtype != torch.bfloat16
        ):
            name = str(dtype).removeprefix("torch.")
            raise ConfigError(
                f"weights of {quantization.format.name} are multiplied in bfloat16 on cuda, not in {name}: set dtype "
                "to bfloat16"
            )

    def dequantized_bytes(
        self, quantization: Quantization | None, linears: Iterable[Sequence[tuple[str, int, int]]]
    ) -> int:
        """Memory for the largest linear that is dequantized for a call: in float32, then in 16 bits.

        `linears`: as `ModelConfig.linears` gives them.
        """
        if quantization is None:
            return 0
        largest = 0
        for group in linears:
            form, inputs = quantization.format_of(group[0][0]), group[0][2]
            if not isinstance(form, Fp8Format):
                continue
            rows, blocks = [outputs for _, outputs, _ in group], form.scales is Scales.BLOCK
            whole = not blocks or all(outputs % BLOCK == 0 for outputs in rows[:-1])
            if not (whole and self._takes(blocks, sum(rows), inputs)):
                largest = max(largest, sum(rows) * inputs)
        return largest * _DEQUANTIZED_BYTES

    def _able(self, form: Fp8Format) -> bool:
        return self.by_blocks if form.scales is Scales.BLOCK else self.by_rows

    def _takes(self, blocks: bool, outputs: int, inputs: int) -> bool:
        step = BLOCK if blocks else self.step
        if outputs % step or inputs % step:
            return False
        return self.by_blocks if blocks else self.by_rows


ON_HOST = Fp8Products(by_rows=True)


class _ByDequantized:
    def __init__(self, weight: Fp8Weight, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self._weight.dequantized().to(x.dtype), self._bias)


class _ByRows:
    """Every output has a scale, and so has every row of inputs."""

    def __init__(self, weight: Fp8Weight, bias: Tensor | None, rounding: Rounding) -> None:
        self._values, self._bias = weight.values.t(), bias  # [inputs, outputs], column by column
        self._rounding = rounding
        self._scales = weight.scales.t().contiguous()  # [1, outputs]
        self._input_scale = weight.input_scale

    def __call__(self, x: Tensor) -> Tensor:
        values, scales = self._rounding.rows(x, self._input_scale)
        return torch._scaled_mm(
            values, self._values, scale_a=scales, scale_b=self._scales, bias=self._bias, out_dtype=x.dtype
        )


class ByBlocks:
    """Every 128 by 128 numbers of the weight have a scale, and so have every 128 numbers of a row of inputs."""

    def __init__(self, weight: Fp8Weight, bias: Tensor | None, rounding: Rounding) -> None:
        self._values, self._bias, self._rounding = weight.values.t(), bias, rounding
        scales = weight.scales[::BLOCK]  # [⌈outputs / 128⌉, inputs / 128]
        blocks = scales.shape[1]
        # Not `pad`, which keeps the strides of a view: torch refuses those of a single row.
        padded = scales.new_zeros(len(scales), blocks + -blocks % _BLOCKS_STEP)
        padded[:, :blocks] = scales
        self._scales = padded.t()

    def __call__(self, x: Tensor) -> Tensor:
        """x bfloat16 [rows, inputs] → [rows, outputs]."""
        rows = len(x)
        values, scales = self._rounding.blocks(x)
        recipes = functional.ScalingType
        y = functional.scaled_mm(
            values,
            self._values,
            scales,
            recipes.BlockWise1x128,
            self._scales,
            recipes.BlockWise128x128,
            output_dtype=x.dtype,
        )[:rows]
        return y if self._bias is None else y + self._bias


Fp8Linear = _ByRows | ByBlocks | _ByDequantized


def rounded(x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x [rows, size] in e4m3, and float32 [rows, 1] that it is to be multiplied with: that of all rows if it is given.

    The largest number of a row becomes the largest of e4m3; with a given scale larger ones become that too.
    """
    if scale is None:
        scales = x.abs().amax(dim=-1, keepdim=True).float().clamp(min=SMALLEST) / LARGEST
    else:
        scales = scale.reshape(1, 1).repeat(len(x), 1)
    return (x / scales).clamp_(-LARGEST, LARGEST).to(E4M3), scales  # divided in float32, as the scales are


def rounded_by_blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    """As `rounded`, for each 128 numbers of a row: scales [rows, size / 128]."""
    rows, size = x.shape
    values, scales = rounded(x.reshape(-1, BLOCK))
    return values.view(rows, size), scales.view(rows, -1)
