"""Which rotary position embedding each layer has, read from a `config.json`. Knows no torch.

Older files have `rope_theta` and `rope_scaling`, newer ones have both in `rope_parameters`, some of them by the kind of
layer. What a kind of scaling means is in `shared.engine.model.rope`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from shared.primitives.errors import ModelError

SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")


@dataclass(frozen=True)
class LinearScaling:
    """All frequencies divided by `factor` (`rope_type: linear`)."""

    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's stretching of the low frequencies (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_len: int  # tokens


@dataclass(frozen=True)
class YarnScaling:
    """YaRN: low frequencies divided by `factor`, a ramp between two numbers of rotations (Peng et al., 2023)."""

    factor: float
    beta_fast: float  # rotations over the original context above which a frequency is kept
    beta_slow: float  # rotations below which it is divided
    original_context_len: int  # tokens
    attention_factor: float  # of cosines and sines
    truncate: bool  # whether the ramp begins and ends at whole dimensions


@dataclass(frozen=True)
class LongRopeScaling:
    """LongRoPE: a divisor for each frequency, another set of them for long sequences (Ding et al., 2024).

    Which set holds is decided once, by the longest request of the engine: keys that were rotated by one set cannot be
    read by the other, so a request, or a prefix that several share, must not change sets as it grows.
    """

    short_factors: tuple[float, ...]  # [rotary_dim / 2]
    long_factors: tuple[float, ...]
    original_context_len: int  # tokens; longer contexts take the long ones
    attention_factor: float  # of cosines and sines


@dataclass(frozen=True)
class FixedFactors:
    """One of the two sets of `LongRopeScaling`, chosen."""

    factors: tuple[float, ...]  # [rotary_dim / 2]
    attention_factor: float


Scaling = LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling | FixedFactors


@dataclass(frozen=True)
class Rope:
    """The rotation of a layer's queries and keys: their first `rotary_dim` dimensions, halves against each other."""

    theta: float
    rotary_dim: int
    scaling: Scaling | None = None

    def at_context(self, context_len: int) -> Rope:
        """The rotation in an engine whose longest request has so many tokens."""
        if not isinstance(long := self.scaling, LongRopeScaling):
            return self
        factors = long.long_factors if context_len > long.original_context_len else long.short_factors
        return replace(self, scaling=FixedFactors(factors, long.attention_factor))


@dataclass(frozen=True)
class RopeDefaults:
    """What an architecture says where its file says nothing."""

    theta: float = 10_000.0
    local_theta: float | None = None  # of windowed layers, where they have their own
    partial: bool = False  # whether the model may rotate a part of each head
    yarn_is_longrope: bool = False  # Phi-3's first files say `su` or `yarn`
    every: int | None = None  # every so many-th layer does not rotate, as SmolLM3; None: all do


def read_ropes(
    config: Mapping[str, Any], kinds: list[str], head_dim: int, defaults: RopeDefaults
) -> tuple[Rope | None, ...]:
    """The rotation of each layer, of these kinds of attention; None: it does not rotate."""
    by_kind = {
        kind: _rope(config, _parameters(config, kind, defaults), head_dim, defaults) for kind in set(kinds)
    }
    rotating = _rotating(config, len(kinds), defaults.every)
    return tuple(by_kind[kind] if rotates else None for kind, rotates in zip(kinds, rotating, strict=True))


def context_len_of(config: Mapping[str, Any], ropes: tuple[Rope | None, ...]) -> int:
    """Tokens the model was made for: YaRN stretches the context by its factor, and files seldom say so.

    Ministral 3 multiplies queries by a number that grows with each original context: 1 in the first of them, and that
    is as far as the model is computed here.
    """
    yarns = [rope.scaling for rope in ropes if rope is not None and isinstance(rope.scaling, YarnScaling)]
    stretched = [int(yarn.original_context_len * yarn.factor) for yarn in yarns]
    most = max(int(config["max_position_embeddings"]), *stretched, 0)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not rope.get("llama_4_scaling_beta"):
        return most
    return min(most, int(rope.get("original_max_position_embeddings") or most))


