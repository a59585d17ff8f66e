"""Rotary position embeddings (Su et al., RoFormer), halves rotated as in Hugging Face's layout of weights.

The angles of every position are computed once, as transformers computes them, and looked up: a row's rotation cannot
depend on where the row lies in a batch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shared.engine.model_config import Llama3Scaling, ModelConfig


def cos_sin_table(config: ModelConfig, context_len: int) -> Tensor:
    """Of all positions below `context_len`: float32 [context_len, head_dim], cosines first, then sines."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    if config.rope_scaling is not None:
        frequencies = _stretch(frequencies, config.rope_scaling)
    angles = torch.outer(torch.arange(context_len, dtype=torch.float32), frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=1)


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
