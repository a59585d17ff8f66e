"""Weights in the order in which the CPU kernels read them; `packed_file` keeps quantized ones that way.

A matrix [outputs, inputs] is cut into panels of 16 outputs, the last filled up with zeros; panels lie one after
another, and a panel holds for all inputs in order:

    f32    per input:  16 float32, one for each output                                               64 bytes
    bf16   per input:  16 bfloat16                                                                   32 bytes
    f16    per input:  16 float16                                                                    32 bytes
    q8_0   per block of 32 inputs:  scale fp16[16], then int8 [32 inputs][16 outputs]                544 bytes
    q4_0   per block of 32 inputs:  scale fp16[16], then uint8 [16][16 outputs]                      288 bytes
    q4_1   per block of 32 inputs:  scale fp16[16], minimum fp16[16], then uint8 [16][16 outputs]    320 bytes

    q5_0, q5_1, q4_k, q5_k, q6_k:  see `WideFormat`

Byte j of a 4-bit block holds input j in its low half and input j + 16 in its high half. The weight is scale * q,
scale * (q - 8) and scale * q + minimum, each operation rounded: bit for bit what ggml and transformers compute. The
quantized kinds are ggml's own blocks, merely transposed, so packing loses nothing.

`blocks` takes the blocks out of a GGUF file, and the kernels compute with them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

PANEL_OUTPUTS = 16
BLOCK_INPUTS = 32

# ---- ggml's blocks whose values have more than four bits, or whose scales have scales: Q5 and the K-quants -----------
# A K-quant stores 256 inputs of an output together: one or two fp16 numbers for all of them, and small integers for
# each 32 (or 16) that multiply those. In a panel (see above) sixteen outputs lie side by side, and so for every
# block:
#
#     fp16 numbers        [halves][16 outputs]                    of the whole block
#     then for each 32 inputs:
#     small scales        [2][16 outputs]                         K-quants alone
#     low bits            uint8 [16][16 outputs]                  byte j: input j low, input j + 16 high
#     further bits        uint8 [4 a bit][16 outputs]             byte j: inputs j, j + 4, … with one further bit,
#                                                                 j, j + 8, j + 16, j + 24 with two; see `_places`
#
#              scales of 32 inputs                weight
#     q5_0     none                               scale * (q - 16)
#     q5_1     none                               scale * q + minimum
#     q4_k     6-bit scale s, 6-bit minimum m     (scale * s) * q - (minimum * m)
#     q5_k     the same                           the same
#     q6_k     8-bit scale of each 16 inputs      (scale * s) * (q - 32)
#
# Each product is exact in float32, so one fused step rounds as ggml and the gguf package do. The small scales take
# whole bytes, as 6 bits in 12 bytes do not lie side by side: q4_k grows from 4.5 to 4.625 bits a weight, q5_k likewise.

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
        return self.inputs // BLOCK_INPUTS

    @property
    def sub_bytes(self) -> int:
        """Bytes of 32 inputs of one output."""
        return self.scales + BLOCK_INPUTS // 2 + (self.bits - 4) * BLOCK_INPUTS // 8

    @property
    def nbytes(self) -> int:
        """Bytes of one block of one output in a panel."""
        return 2 * self.halves + self.subs * self.sub_bytes


def pack_wide(wide: WideFormat, blocks: Tensor) -> Tensor:
    """blocks uint8 [panels * 16, blocks * stored_bytes], rows as ggml stores them → uint8 [packed bytes]."""
    by_panel = (len(blocks) // PANEL_OUTPUTS, PANEL_OUTPUTS, blocks.shape[1] // wide.stored_bytes)
    halves, scales, values = wide.open(blocks.reshape(-1, wide.stored_bytes))
    halves = halves.view(*by_panel, wide.halves, 2).permute(0, 2, 3, 1, 4).flatten(2)
    scales = scales.view(*by_panel, wide.subs, wide.scales).permute(0, 2, 3, 4, 1).flatten(3)
    # [.., 32 inputs, 16 outputs]
    values = values.view(*by_panel, wide.subs, BLOCK_INPUTS).permute(0, 2, 3, 4, 1)
    nibbles = (values[..., :16, :] & 15) | ((values[..., 16:, :] & 15) << 4)
    parts = [scales, nibbles.flatten(3)]
    if wide.bits > 4:
        parts.append(_further(values >> 4, wide.bits - 4).flatten(3))
    return torch.cat([halves, torch.cat(parts, dim=3).flatten(2)], dim=2).flatten()


def unpack_wide(wide: WideFormat, packed: Tensor, blocks: int) -> Tensor:
    """The inverse, dequantized: → float32 [panels, blocks * subs, 32, 16]."""
    grouped = packed.view(-1, blocks, PANEL_OUTPUTS * wide.nbytes)
    halves, subs = torch.split(grouped, [32 * wide.halves, grouped.shape[2] - 32 * wide.halves], dim=2)
    # [panels, blocks, 1, halves * 16]
    halves = halves.reshape(*halves.shape[:2], 1, -1).view(torch.float16).float()
    subs = subs.reshape(*subs.shape[:2], wide.subs, -1)
    scales, nibbles, further = torch.split(subs, [16 * wide.scales, 256, 64 * (wide.bits - 4)], dim=3)
    nibbles = torch.unflatten(nibbles, 3, (16, 16))
    values = torch.cat([nibbles & 15, nibbles >> 4], dim=3)  # [panels, blocks, subs, 32, 16]
    if wide.bits > 4:
        values = values | (_spread(further, wide.bits - 4) << 4)
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


def _places(bits: int) -> Tensor:
    """Where the further bits of 32 inputs lie in their bytes, first those of the low nibbles: uint8 [8 / bits, 1, 1].

    The kernels bring them to bit 4 and up: from where they are in the first half, by shifts to the left in the second.
    """
    return torch.cat([torch.arange(4, 8, bits), torch.arange(0, 4, bits)]).to(torch.uint8).view(-1, 1, 1)


def _further(values: Tensor, bits: int) -> Tensor:
    """Numbers of so many bits [..., 32, 16] → uint8 [..., 4 * bits, 16]."""
    packed: Tensor = torch.unflatten(values, -2, (-1, 4 * bits)) << _places(bits)
    return packed.sum(-3).to(torch.uint8)


def _spread(further: Tensor, bits: int) -> Tensor:
    """The inverse: [..., 64 * bits] → uint8 [..., 32, 16]."""
    fields: Tensor = torch.unflatten(further, -1, (1, 4 * bits, 16)) >> _places(bits)
    return (fields & ((1 << bits) - 1)).flatten(-3, -2)


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


Kind = Literal["f32", "bf16", "f16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k"]


@dataclass(frozen=True)
class BlockFormat:
    """What ggml stores for 32 inputs of one output: some fp16 numbers, then the quantized values."""

    halves: int
    quant_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of one block of one output."""
        return 2 * self.halves + self.quant_bytes


