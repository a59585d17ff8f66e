"""Where weights come from, for whoever reads them: a model's layers, and formats of fewer than 16 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Part:
    """Rows `start` to `stop` of a weight; its columns, if `dim` is 1."""

    start: int
    stop: int
    dim: int = 0

    def index_in(self, shape: tuple[int, ...]) -> tuple[slice, ...]:
        """What a tensor of this shape is indexed with."""
        assert 0 <= self.start < self.stop <= shape[self.dim], f"{self} of {shape}"
        return (*(slice(None),) * self.dim, slice(self.start, self.stop))

    def along(self, dim: int, each: int = 1) -> Part:
        """The part of a tensor that holds so many of these in one, along `dim`."""
        assert self.start % each == 0, f"{self} does not begin with a whole {each}"
        return Part(self.start // each, -(-self.stop // each), dim)


class WeightSource(Protocol):
    """Where a model takes its weights from, one by one."""

    def __contains__(self, name: str) -> bool:
        """Whether there is a weight of this name."""

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, part: Part | None = None) -> Tensor:
        """The weight of this name, on the device that computes; `ModelError` unless it has this shape.

        Numbers of 8 bits, bytes (uint8) and words (int32) are never made of others: where they are asked for, the
        weight must be stored so. `part`: rows or columns of this shape. Of a tensor in a file nothing else is read.
        """
