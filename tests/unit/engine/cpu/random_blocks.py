"""Rows of ggml's blocks at random, of every kind that the kernels compute with."""

from __future__ import annotations

import torch
from torch import Tensor

from shared.engine.gguf.packing import BLOCK_FORMATS, WIDE_FORMATS, Kind, block_inputs

ODD_SCALES = [0.0, -0.0, 6e-8, -6e-8, 6.1e-5, 65504.0, -65504.0, 1.0]  # with the smallest and largest of fp16


def block_bytes(kind: Kind) -> tuple[int, int]:
    """Bytes of a block of one output in a GGUF file, and how many of them are fp16 numbers, at its end for q6_k."""
    if kind in WIDE_FORMATS:
        return WIDE_FORMATS[kind].stored_bytes, 2 * WIDE_FORMATS[kind].halves
    return BLOCK_FORMATS[kind].nbytes, 2 * BLOCK_FORMATS[kind].halves


def rows_of(kind: Kind, halves: Tensor, generator: torch.Generator) -> Tensor:
    """Rows of blocks with these fp16 numbers [outputs, blocks, numbers], and any quantized values: [outputs, bytes]."""
    whole, numbers = block_bytes(kind)
    rest = torch.randint(256, (*halves.shape[:2], whole - numbers), dtype=torch.uint8, generator=generator)
    parts = [halves.contiguous().view(torch.uint8), rest]
    return torch.cat(parts[::-1] if kind == "q6_k" else parts, dim=2).flatten(1)


def odd_rows(kind: Kind, outputs: int, inputs: int) -> Tensor:
    """Any numbers that are finite."""
    generator = torch.Generator().manual_seed(outputs * inputs)
    shape = (outputs, inputs // block_inputs(kind), block_bytes(kind)[1] // 2)
    scales = torch.randint(-(2**15), 2**15, shape, generator=generator).to(torch.int16).view(torch.float16)
    odd = torch.tensor(ODD_SCALES, dtype=torch.float16)
    odd = odd[torch.randint(len(odd), shape, generator=generator)]
    kept = scales.isfinite() & (torch.rand(shape, generator=generator) < 0.5)
    return rows_of(kind, torch.where(kept, scales, odd), generator)


def even_rows(kind: Kind, outputs: int, inputs: int, generator: torch.Generator) -> Tensor:
    """Numbers of blocks between -0.5 and 0.5, smaller where further scales multiply them."""
    shape = (outputs, inputs // block_inputs(kind), block_bytes(kind)[1] // 2)
    small = 1 / 32 if kind.endswith("_k") else 1.0
    return rows_of(kind, ((torch.rand(shape, generator=generator) - 0.5) * small).half(), generator)
