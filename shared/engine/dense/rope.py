"""Rotary position embeddings (Su et al., RoFormer), halves rotated as in Hugging Face's layout of weights.

The angles of every position are computed once, as transformers computes them, and looked up: a row's rotation cannot
depend on where the row lies in a batch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shared.engine.model_config import Llama3Scaling, ModelConfig


class RotaryEmbedding:
    """Cosines and sines of all positions below `context_len`."""

    def __init__(self, config: ModelConfig, context_len: int) -> None:
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
        frequencies = 1.0 / (config.rope_theta**exponents)
        if config.rope_scaling is not None:
            frequencies = _stretch(frequencies, config.rope_scaling)
        angles = torch.outer(torch.arange(context_len, dtype=torch.float32), frequencies)
        self.cos = angles.cos()  # [context_len, head_dim / 2]
        self.sin = angles.sin()

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines for positions [tokens], each [tokens, 1, head_dim / 2]."""
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [tokens, heads, head_dim] by the angles of its positions."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


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
