"""Gumbel noise that is a function of (seed, position, token id): counter-based, so it has no state to lose.

argmax(logits / T + noise) samples from softmax(logits / T) (the Gumbel-max trick). Every token has noise of its own
and its chance depends on no running sum. So when logits differ in the last bit, the choice is nearly always the same.
The hash is splitmix64's finalizer (Steele, Lea and Flood, 2014); int64 arithmetic wraps, shifts are masked to be
logical.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


def signed(value: int) -> int:
    """The 64 bits of `value` as a signed integer."""
    return (value + 2**63) % 2**64 - 2**63


def row_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """One key for each row: seeds and positions int64 [rows] → int64 [rows]."""
    return _mix(_mix(seeds) + positions * signed(_GOLDEN))


def gumbel_noise(keys: Tensor, token_ids: Tensor) -> Tensor:
    """keys int64 [rows, 1] and token_ids int64 [rows or 1, tokens] → noise float32 [rows, tokens]."""
    bits = _mix(keys + token_ids * signed(_GOLDEN))
    # 23 bits, and half a step away from both 0 and 1: exact in float32, and no logarithm is infinite.
    uniform = ((bits >> 41) & 0x7FFFFF).float().mul_(2.0**-23).add_(2.0**-24)
    return uniform.log_().neg_().log_().neg_()


def _mix(x: Tensor) -> Tensor:
    x = (x ^ ((x >> 30) & (2**34 - 1))) * signed(_FIRST)
    x = (x ^ ((x >> 27) & (2**37 - 1))) * signed(_SECOND)
    return torch.bitwise_xor(x, (x >> 31) & (2**33 - 1))
