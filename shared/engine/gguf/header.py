"""Checks a GGUF file's header before a reader believes it: every length must fit in the file.

A header is a list of keys with values, then a list of tensors (https://github.com/ggml-org/ggml, docs/gguf.md). `gguf`
reads an array item by item and looks for no end of the file, so an array that claims 2^60 numbers keeps it busy for
ever. Only lengths and counts are looked at here, in the time that reading the header takes.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import BinaryIO

from shared.primitives.errors import ModelError

FIELDS_MAX = 1 << 16
TENSORS_MAX = 1 << 16
DIMENSIONS_MAX = 8
ITEMS_MAX = 1 << 22  # of all arrays together: 1.3 million in a file of 262,144 tokens with merges
NESTING_MAX = 4
_MAGIC = int.from_bytes(b"GGUF", "little")
_STRING, _ARRAY = 8, 9
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # by GGUF's type number


def check_header(path: Path) -> None:
    """Raise `ModelError` unless all that the header of `path` claims to hold is there."""
    with path.open("rb") as file:
        _Header(path, file).check()


class _Header:
    """One walk over a header; knows how many bytes and items are left."""

    def __init__(self, path: Path, file: BinaryIO):
        self._path = path
        self._file = file
        self._end = os.fstat(file.fileno()).st_size
        self._items = ITEMS_MAX

    def check(self) -> None:
        magic, version, tensors, fields = self._numbers("<IIQQ")
        if magic != _MAGIC or version not in (2, 3):
            raise ModelError(f"{self._path} is not a GGUF file of version 2 or 3, in little-endian order")
        self._bound("fields", fields, FIELDS_MAX)
        self._bound("tensors", tensors, TENSORS_MAX)
        for _ in range(fields):
            self._string()
            self._value(*self._numbers("<I"))
        for _ in range(tensors):
            self._string()
            (dimensions,) = self._numbers("<I")
            self._bound("dimensions of a tensor", dimensions, DIMENSIONS_MAX)
            self._skip(8 * dimensions + 4 + 8)  # sizes, type, offset

    def _value(self, kind: int, nesting: int = 0) -> None:
        if kind == _STRING:
            self._string()
        elif kind == _ARRAY:
            self._bound("arrays within arrays", nesting, NESTING_MAX)
            inner, length = self._numbers("<IQ")
            self._items -= length
            if self._items < 0:
                raise self._malformed(f"its arrays claim more than {ITEMS_MAX:,} items")
            if inner in _SCALAR_BYTES:
                self._skip(length * _SCALAR_BYTES[inner])
            else:
                for _ in range(length):
                    self._value(inner, nesting + 1)
        elif kind in _SCALAR_BYTES:
            self._skip(_SCALAR_BYTES[kind])
        else:
            raise self._malformed(f"it has a value of the unknown type {kind}")

    def _string(self) -> None:
        (length,) = self._numbers("<Q")
        self._skip(length)

    def _numbers(self, layout: str) -> tuple[int, ...]:
        data = self._file.read(struct.calcsize(layout))
        try:
            return struct.unpack(layout, data)
        except struct.error:
            raise self._malformed("the file ends within it") from None

    def _skip(self, length: int) -> None:
        here = self._file.tell()
        if length > self._end - here:
            raise self._malformed(f"at byte {here} it claims {length:,} bytes of {self._end - here:,} left")
        self._file.seek(length, os.SEEK_CUR)

    def _bound(self, what: str, count: int, most: int) -> None:
        if count > most:
            raise self._malformed(f"it claims {count:,} {what}, expected {most:,} at most")

    def _malformed(self, why: str) -> ModelError:
        return ModelError(f"the header of {self._path} is malformed: {why}")
