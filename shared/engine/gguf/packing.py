"""Weights in the order in which the CPU kernels read them, and the file that keeps quantized ones that way.

A matrix [outputs, inputs] is cut into panels of 16 outputs, the last filled up with zeros; panels lie one after
another, and a panel holds for all inputs in order:

    f32    per input:  16 float32, one for each output                                               64 bytes
    q8_0   per block of 32 inputs:  scale fp16[16], then int8 [32 inputs][16 outputs]                544 bytes
    q4_0   per block of 32 inputs:  scale fp16[16], then uint8 [16][16 outputs]                      288 bytes
    q4_1   per block of 32 inputs:  scale fp16[16], minimum fp16[16], then uint8 [16][16 outputs]    320 bytes

    q5_0, q5_1, q4_k, q5_k, q6_k:  see `wide_blocks`

Byte j of a 4-bit block holds input j in its low half and input j + 16 in its high half. The weight is scale * q,
scale * (q - 8) and scale * q + minimum, each operation rounded: bit for bit what ggml and transformers compute. The
quantized kinds are ggml's own blocks, merely transposed, so packing loses nothing.

`blocks` takes the blocks out of a GGUF file, and the kernels compute with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from shared.engine.gguf.wide_blocks import WIDE_FORMATS, pack_wide, unpack_wide
from shared.engine.model.weights import samples_of
from shared.primitives.errors import ModelError

PANEL_OUTPUTS = 16
BLOCK_INPUTS = 32
# Safetensors by format, but not by name: other programs load every *.safetensors file of a folder.
PACKED_FILE = "model.packed"
_ALIGNMENT_BYTES = 64  # a cache line; every block size is a multiple of 32, so all blocks stay aligned to 32

Kind = Literal["f32", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k"]


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
QUANTIZED_KINDS = (*BLOCK_FORMATS, *WIDE_FORMATS)


def block_inputs(kind: str) -> int:
    """Inputs of an output that ggml stores together."""
    return WIDE_FORMATS[kind].inputs if kind in WIDE_FORMATS else BLOCK_INPUTS


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A packed matrix; `data` is flat: float32 for f32, uint8 (mapped from a file: never written to) else."""

    kind: Kind
    outputs: int
    inputs: int
    data: Tensor


def packed_bytes(kind: Kind, outputs: int, inputs: int) -> int:
    """Bytes that a packed matrix takes; `ValueError` if `inputs` are no whole blocks."""
    panels = -(-outputs // PANEL_OUTPUTS)
    if kind == "f32":
        return panels * PANEL_OUTPUTS * inputs * 4
    together = block_inputs(kind)
    if inputs % together:
        raise ValueError(f"{kind} needs a multiple of {together} inputs, not {inputs}")
    nbytes = WIDE_FORMATS[kind].nbytes if kind in WIDE_FORMATS else BLOCK_FORMATS[kind].nbytes
    return panels * PANEL_OUTPUTS * (inputs // together) * nbytes


def pack_float(weight: Tensor) -> Tensor:
    """weight [outputs, inputs] of any float type → float32 [panels * inputs * 16]."""
    panels = _whole_panels(weight).float().view(-1, PANEL_OUTPUTS, weight.shape[1])
    return panels.transpose(1, 2).reshape(-1)


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
        values = packed if kind == "f32" else _dequantized(kind, packed, inputs // BLOCK_INPUTS)
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
    return torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % PANEL_OUTPUTS)).contiguous()


class _Entry(msgspec.Struct, frozen=True):
    """The file's metadata of one weight."""

    kind: Literal["q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k"]
    outputs: Annotated[int, msgspec.Meta(gt=0)]
    inputs: Annotated[int, msgspec.Meta(gt=0, multiple_of=BLOCK_INPUTS)]


def write_packed(folder: Path, weights: Mapping[str, PackedWeight]) -> None:
    """Write the packed file of a model folder that holds its float weights.

    Its data begin at a multiple of 64 bytes. Raises `OSError`, and `ModelError` where the float weights are missing.
    """
    entries = {
        name: {"kind": weight.kind, "outputs": weight.outputs, "inputs": weight.inputs}
        for name, weight in weights.items()
    }
    metadata = {"packed": msgspec.json.encode(entries).decode(), "beside": samples_of(folder).hex()}
    content = save({name: weight.data for name, weight in weights.items()}, metadata)
    data_start = 8 + int.from_bytes(content[:8], "little")
    padding = -data_start % _ALIGNMENT_BYTES  # the format lets the header end in spaces
    with (folder / PACKED_FILE).open("wb") as file:
        file.write((data_start - 8 + padding).to_bytes(8, "little"))
        file.write(content[8:data_start] + b" " * padding)
        file.write(memoryview(content)[data_start:])


class PackedFile:
    """The quantized weights of a model folder by name, mapped into memory: all processes share one copy.

    A taken weight keeps the mapping alive, even after the file was replaced.
    """

    def __init__(self, path: Path) -> None:
        """Map the file; `ModelError` if it is truncated or malformed."""
        self._path = path
        try:
            opened: Any = safe_open(path, framework="pt")
            metadata = opened.metadata() or {}
            self._entries = msgspec.json.decode(metadata.get("packed", ""), type=dict[str, _Entry])
        except (SafetensorError, OSError, msgspec.DecodeError) as error:
            raise ModelError(f"{path} is not a complete file of packed weights: {error}") from None
        if self._entries.keys() != set(opened.keys()):
            raise ModelError(f"{path} is malformed: its metadata name other weights than it holds")
        self._opened = opened
        self.beside = str(metadata.get("beside", ""))  # samples of the float weights it was made with

    @classmethod
    def open(cls, folder: Path) -> Self | None:
        """The packed file of a model folder, or None where there is none.

        `ModelError` as above, and where the float weights beside it are not those it was made with.
        """
        path = folder / PACKED_FILE
        if not path.exists():
            return None
        packed = cls(path)
        if packed.beside != samples_of(folder).hex():
            raise ModelError(
                f"{path} belongs to other weights than those beside it: remove it, or convert again"
            )
        return packed

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    @property
    def nbytes(self) -> int:
        """Size of the packed weights in bytes."""
        return sum(packed_bytes(entry.kind, entry.outputs, entry.inputs) for entry in self._entries.values())

    @property
    def matrices(self) -> int:
        """How many weights it holds."""
        return len(self._entries)

    @property
    def parameters(self) -> int:
        """Number of weights in all of them."""
        return sum(entry.outputs * entry.inputs for entry in self._entries.values())

    @property
    def kinds(self) -> str:
        """The kinds of blocks it holds, for a person to read."""
        return "+".join(sorted({entry.kind for entry in self._entries.values()}))

    def take(self, name: str) -> PackedWeight:
        """A view of the mapped file; `ModelError` if it is not there or its size is not that of its shape."""
        if (entry := self._entries.get(name)) is None:
            raise ModelError(f"{self._path} holds no packed weight named {name}")
        data: Tensor = self._opened.get_tensor(name)
        try:
            expected = packed_bytes(entry.kind, entry.outputs, entry.inputs)
        except ValueError as error:
            raise ModelError(f"{self._path}: {name}: {error}") from None
        if data.dtype != torch.uint8 or data.shape != (expected,):
            raise ModelError(
                f"{self._path}: {name} should be {expected} bytes ({entry.kind}, {entry.outputs} x {entry.inputs}), "
                f"is {data.dtype} {list(data.shape)}"
            )
        return PackedWeight(entry.kind, entry.outputs, entry.inputs, data)
