"""Weights by the names and shapes that a decoder asks for, whatever its family calls them.

Two things differ between families. Phi-3 stores q, k and v as one weight, and gate and up as one: a part is read
of it here. And the names of norms say where a layer has them, not what they are: `post_attention_layernorm` is the norm
before the MLP in Llama, and the one behind attention in Gemma 2.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shared.engine.checkpoint.experts_config import ExpertsConfig
from shared.engine.checkpoint.families import Norms, QKNorm
from shared.engine.checkpoint.model_config import ModelConfig
from shared.engine.quantized.formats import WeightFormat
from shared.engine.quantized.linears import NarrowWeight, dequantized, joined, take
from shared.engine.quantized.weight_source import Part, WeightSource


class DecoderWeights:
    """The weights of a decoder."""

    def __init__(self, config: ModelConfig, source: WeightSource) -> None:
        self._config = config
        self.source = source
        self._parts = packed_parts(config) if config.packed else {}

    def matrix(
        self, name: str, outputs: int, inputs: int, dtype: torch.dtype, part: Part | None = None
    ) -> Tensor:
        """The weight of a linear of this name, [outputs, inputs], or a part of it; `ModelError` unless it is there."""
        stored, rows, own = self._linear(name, outputs, part)
        return self.source.take(f"{stored}.weight", (rows, inputs), dtype, own)

    def format_of(self, names: Sequence[str]) -> WeightFormat | None:
        """How linears that are computed as one are stored; None: not quantized."""
        quantization = self._config.quantization
        if quantization is None:
            return None
        return quantization.format_of(self._stored(names, [0] * len(names))[0][0])

    def experts_format(self, prefix: str, experts: ExpertsConfig) -> WeightFormat | None:
        """See `ModelConfig`."""
        return self._config.experts_format(prefix, experts)

    def narrow(
        self, pairs: Sequence[tuple[str, int]], inputs: int, form: WeightFormat, parts: Sequence[Part | None]
    ) -> NarrowWeight:
        """The weight of linears that are computed as one, as it is stored; `ModelError` unless all of it is there.

        `pairs`: the name of each and its outputs; `parts`: what is read of it.
        """
        names, sizes = zip(*pairs, strict=True)
        if any(parts):
            cuts = [self._linear(*pair, part) for pair, part in zip(pairs, parts, strict=True)]
        else:  # what is stored as one is read as one
            cuts = [(name, outputs, None) for name, outputs in self._stored(names, sizes)]
        return joined([take(self.source, form, name, outputs, inputs, cut) for name, outputs, cut in cuts])

    def dequantized(self, name: str, outputs: int, inputs: int, dtype: torch.dtype) -> Tensor:
        """The weight of a linear of this name, [outputs, inputs], whatever it is stored in."""
        source = dequantized(self.source, self._config.quantization)
        return source.take(f"{name}.weight", (outputs, inputs), dtype)

    def _linear(self, name: str, outputs: int, part: Part | None) -> tuple[str, int, Part | None]:
        """The linear that the file holds for this one, its outputs, and what of it this one is, or a part of it."""
        folder, _, last = name.rpartition(".")
        if last not in self._parts:
            return name, outputs, part
        packed, first, rows = self._parts[last]
        own = part or Part(0, outputs)
        assert own.dim == 0
        return f"{folder}.{packed}", rows, Part(first + own.start, first + own.stop)

    def _stored(self, names: Sequence[str], sizes: Sequence[int]) -> list[tuple[str, int]]:
        """The linears that the file holds for these, and their outputs."""
        folder, _, part = names[0].rpartition(".")
        if part not in self._parts:
            return list(zip(names, sizes, strict=True))
        return [(f"{folder}.{self._parts[part][0]}", sum(sizes))]

    def vector(self, name: str, size: int, dtype: torch.dtype, part: Part | None = None) -> Tensor:
        """A bias, [size], or a part of it."""
        return self.source.take(name, (size,), dtype, part)

    def norm(self, name: str, size: int, dtype: torch.dtype, part: Part | None = None) -> Tensor:
        """What a norm multiplies with, [size], or a part of it."""
        weight = self.source.take(f"{name}.weight", (size,), dtype, part)
        return (
            weight if not self._config.norm_offset else (weight.float() + self._config.norm_offset).to(dtype)
        )

    def layer_norms(self, number: int, dtype: torch.dtype) -> dict[str, Tensor | None]:
        """The norms around attention and the MLP, [hidden]; None where the family has none."""
        prefix, hidden = f"model.layers.{number}", self._config.hidden_size
        return {
            place: self.norm(f"{prefix}.{name}", hidden, dtype) if name else None
            for place, name in _NORM_NAMES[self._config.norms].items()
        }

    def qk_norms(
        self, number: int, dtype: torch.dtype, parts: Sequence[Part | None] = (None, None)
    ) -> dict[str, Tensor]:
        """Norms of queries and keys, if the family has any: [head_dim], or [heads · head_dim] over all heads.

        `parts`: what is read of each if it is over all heads.
        """
        config, prefix = self._config, f"model.layers.{number}.self_attn"
        heads = {"q_norm": config.heads, "k_norm": config.kv_heads}
        if config.qk_norm is QKNorm.NONE:
            return {}
        whole = config.qk_norm is QKNorm.WHOLE
        return {
            name: self.norm(f"{prefix}.{name}", count * config.head_dim, dtype, part)
            if whole
            else self.norm(f"{prefix}.{name}", config.head_dim, dtype)
            for (name, count), part in zip(heads.items(), parts, strict=True)
        }


def packed_parts(config: ModelConfig) -> dict[str, tuple[str, int, int]]:
    """Map each linear stored within another one to: that one, its own first row there, and the rows of all."""
    q_size, kv_size = config.heads * config.head_dim, config.kv_heads * config.head_dim
    qkv, inner = q_size + 2 * kv_size, config.intermediate_size
    return {
        "q_proj": ("qkv_proj", 0, qkv),
        "k_proj": ("qkv_proj", q_size, qkv),
        "v_proj": ("qkv_proj", q_size + kv_size, qkv),
        "gate_proj": ("gate_up_proj", 0, 2 * inner),
        "up_proj": ("gate_up_proj", inner, 2 * inner),
    }


_NORM_NAMES: dict[Norms, dict[str, str | None]] = {
    Norms.BEFORE: {
        "attention_norm": "input_layernorm",
        "attention_post_norm": None,
        "mlp_norm": "post_attention_layernorm",
        "mlp_post_norm": None,
    },
    Norms.AFTER: {
        "attention_norm": None,
        "attention_post_norm": "post_attention_layernorm",
        "mlp_norm": None,
        "mlp_post_norm": "post_feedforward_layernorm",
    },
    Norms.AROUND: {
        "attention_norm": "input_layernorm",
        "attention_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    },
}
