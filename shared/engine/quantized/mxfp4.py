"""MXFP4: 32 numbers share a power of two, and each is a float of 4 bits (OCP Microscaling Formats, version 1.0).

Two numbers lie in a byte, the first in its lower half. bfloat16 holds each of them exactly, but for a scale beyond its
own exponents.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shared.engine.quantized.weight_source import Part, WeightSource
from shared.primitives.errors import ModelError

BLOCK = 32  # numbers with one scale
_HALF = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # e2m1, by its lower three bits
_VALUES = (*_HALF, *(-value for value in _HALF))
_EXPONENT_BIAS = 127
SCALE_MAX = 148  # 2^21, up to which kernels multiply exactly; those of gpt-oss are below 1


def take(
    weights: WeightSource, name: str, shape: tuple[int, int, int], part: Part | None = None
) -> tuple[Tensor, Tensor]:
    """The matrices [count, outputs, inputs] stored as NAME_blocks and NAME_scales: values [count, outputs, inputs / 2].

    Raises `ModelError` where one is missing or misshapen, where blocks do not divide the inputs, and where a scale is
    larger than kernels take.
    """
    count, outputs, inputs = shape
    if inputs % BLOCK:
        raise ModelError(f"{name} has {inputs} inputs: expected whole blocks of {BLOCK}")
    blocks = weights.take(f"{name}_blocks", (count, outputs, inputs // BLOCK, BLOCK // 2), torch.uint8, part)
    scales = weights.take(f"{name}_scales", (count, outputs, inputs // BLOCK), torch.uint8, part)
    if not scales.is_meta and (found := int(scales.amax())) > SCALE_MAX:
        raise ModelError(
            f"{name}_scales has a scale of 2^{found - _EXPONENT_BIAS}: expected at most 2^{SCALE_MAX - _EXPONENT_BIAS}"
        )
    return blocks.flatten(2), scales


def dequantized(blocks: Tensor, scales: Tensor) -> Tensor:
    """uint8 [outputs, blocks, 16] and [outputs, blocks] → float32 [outputs, 32 · blocks]."""
    values = torch.tensor(_VALUES, device=blocks.device)
    halves = torch.stack((blocks & 0x0F, blocks >> 4), dim=-1)
    numbers = values[halves.int()].flatten(-2)
    return torch.ldexp(numbers, scales.int().unsqueeze(-1) - _EXPONENT_BIAS).flatten(-2)
