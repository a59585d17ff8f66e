"""Where weights come from, for whoever reads them: a model's layers, and formats of fewer than 16 bits."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class WeightSource(Protocol):
    """Where a model takes its weights from, one by one."""

    def __contains__(self, name: str) -> bool:
        """Whether there is a weight of this name."""

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The weight of this name, on the device that computes; `ModelError` unless it has this shape.

        Numbers of 8 bits, bytes (uint8) and words (int32) are never made of others: where they are asked for, the
        weight must be stored so.
        """
