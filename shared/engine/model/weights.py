"""Weights of a Hugging Face folder: safetensors, whole or in shards, checked by name and shape.

Only safetensors are read: a `.bin` or `.pt` file is a pickle, which runs code. Every tensor the model asks for must be
there with the expected shape. Other tensors are ignored: newer exports add some.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from shared.engine.checkpoint.text_half import stored_names
from shared.engine.checkpoint.weight_files import open_weights, weight_files
from shared.engine.quantized.weight_source import Part
from shared.primitives.errors import ModelError

_SAMPLE_BYTES = 4096
_SAMPLE_EVERY_BYTES = 65536
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# and as safetensors files name them
_QUANTIZED = {torch.float8_e4m3fn: "F8_E4M3", torch.uint8: "U8", torch.int32: "I32"}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json")

OnProgress = Callable[[str, float], None]  # what is being done, and the share done: 0 … 1


class Weights:
    """The tensors of a model folder by name; `take` reads one onto the device. Used as a context manager."""

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        """Open every file; `ModelError` if one is missing, truncated or not safetensors."""
        self._folder = folder
        self._opened: dict[Path, Any] = {}
        self._file_of: dict[str, Path] = {}
        for path in weight_files(folder):
            opened = open_weights(path, framework="pt", device=device)
            self._opened[path] = opened
            names = opened.keys()
            self._file_of.update(dict.fromkeys(names, path))

        self._stored_name = stored_names(self._file_of)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.clear()

    def __contains__(self, name: str) -> bool:
        return self._stored_name(name) in self._file_of

    def stored_dtype(self, name: str) -> torch.dtype:
        """The type of a tensor in its file; `ModelError` unless it exists and is made of unquantized floats."""
        return self._find(name).floats()

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, part: Part | None = None) -> Tensor:
        """Read a tensor, or a part of one and not a byte more; `ModelError` unless it exists with this shape."""
        stored = self._find(name)
        found = tuple(stored.data.get_shape())
        one_number = shape == () and math.prod(found) == 1  # some write it as a list of one
        if found != shape and not one_number:
            raise ModelError(f"{stored} should have shape {list(shape)}, has {list(found)}")
        if dtype in _QUANTIZED:
            stored.require(_QUANTIZED[dtype])
        else:
            stored.floats()
        if part is not None:
            cut: Tensor = stored.data[part.index_in(shape)]
            return cut.to(dtype)
        tensor: Tensor = self._opened[stored.path].get_tensor(stored.name)
        return tensor.to(dtype).reshape(shape)

    def _find(self, asked: str) -> _Stored:
        name = self._stored_name(asked)
        if name not in self._file_of:
            raise ModelError(
                f"{self._folder} holds no weight named {name}, which the model is made of by its config.json: "
                "fetch the folder again"
            )
        path = self._file_of[name]
        return _Stored(path, name, self._opened[path].get_slice(name))


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor in its file."""

    path: Path
    name: str
    data: Any  # of the safetensors library: its shape and type, before it is read

    def __str__(self) -> str:
        return f"{self.path}: {self.name}"

    def floats(self) -> torch.dtype:
        """The type of its numbers; `ModelError` unless they are unquantized floats."""
        kind = str(self.data.get_dtype())
        if kind not in _FLOATS:
            raise ModelError(f"{self} is {kind}; supported are unquantized floating-point weights")
        return _FLOATS[kind]

    def require(self, kind: str) -> None:
        """Raise `ModelError` unless its type is this one."""
        if (found := str(self.data.get_dtype())) != kind:
            raise ModelError(
                f"{self} is {found}; expected {kind}, as quantization_config of config.json says"
            )


def model_fingerprint(folder: Path, shape: str, dtype: torch.dtype) -> str:
    """Hash of weights, shapes, dtype and tokenizer: a running request may be recomputed only where it is equal.

    `shape` is the canonical text of the model's config. Workers of two versions serve side by side while they are
    rolled, so what is hashed changes only where what is computed does.

    Of each weights file the header (names, shapes, dtypes), the size and 4 KiB in every 64 KiB are hashed: two models
    differ nearly everywhere, and to read all of a large one would take as long as loading it. A change of a few bytes
    between samples goes unnoticed: the hash distinguishes versions, it does not authenticate.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update(f"({shape}, {dtype!r})".encode())
    digest.update(samples_of(folder))
    for name in _TOKENIZER_FILES:
        if (folder / name).exists():
            digest.update(name.encode() + (folder / name).read_bytes())
    return digest.hexdigest()


def stored_dtype(folder: Path) -> torch.dtype:
    """The type that a model was published in: that of its embedding. `ModelError` as for `Weights`."""
    with Weights(folder) as weights:
        return weights.stored_dtype("model.embed_tokens.weight")


def samples_of(folder: Path) -> bytes:
    """Hash of samples of all weights files: distinguishes versions of a model."""
    digest = hashlib.blake2b(digest_size=16)
    for path in weight_files(folder):
        _hash_samples(path, digest)
    return digest.digest()


def _hash_samples(path: Path, digest: hashlib.blake2b) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        digest.update(json.dumps([path.name, size, header_bytes]).encode())
        digest.update(file.read(min(header_bytes, size)))
        for start in range(8 + header_bytes, size, _SAMPLE_EVERY_BYTES):
            file.seek(start)
            digest.update(file.read(_SAMPLE_BYTES))
