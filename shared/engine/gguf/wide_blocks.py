"""ggml's blocks whose values have more than four bits, or whose scales have scales: Q5 and the K-quants.

A K-quant stores 256 inputs of an output together: one or two fp16 numbers for all of them, and small integers for each
32 (or 16) that multiply those. In a panel (see `packing`) sixteen outputs lie side by side, and so for every block:

    fp16 numbers        [halves][16 outputs]                    of the whole block
    then for each 32 inputs:
    small scales        [2][16 outputs]                         K-quants alone
    low bits            uint8 [16][16 outputs]                  byte j: input j low, input j + 16 high
    each further bit    uint16 [32 inputs], bit o of output o   little-endian

             scales of 32 inputs                weight
    q5_0     none                               scale * (q - 16)
    q5_1     none                               scale * q + minimum
    q4_k     6-bit scale s, 6-bit minimum m     (scale * s) * q - (minimum * m)
    q5_k     the same                           the same
    q6_k     8-bit scale of each 16 inputs      (scale * s) * (q - 32)

Each product is exact in float32, so one fused step rounds as ggml and the gguf package do. The small scales take whole
bytes, as 6 bits in 12 bytes do not lie side by side: q4_k grows from 4.5 to 4.625 bits a weight, q5_k likewise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_SUB_INPUTS = 32  # inputs that share small scales, or the order of their bits
_PANEL_OUTPUTS = 16

Opened = tuple[Tensor, Tensor, Tensor]  # see `WideFormat.open`


@dataclass(frozen=True)
class WideFormat:
    """What ggml stores for some inputs of one output, and how it is taken apart."""

    inputs: int
    stored_bytes: int  # of one block of one output, in a GGUF file
    halves: int  # fp16 numbers of a block
    scales: int  # bytes of small scales for each 32 inputs
    bits: int  # of a value
    open: Callable[[Tensor], Opened]
    """Blocks uint8 [n, stored_bytes] → halves uint8 [n, halves, 2], scales uint8 [n, subs, scales] and values uint8
    [n, subs, 32]."""

    @property
    def subs(self) -> int:
        """Groups of 32 inputs in a block."""
        return self.inputs // _SUB_INPUTS

    @property
    def sub_bytes(self) -> int:
        """Bytes of 32 inputs of one output."""
        return self.scales + _SUB_INPUTS // 2 + (self.bits - 4) * _SUB_INPUTS // 8

    @property
    def nbytes(self) -> int:
        """Bytes of one block of one output in a panel."""
        return 2 * self.halves + self.subs * self.sub_bytes


def pack_wide(wide: WideFormat, blocks: Tensor) -> Tensor:
    """blocks uint8 [panels * 16, blocks * stored_bytes], rows as ggml stores them → uint8 [packed bytes]."""
    by_panel = (len(blocks) // _PANEL_OUTPUTS, _PANEL_OUTPUTS, blocks.shape[1] // wide.stored_bytes)
    halves, scales, values = wide.open(blocks.reshape(-1, wide.stored_bytes))
    halves = halves.view(*by_panel, wide.halves, 2).permute(0, 2, 3, 1, 4).flatten(2)
    scales = scales.view(*by_panel, wide.subs, wide.scales).permute(0, 2, 3, 4, 1).flatten(3)
    values = values.view(*by_panel, wide.subs, _SUB_INPUTS).permute(
        0, 2, 3, 4, 1
    )  # [.., 32 inputs, 16 outputs]
    nibbles = (values[..., :16, :] & 15) | ((values[..., 16:, :] & 15) << 4)
    parts = [scales, nibbles.flatten(3), *(_plane(values, bit).flatten(3) for bit in range(4, wide.bits))]
    return torch.cat([halves, torch.cat(parts, dim=3).flatten(2)], dim=2).flatten()


def unpack_wide(wide: WideFormat, packed: Tensor, blocks: int) -> Tensor:
    """The inverse, dequantized: → float32 [panels, blocks * subs, 32, 16]."""
    grouped = packed.view(-1, blocks, _PANEL_OUTPUTS * wide.nbytes)
    halves, subs = torch.split(grouped, [32 * wide.halves, grouped.shape[2] - 32 * wide.halves], dim=2)
    halves = (
        halves.reshape(*halves.shape[:2], 1, -1).view(torch.float16).float()
    )  # [panels, blocks, 1, halves * 16]
    subs = subs.reshape(*subs.shape[:2], wide.subs, -1)
    sizes = [16 * wide.scales, 256, *[64] * (wide.bits - 4)]
    scales, nibbles, *planes = torch.split(subs, sizes, dim=3)
    nibbles = torch.unflatten(nibbles, 3, (16, 16))
    values = torch.cat([nibbles & 15, nibbles >> 4], dim=3)  # [panels, blocks, subs, 32, 16]
    for bit, plane in enumerate(planes, start=4):
        values = values | (_spread(plane) << bit)
    return _weights(wide, torch.unflatten(halves, 3, (-1, 16)), scales, values.float()).flatten(1, 2)


def _weights(wide: WideFormat, halves: Tensor, scales: Tensor, values: Tensor) -> Tensor:
    """halves [panels, blocks, 1, halves, 16], scales [.., subs, scales * 16], values [.., subs, 32, 16] → as values."""
    scale = halves[..., 0:1, :]
    found: Tensor
    if not wide.scales:
        found = scale * (values - 16.0) if wide.halves == 1 else scale * values + halves[..., 1:2, :]
        return found
    small = torch.unflatten(scales.view(torch.int8).float(), 3, (wide.scales, 16))
    if wide.halves == 1:
        found = scale * small.repeat_interleave(16, dim=3) * (values - 32.0)
    else:
        found = scale * small[..., 0:1, :] * values - halves[..., 1:2, :] * small[..., 1:2, :]
    return found


def _plane(values: Tensor, bit: int) -> Tensor:
    """One bit of values [..., 32, 16]: for each input two bytes, a bit for each output."""
    bits = torch.unflatten((values >> bit) & 1, -1, (2, 8))
    packed: Tensor = bits << torch.arange(8, dtype=torch.uint8)
    return packed.sum(-1).to(torch.uint8)


def _spread(plane: Tensor) -> Tensor:
    """The inverse: [..., 64] → 0 or 1 uint8 [..., 32, 16]."""
    bits: Tensor = torch.unflatten(plane, -1, (32, 2, 1)) >> torch.arange(8, dtype=torch.uint8)
    return (bits & 1).flatten(-2)


def _open_q5(halves: int) -> Callable[[Tensor], Opened]:
    def open_blocks(blocks: Tensor) -> Opened:
        numbers, high, low = torch.split(blocks, [2 * halves, 4, 16], dim=1)
        values = torch.cat([low & 15, low >> 4], dim=1) | (_bits(high) << 4)
        return numbers.reshape(-1, halves, 2), blocks.new_empty(len(blocks), 1, 0), values.unsqueeze(1)

    return open_blocks


def _open_q4_k(blocks: Tensor) -> Opened:
    numbers, scales, low = torch.split(blocks, [4, 12, 128], dim=1)
    return numbers.reshape(-1, 2, 2), _six_bit_scales(scales), _low_bits(low, 32)


def _open_q5_k(blocks: Tensor) -> Opened:
    numbers, scales, high, low = torch.split(blocks, [4, 12, 32, 128], dim=1)
    further: Tensor = (
        high.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8).view(-1, 1)
    ) & 1  # [n, subs, 32]
    return numbers.reshape(-1, 2, 2), _six_bit_scales(scales), _low_bits(low, 32) | (further << 4)


def _open_q6_k(blocks: Tensor) -> Opened:
    low, high, scales, number = torch.split(blocks, [128, 64, 16, 2], dim=1)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(-1, 1)
    further: Tensor = (high.reshape(-1, 2, 1, 32) >> shifts) & 3
    return (
        number.reshape(-1, 1, 2),
        scales.reshape(-1, 8, 2),
        _low_bits(low, 64) | (further.view(-1, 8, 32) << 4),
    )


def _low_bits(low: Tensor, together: int) -> Tensor:
    """Low halves of so many bytes come first, then their high halves: [n, 128] → [n, 8, 32]."""
    bytes_of = low.reshape(-1, 128 // together, together)
    return torch.cat([bytes_of & 15, bytes_of >> 4], dim=2).view(-1, 8, 32)


def _bits(packed: Tensor) -> Tensor:
    """[n, bytes] → 0 or 1, [n, 8 * bytes], lowest bit first."""
    bits: Tensor = packed.unsqueeze(2) >> torch.arange(8, dtype=torch.uint8)
    return (bits & 1).flatten(1)


def _six_bit_scales(stored: Tensor) -> Tensor:
    """[n, 12] → a scale and a minimum for each 32 inputs, [n, 8, 2]; `get_scale_min_k4` of ggml-quants.c."""
    scale, minimum, both = stored.view(-1, 3, 4).unbind(1)
    scales = torch.cat([scale & 63, (both & 15) | ((scale >> 2) & 48)], dim=1)
    minima = torch.cat([minimum & 63, (both >> 4) | ((minimum >> 2) & 48)], dim=1)
    return torch.stack([scales, minima], dim=2)


WIDE_FORMATS: dict[str, WideFormat] = {
    "q5_0": WideFormat(32, 22, halves=1, scales=0, bits=5, open=_open_q5(1)),
    "q5_1": WideFormat(32, 24, halves=2, scales=0, bits=5, open=_open_q5(2)),
    "q4_k": WideFormat(256, 144, halves=2, scales=2, bits=4, open=_open_q4_k),
    "q5_k": WideFormat(256, 176, halves=2, scales=2, bits=5, open=_open_q5_k),
    "q6_k": WideFormat(256, 210, halves=1, scales=2, bits=6, open=_open_q6_k),
}
