"""Rotary position embeddings (Su et al., RoFormer), halves rotated as in Hugging Face's layout of weights.

The angles of every position are computed once, as transformers computes them, and looked up: a row's rotation cannot
depend on where the row lies in a batch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shared.engine.checkpoint.rope_config import (
    FixedFactors,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    Rope,
    YarnScaling,
)
from shared.primitives.errors import InvariantError


def cos_sin_table(rope: Rope, context_len: int) -> Tensor:
    """Table of all positions below `context_len`: float32 [context_len, rotary_dim], cosines first, then sines."""
    radians, factor = frequencies(rope)
    angles = torch.outer(torch.arange(context_len, dtype=torch.float32), radians)
    return torch.cat((angles.cos(), angles.sin()), dim=1) * factor


def frequencies(rope: Rope) -> tuple[Tensor, float]:
    """Give radians a position, float32 [rotary_dim / 2], and the factor of cosines and sines."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.int64).float() / rope.rotary_dim
    periods = rope.theta**exponents
    match rope.scaling:
        case LinearScaling(factor):
            return 1.0 / periods / factor, 1.0
        case Llama3Scaling() as scaling:
            return _stretch(1.0 / periods, scaling), 1.0
        case YarnScaling() as scaling:
            return _ramped(periods, rope, scaling), scaling.attention_factor
        case FixedFactors(factors, attention_factor):
            return 1.0 / (torch.tensor(factors) * periods), attention_factor
        case LongRopeScaling():
            raise InvariantError("longrope without its context: `ModelConfig.at_context` chooses the factors")
    return 1.0 / periods, 1.0


def _ramped(periods: Tensor, rope: Rope, scaling: YarnScaling) -> Tensor:
    """YaRN: dimensions that rotate often are kept, those that rotate seldom divided by `factor`, a ramp between."""

    def dimension(rotations: float) -> float:
        """Which one rotates so often within the original context."""
        within = scaling.original_context_len / (rotations * 2 * math.pi)
        return rope.rotary_dim * math.log(within) / (2 * math.log(rope.theta))

    first, last = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.rotary_dim - 1)
    width = last - first or 0.001
    ramp = ((torch.arange(rope.rotary_dim // 2, dtype=torch.float32) - first) / width).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (scaling.factor * periods) * (1 - kept) + 1.0 / periods * kept


def _stretch(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Llama 3.1: long wavelengths divided by `factor`, short ones kept, a ramp between."""
    wavelengths = 2 * math.pi / frequencies
    longest_kept = scaling.original_context_len / scaling.high_freq_factor
    shortest_scaled = scaling.original_context_len / scaling.low_freq_factor
    ramp = (scaling.original_context_len / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    scaled = frequencies / scaling.factor
    blended = (1 - ramp) * scaled + ramp * frequencies
    stretched = torch.where(wavelengths > shortest_scaled, scaled, frequencies)
    between = (wavelengths <= shortest_scaled) & (wavelengths >= longest_kept)
    return torch.where(between, blended, stretched)
