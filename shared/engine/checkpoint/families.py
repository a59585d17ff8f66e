"""What an architecture fixes, whatever its `config.json` says: the switches of the one decoder, as data.

The decoder itself knows no architecture. A family is here when its layers are attention and a gated MLP, or experts,
each added to a residual stream; everything else is refused by name. Defaults are those of transformers' configuration
classes: files leave out what equals them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from shared.engine.checkpoint.experts_config import (
    ReadExperts,
    glm4_moe_experts,
    gpt_oss_experts,
    mixtral_experts,
    no_experts,
    qwen3_moe_experts,
)
from shared.engine.checkpoint.rope_config import RopeDefaults


class Activation(Enum):
    """Function of the gate in the MLP."""

    SILU = "silu"
    GELU = "gelu_tanh"  # approximated by tanh


class Norms(Enum):
    """Where a layer normalizes around attention and the MLP."""

    BEFORE = "before"  # what they read
    AFTER = "after"  # what they give
    AROUND = "around"  # both


class QKNorm(Enum):
    """How queries and keys are normalized."""

    NONE = "none"
    HEAD = "head"  # each head by itself
    WHOLE = "whole"  # all heads together


LayerKinds = Callable[[Mapping[str, Any], int], list[str]]  # of a config and its number of layers


def _full(_config: Mapping[str, Any], layers: int) -> list[str]:
    return ["full_attention"] * layers


def _windowed(_config: Mapping[str, Any], layers: int) -> list[str]:
    return ["sliding_attention"] * layers


def _windowed_above(config: Mapping[str, Any], layers: int) -> list[str]:
    first = int(config.get("max_window_layers", layers))
    return ["sliding_attention" if layer >= first else "full_attention" for layer in range(layers)]


def _all_but_each(interval: int) -> LayerKinds:
    def kinds(config: Mapping[str, Any], layers: int) -> list[str]:
        pattern = int(config.get("sliding_window_pattern") or interval)
        return ["sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in range(layers)]

    return kinds


_ROPE = RopeDefaults()


@dataclass(frozen=True)
class Family:
    """The switches of an architecture."""

    activation: Activation = Activation.SILU
    activation_names: tuple[str, ...] = ("silu",)  # as files say it
    norms: Norms = Norms.BEFORE
    norm_offset: float = 0.0  # added to the weights of norms
    qk_norm: QKNorm = QKNorm.NONE
    qk_norm_switch: bool = False  # only where the file's use_qk_norm says so
    experts: ReadExperts = no_experts
    quantizations: tuple[str, ...] = ()  # that its files may have
    # The class that its files name as theirs (auto_map), though transformers has it since.
    own_code: str | None = None
    sinks: bool = False  # attention has one a head
    qkv_bias: bool | None = None  # None: as the file's attention_bias says
    output_biased: bool = True  # attention's output has a bias where the file's attention_bias says so
    packed: bool = False  # q, k and v are stored as one weight, and so are gate and up
    tied_embeddings: bool = False  # unless the file says otherwise
    scaled_embeddings: bool = False  # by the root of the hidden size
    kinds: LayerKinds = _full
    window_switch: bool = False  # windows hold only where the file's use_sliding_window does
    attention_capped: bool = False  # scores have the file's soft cap
    logits_capped: bool = False
    multipliers: bool = False  # embeddings, residuals, scores and logits are scaled by the file's numbers
    rope: RopeDefaults = _ROPE
    defaults: tuple[tuple[str, Any], ...] = ()  # of fields that files leave out


_GEMMA = Family(
    activation=Activation.GELU,
    activation_names=("gelu", "gelu_pytorch_tanh"),
    norm_offset=1.0,
    tied_embeddings=True,
    scaled_embeddings=True,
    defaults=(("head_dim", 256), ("rms_norm_eps", 1e-6)),
)
_GEMMA_LATER = (("query_pre_attn_scalar", 256), ("sliding_window", 4096), *_GEMMA.defaults)

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(kinds=_windowed, defaults=(("sliding_window", 4096),)),
    "Qwen2ForCausalLM": Family(qkv_bias=True, kinds=_windowed_above, window_switch=True),
    "Qwen3ForCausalLM": Family(qk_norm=QKNorm.HEAD, kinds=_windowed_above, window_switch=True),
    "Qwen3MoeForCausalLM": Family(
        qk_norm=QKNorm.HEAD,
        kinds=_windowed,
        window_switch=True,
        experts=qwen3_moe_experts,
        defaults=(("rms_norm_eps", 1e-6),),
    ),
    "MixtralForCausalLM": Family(
        qkv_bias=False,
        output_biased=False,
        kinds=_windowed,
        experts=mixtral_experts,
        rope=RopeDefaults(theta=1_000_000.0),
        defaults=(("rms_norm_eps", 1e-5),),
    ),
    "Glm4MoeForCausalLM": Family(
        qk_norm=QKNorm.HEAD,
        qk_norm_switch=True,
        output_biased=False,
        experts=glm4_moe_experts,
        rope=RopeDefaults(partial=True),
        defaults=(("rms_norm_eps", 1e-5), ("partial_rotary_factor", 0.5)),
    ),
    "GptOssForCausalLM": Family(
        kinds=_all_but_each(2),
        sinks=True,
        experts=gpt_oss_experts,
        quantizations=("mxfp4",),
        rope=RopeDefaults(theta=150_000.0),
        defaults=(("attention_bias", True), ("rms_norm_eps", 1e-5), ("sliding_window", 128)),
    ),
    "GemmaForCausalLM": _GEMMA,
    "Gemma2ForCausalLM": replace(
        _GEMMA,
        norms=Norms.AROUND,
        kinds=_all_but_each(2),
        attention_capped=True,
        logits_capped=True,
        defaults=(("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0), *_GEMMA_LATER),
    ),
    "Gemma3ForCausalLM": replace(
        _GEMMA,
        norms=Norms.AROUND,
        qk_norm=QKNorm.HEAD,
        kinds=_all_but_each(6),
        logits_capped=True,
        rope=RopeDefaults(theta=1_000_000.0, local_theta=10_000.0),
        defaults=(("max_position_embeddings", 131_072), *_GEMMA_LATER),
    ),
    "Phi3ForCausalLM": Family(
        own_code="modeling_phi3.Phi3ForCausalLM",
        packed=True,
        qkv_bias=False,
        kinds=_windowed,
        rope=RopeDefaults(partial=True, yarn_is_longrope=True),
    ),
    "Olmo2ForCausalLM": Family(norms=Norms.AFTER, qk_norm=QKNorm.WHOLE),
    "GraniteForCausalLM": Family(multipliers=True, defaults=(("attention_multiplier", 1.0),)),
    "SmolLM3ForCausalLM": Family(
        tied_embeddings=True,
        window_switch=True,
        rope=RopeDefaults(theta=2_000_000.0, every=4),
        defaults=(("rms_norm_eps", 1e-6),),
    ),
}
