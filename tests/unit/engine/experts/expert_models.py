"""Tiny mixtures of experts with random weights, one for each thing that their families differ in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import (
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.unit.engine.tiny_models import SIZES

# Grouped products in 16 bits take multiples of 8.
_SIZES: dict[str, Any] = SIZES | {"hidden_size": 64}
_EXPERT_SIZES: dict[str, Any] = {"moe_intermediate_size": 40}  # where it is another than the model's
_HEADS: dict[str, Any] = {"head_dim": 24}
_GPU_HEADS: dict[str, Any] = {"head_dim": 128}


@contextmanager
def sized(**changes: int) -> Iterator[None]:
    """Models that are made meanwhile have these sizes."""
    before = [dict(sizes) for sizes in (_SIZES, _EXPERT_SIZES)]
    for sizes in (_SIZES, _EXPERT_SIZES):
        sizes.update({name: size for name, size in changes.items() if name in sizes})
    yield
    for sizes, own in zip((_SIZES, _EXPERT_SIZES), before, strict=True):
        sizes.update(own)


def _qwen3_moe(heads: dict[str, Any] = _HEADS, **switches: Any) -> PreTrainedModel:
    sizes: dict[str, Any] = _EXPERT_SIZES | {"num_experts": 9, "num_experts_per_tok": 3}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**_SIZES, **heads, **sizes, **switches))


def _qwen3_moe_with_dense_layers() -> PreTrainedModel:
    model: Any = _qwen3_moe(
        norm_topk_prob=False, mlp_only_layers=[1], use_sliding_window=True, sliding_window=20
    )
    return model  # type: ignore[no-any-return]


def _mixtral() -> PreTrainedModel:
    sizes = _SIZES | {"num_attention_heads": 4}
    return MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=4, num_experts_per_tok=2))


def _glm4_moe(heads: dict[str, Any] = _HEADS, **switches: Any) -> PreTrainedModel:
    sizes: dict[str, Any] = _EXPERT_SIZES | {"n_routed_experts": 8, "num_experts_per_tok": 3}
    shared: dict[str, Any] = {"n_shared_experts": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5}
    model = Glm4MoeForCausalLM(Glm4MoeConfig(**_SIZES, **heads, **sizes, **shared, **switches))
    generator = torch.Generator().manual_seed(5)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):  # made of zeros, which would choose nothing
            buffer.copy_(torch.rand(buffer.shape, generator=generator) * 0.3)
    return model


def _gpt_oss(heads: dict[str, Any] = _HEADS, limit: float = 1.5) -> PreTrainedModel:
    yarn = {"rope_type": "yarn", "rope_theta": 150_000.0, "factor": 8.0, "truncate": False}
    rope = yarn | {"beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 64}
    sizes: dict[str, Any] = {
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "sliding_window": 20,
        "swiglu_limit": limit,
    }
    switches: dict[str, Any] = {"rope_parameters": rope, "pad_token_id": 0}
    inner = {"intermediate_size": 96}
    return GptOssForCausalLM(GptOssConfig(**_SIZES | inner, **heads, **sizes, **switches))


EXPERT_FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3-moe, 3 of 9, normalized": lambda: _qwen3_moe(norm_topk_prob=True),
    "qwen3-moe, not normalized, a dense layer, window": _qwen3_moe_with_dense_layers,
    "mixtral": _mixtral,
    "glm4-moe, shared, a dense layer": lambda: _glm4_moe(use_qk_norm=True),
    "glm4-moe, groups, not normalized, biases": lambda: _glm4_moe(
        n_group=4, topk_group=2, norm_topk_prob=False, attention_bias=True
    ),
}
EXPERT_FAMILIES["gpt-oss, sinks, windows, biases"] = _gpt_oss
GPU_EXPERT_FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3-moe": lambda: _qwen3_moe(_GPU_HEADS, norm_topk_prob=True),
    "glm4-moe": lambda: _glm4_moe(_GPU_HEADS, use_qk_norm=True, attention_bias=True),
    # transformers before 5.18 knows no other limit
    "gpt-oss": lambda: _gpt_oss({"head_dim": 64}, 7.0),
}