BLOCK_FORMATS: dict[str, BlockFormat] = {
    "q8_0": BlockFormat(halves=1, quant_bytes=32),
    "q4_0": BlockFormat(halves=1, quant_bytes=16),
    "q4_1": BlockFormat(halves=2, quant_bytes=16),
}
FLOAT_KINDS: dict[Kind, torch.dtype] = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
_COMPARED_AT_ONCE = 1 << 20  # numbers: a head is gigabytes in float32, and no copy of it fits beside
QUANTIZED_KINDS = (*BLOCK_FORMATS, *WIDE_FORMATS)


def block_inputs(kind: str) -> int:
    """Inputs of an output that ggml stores together."""
    return WIDE_FORMATS[kind].inputs if kind in WIDE_FORMATS else BLOCK_INPUTS


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A packed matrix; `data` is flat: floats of `FLOAT_KINDS`, or uint8 (mapped from a file: never written to)."""

    kind: Kind
    outputs: int
    inputs: int
    data: Tensor


def packed_bytes(kind: Kind, outputs: int, inputs: int) -> int:
    """Bytes that a packed matrix takes; `ValueError` if `inputs` are no whole blocks."""
    panels = -(-outputs // PANEL_OUTPUTS)
    if kind in FLOAT_KINDS:
        return panels * PANEL_OUTPUTS * inputs * FLOAT_KINDS[kind].itemsize
    together = block_inputs(kind)
    if inputs % together:
        raise ValueError(f"{kind} needs a multiple of {together} inputs, not {inputs}")
    nbytes = WIDE_FORMATS[kind].nbytes if kind in WIDE_FORMATS else BLOCK_FORMATS[kind].nbytes
    return panels * PANEL_OUTPUTS * (inputs // together) * nbytes


def pack_float(weight: Tensor, kind: Kind = "f32") -> Tensor:
    """weight [outputs, inputs] of any float type → [panels * inputs * 16] of the kind's."""
    panels = _whole_panels(weight).view(-1, PANEL_OUTPUTS, weight.shape[1]).transpose(1, 2)
    return torch.empty(panels.shape, dtype=FLOAT_KINDS[kind]).copy_(panels).view(-1)


