"""The file of a converted model that keeps its quantized weights as the CPU kernels read them, beside the float ones.

It is mapped into memory, so all workers of a machine share one copy. `packing` has what the bytes of a weight are.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from shared.engine.gguf.packing import BLOCK_INPUTS, Kind, PackedWeight, packed_bytes
from shared.engine.model.weights import samples_of
from shared.primitives.errors import ModelError

# Safetensors by format, but not by name: other programs load every *.safetensors file of a folder.
PACKED_FILE = "model.packed"
_ALIGNMENT_BYTES = 64  # a cache line; every block size is a multiple of 32, so all blocks stay aligned to 32
# As a packed file names them. Those with further bits have had a name of their own since these lie in bytes: what reads
# one layout must not take the other for it, and both have the same size.
_KINDS_BY_NAME: dict[str, Kind] = {
    "q8_0": "q8_0",
    "q4_0": "q4_0",
    "q4_1": "q4_1",
    "q4_k": "q4_k",
    "q5_0.2": "q5_0",
    "q5_1.2": "q5_1",
    "q5_k.2": "q5_k",
    "q6_k.2": "q6_k",
}
_NAMES = {kind: name for name, kind in _KINDS_BY_NAME.items()}


class _Entry(msgspec.Struct, frozen=True):
    """The file's metadata of one weight."""

    name: str = msgspec.field(name="kind")  # of its kind
    outputs: Annotated[int, msgspec.Meta(gt=0)]
    inputs: Annotated[int, msgspec.Meta(gt=0, multiple_of=BLOCK_INPUTS)]

    @property
    def kind(self) -> Kind:
        """How its weights are packed."""
        return _KINDS_BY_NAME[self.name]


def write_packed(folder: Path, weights: Mapping[str, PackedWeight]) -> None:
    """Write the packed file of a model folder that holds its float weights.

    Its data begin at a multiple of 64 bytes. Raises `OSError`, and `ModelError` where the float weights are missing.
    """
    entries = {
        name: {"kind": _NAMES[weight.kind], "outputs": weight.outputs, "inputs": weight.inputs}
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
        if unknown := sorted({entry.name for entry in self._entries.values()} - _KINDS_BY_NAME.keys()):
            raise ModelError(
                f"{path} has weights packed as {', '.join(unknown)}, expected {', '.join(_KINDS_BY_NAME)}: convert its "
                "GGUF file again with this version of Segue"
            )
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
