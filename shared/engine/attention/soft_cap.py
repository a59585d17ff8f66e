"""Gemma's soft cap: numbers far above the cap come near to it, small ones stay as they are."""

from __future__ import annotations

from torch import Tensor


def soft_cap(x: Tensor, cap: float | None) -> Tensor:
    """cap * tanh(x / cap), or x itself where there is no cap; float32 of any shape."""
    return x if cap is None else (x / cap).tanh() * cap