def _parameters(config: Mapping[str, Any], kind: str, defaults: RopeDefaults) -> dict[str, Any]:
    """What the file says of this kind of layer, in the newer files' names."""
    new = dict(config.get("rope_parameters") or {})
    if "full_attention" in new or "sliding_attention" in new:
        return dict(new.get(kind) or {})
    if defaults.local_theta is not None and kind == "sliding_attention":
        return {"rope_theta": config.get("rope_local_base_freq") or defaults.local_theta}
    return dict(config.get("rope_scaling") or {}) | new


def _rope(config: Mapping[str, Any], found: Mapping[str, Any], head_dim: int, defaults: RopeDefaults) -> Rope:
    theta = float(found.get("rope_theta") or config.get("rope_theta") or defaults.theta)
    partial = found.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    share = 1.0 if partial is None else float(partial)
    if share != 1.0 and not defaults.partial:
        raise ModelError(f"unsupported partial_rotary_factor: {share}; supported is 1.0")
    rotary_dim = int(head_dim * share)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ModelError(
            f"{rotary_dim} of {head_dim} dimensions of a head cannot be rotated: expected an even number"
        )
    kind = found.get("rope_type") or found.get("type") or "default"
    if kind == "su" or (kind == "yarn" and defaults.yarn_is_longrope):
        kind = "longrope"
    return Rope(theta, rotary_dim, _scaling(str(kind), config, found, rotary_dim))


def _scaling(
    kind: str, config: Mapping[str, Any], found: Mapping[str, Any], rotary_dim: int
) -> Scaling | None:
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(float(found["factor"]))
    original = int(
        config.get("original_max_position_embeddings")
        or found.get("original_max_position_embeddings")
        or config["max_position_embeddings"]
    )
    if kind == "llama3":
        return Llama3Scaling(
            factor=float(found["factor"]),
            low_freq_factor=float(found["low_freq_factor"]),
            high_freq_factor=float(found["high_freq_factor"]),
            original_context_len=original,
        )
    if kind == "yarn":
        return _yarn(config, found, original)
    if kind == "longrope":
        return _longrope(config, found, original, rotary_dim)
    raise ModelError(f"unsupported rope type: {kind}; supported are {', '.join(SUPPORTED_ROPE_TYPES)}")


def _yarn(config: Mapping[str, Any], found: Mapping[str, Any], original: int) -> YarnScaling:
    factor = float(found.get("factor") or config["max_position_embeddings"] / original)
    attention = found.get("attention_factor")
    if attention is None:
        scale, scale_all = found.get("mscale"), found.get("mscale_all_dim")
        attention = (
            _growth(factor, scale) / _growth(factor, scale_all) if scale and scale_all else _growth(factor)
        )
        # vLLM's and SGLang's name, of a file that transformers warns of: DeepSeek-R1-0528-Qwen3-8B undoes the growth.
        attention *= float(found.get("attn_factor") or 1.0)
    return YarnScaling(
        factor=factor,
        beta_fast=float(found.get("beta_fast") or 32.0),
        beta_slow=float(found.get("beta_slow") or 1.0),
        original_context_len=original,
        attention_factor=float(attention),
        truncate=bool(found.get("truncate", True)),
    )


def _growth(factor: float, scale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _longrope(
    config: Mapping[str, Any], found: Mapping[str, Any], original: int, rotary_dim: int
) -> LongRopeScaling:
    short, long = (tuple(map(float, found[f"{name}_factor"])) for name in ("short", "long"))
    if len(short) != rotary_dim // 2 or len(long) != rotary_dim // 2:
        raise ModelError(
            f"longrope should have {rotary_dim // 2} short and long factors, has {len(short)} and {len(long)}"
        )
    factor = float(found.get("factor") or config["max_position_embeddings"] / original)
    attention = found.get("attention_factor")
    if attention is None:
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return LongRopeScaling(short, long, original, float(attention))


def _rotating(config: Mapping[str, Any], layers: int, every: int | None) -> list[bool]:
    """SmolLM3's `no_rope_layers` has a 1 for each layer that rotates."""
    if every is None:
        return [True] * layers
    if (listed := config.get("no_rope_layers")) is None:
        interval = int(config.get("no_rope_layer_interval") or every)
        return [bool((layer + 1) % interval) for layer in range(layers)]
    if len(listed) < layers:
        raise ModelError(f"no_rope_layers names {len(listed)} layers, the model has {layers}")
    return [bool(rotates) for rotates in listed[:layers]]