def narrowest_kind(weight: Tensor) -> Kind:
    """The floats of fewest bits that lose nothing of a float32 matrix: those that its file has, in most cases."""
    some = torch.split(weight, max(1, _COMPARED_AT_ONCE // weight.shape[1]))
    for kind in ("bf16", "f16"):
        if all(torch.equal(rows.to(FLOAT_KINDS[kind]).float(), rows) for rows in some):
            return kind
    return "f32"


def pack_blocks(kind: Kind, blocks: Tensor) -> Tensor:
    """blocks uint8 [outputs, bytes], rows as ggml stores them → uint8 [packed bytes]."""
    if kind in WIDE_FORMATS:
        return pack_wide(WIDE_FORMATS[kind], _whole_panels(blocks))
    block = BLOCK_FORMATS[kind]
    grouped = _whole_panels(blocks).view(-1, PANEL_OUTPUTS, blocks.shape[1] // block.nbytes, block.nbytes)
    # Both are [panels, 16, blocks, bytes].
    halves, quants = torch.split(grouped, [2 * block.halves, block.quant_bytes], dim=3)
    halves = halves.reshape(*halves.shape[:3], block.halves, 2).permute(0, 2, 3, 1, 4)
    quants = quants.permute(0, 2, 3, 1)
    return torch.cat([halves.flatten(2), quants.flatten(2)], dim=2).view(-1)


def unpack(kind: Kind, packed: Tensor, outputs: int, inputs: int) -> Tensor:
    """The inverse, dequantized: packed as in `PackedWeight.data` → float32 [outputs, inputs]."""
    assert packed.nbytes == packed_bytes(kind, outputs, inputs), f"{packed.nbytes} bytes"
    if kind in WIDE_FORMATS:
        values = unpack_wide(WIDE_FORMATS[kind], packed, inputs // block_inputs(kind))
    else:
        values = packed.float() if kind in FLOAT_KINDS else _dequantized(kind, packed, inputs // BLOCK_INPUTS)
    rows = values.view(-1, inputs, PANEL_OUTPUTS).transpose(1, 2).reshape(-1, inputs)
    return rows[:outputs]


def _dequantized(kind: Kind, packed: Tensor, blocks: int) -> Tensor:
    """→ float32 [panels, blocks, 32, 16]. Products and sums are rounded one by one, as ggml's reference does."""
    block = BLOCK_FORMATS[kind]
    grouped = packed.view(-1, blocks, block.nbytes, PANEL_OUTPUTS)
    halves, quants = torch.split(grouped, [2 * block.halves, block.quant_bytes], dim=2)
    halves = halves.flatten(2).clone().view(torch.float16).float()  # [panels, blocks, halves * 16]
    scale, minimum = halves[..., None, :PANEL_OUTPUTS], halves[..., None, PANEL_OUTPUTS:]
    if kind == "q8_0":
        return scale * quants.view(torch.int8).float()
    quants = torch.cat([quants & 0x0F, quants >> 4], dim=2).float()
    return scale * (quants - 8.0) if kind == "q4_0" else scale * quants + minimum


def _whole_panels(rows: Tensor) -> Tensor:
    missing = -len(rows) % PANEL_OUTPUTS
    padded = torch.nn.functional.pad(rows, (0, 0, 0, missing)) if missing else rows  # it copies
    return padded.contiguous()
