"""Tiny models with random weights, one for each thing that families of dense decoders differ in.

Sizes are awkward on purpose: head dimensions and vocabularies that no vector width divides, an inner size above the
1,024 inputs where oneDNN computes a single row another way. `GPU_FAMILIES` have heads that kernels of GPUs take.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from shared.engine.gguf.packed_file import write_packed
from shared.engine.gguf.packing import PackedWeight, pack_blocks

VOCAB_SIZE = 257
CONTEXT_LEN = 512
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 72,
    "intermediate_size": 136,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT_LEN,
    "initializer_range": 0.25,  # wide enough that greedy decoding does not collapse into one token
    "eos_token_id": 3,
}
_LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def _llama() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SIZES, head_dim=24, tie_word_embeddings=True))


def _llama_with_biases_and_scaled_rope() -> PreTrainedModel:
    switches: dict[str, Any] = {"attention_bias": True, "mlp_bias": True, "rope_parameters": _LLAMA3}
    return LlamaForCausalLM(LlamaConfig(**SIZES | {"intermediate_size": 1100}, **switches))


def _mistral() -> PreTrainedModel:
    return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=None))


def _mistral_with_window() -> PreTrainedModel:
    return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=150))


def _mistral_with_wide_heads() -> PreTrainedModel:
    return MistralForCausalLM(MistralConfig(**SIZES, head_dim=80, sliding_window=None))


def _llama_with_one_kv_head() -> PreTrainedModel:
    sizes = SIZES | {"hidden_size": 84, "num_attention_heads": 14, "num_key_value_heads": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, head_dim=24))


def _qwen2() -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**SIZES | {"num_key_value_heads": 6}))


def _qwen2_with_window_in_upper_layers() -> PreTrainedModel:
    switches: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
    return Qwen2ForCausalLM(Qwen2Config(**SIZES, **switches))


def _qwen3() -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=40))


_THETA = 10_000.0
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": _THETA,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 8,
}
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": _THETA,
    "short_factor": [1.0 + 0.05 * number for number in range(8)],
    "long_factor": [1.5 + 0.7 * number for number in range(8)],
    "original_max_position_embeddings": 64,
}


def _llama_with_linear_rope() -> PreTrainedModel:
    linear = {"rope_type": "linear", "rope_theta": _THETA, "factor": 3.0}
    return LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=linear))


def _qwen3_with_yarn() -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=40, rope_parameters=_YARN))


def _gemma() -> PreTrainedModel:
    return GemmaForCausalLM(GemmaConfig(**SIZES, head_dim=24))


def _gemma2() -> PreTrainedModel:
    caps: dict[str, Any] = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 8.0}
    windows: dict[str, Any] = {"sliding_window": 20, "query_pre_attn_scalar": 50}
    return Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=24, **caps, **windows, tie_word_embeddings=False))


def _gemma3() -> PreTrainedModel:
    ropes: dict[str, Any] = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1_000.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 100_000.0, "factor": 2.0},
    }
    switches: dict[str, Any] = {"sliding_window": 20, "query_pre_attn_scalar": 30, "rope_parameters": ropes}
    switches |= {"layer_types": ["sliding_attention", "full_attention"], "tie_word_embeddings": False}
    return Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, head_dim=24, **switches))


def _phi3() -> PreTrainedModel:
    partial = {"rope_type": "default", "rope_theta": _THETA, "partial_rotary_factor": 0.5}
    sizes = SIZES | {"hidden_size": 96, "pad_token_id": 0}
    return Phi3ForCausalLM(Phi3Config(**sizes, sliding_window=150, rope_parameters=partial))


def phi3_with_longrope() -> PreTrainedModel:
    """As transformers has it: short factors until a sequence exceeds 64 tokens, long ones from there."""
    sizes = SIZES | {"hidden_size": 96, "pad_token_id": 0}
    return Phi3ForCausalLM(
        Phi3Config(**sizes, original_max_position_embeddings=64, rope_parameters=dict(LONGROPE))
    )


def _phi3_with_long_factors() -> PreTrainedModel:
    """As an engine has it whose context is longer than 64 tokens: long factors for all."""
    model: Any = phi3_with_longrope()
    model.config.rope_parameters["short_factor"] = LONGROPE["long_factor"]
    rotary = type(model.model.rotary_emb)(model.config)
    model.config.rope_parameters["short_factor"] = LONGROPE["short_factor"]
    model.model.rotary_emb = rotary
    found: PreTrainedModel = model
    return found


def _olmo2() -> PreTrainedModel:
    return Olmo2ForCausalLM(Olmo2Config(**SIZES))


def _granite() -> PreTrainedModel:
    switches: dict[str, Any] = {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.4,
        "logits_scaling": 2.5,
    }
    return GraniteForCausalLM(GraniteConfig(**SIZES, **switches))


def _smollm3() -> PreTrainedModel:
    sizes = SIZES | {"num_hidden_layers": 4, "pad_token_id": 0}
    return SmolLM3ForCausalLM(SmolLM3Config(**sizes, no_rope_layer_interval=2))


def _mistral_of_whole_blocks() -> PreTrainedModel:
    return MistralForCausalLM(
        MistralConfig(**SIZES | {"hidden_size": 96, "intermediate_size": 160, "head_dim": 32})
    )


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama, tied, head_dim 24": _llama,
    "llama, biases, llama3 rope, inner size 1100": _llama_with_biases_and_scaled_rope,
    "llama, 14 query heads on one kv head": _llama_with_one_kv_head,
    "mistral": _mistral,
    "mistral, head_dim 80": _mistral_with_wide_heads,
    "mistral, sliding window": _mistral_with_window,
    "qwen2, one query head per kv head": _qwen2,
    "qwen2, window in upper layers": _qwen2_with_window_in_upper_layers,
    "qwen3, qk-norm, head_dim 40": _qwen3,
    "llama, linear rope": _llama_with_linear_rope,
    "qwen3, yarn": _qwen3_with_yarn,
    "gemma": _gemma,
    "gemma2, caps and windows": _gemma2,
    "gemma3, two ropes": _gemma3,
    "phi3, partial rotation, window": _phi3,
    "phi3, longrope": _phi3_with_long_factors,
    "olmo2": _olmo2,
    "granite": _granite,
    "smollm3": _smollm3,
}


def _for_gpus(head_dim: int, kv_heads: int, group: int) -> dict[str, Any]:
    sizes = {"hidden_size": 48 * kv_heads, "intermediate_size": 256, "head_dim": head_dim}
    return SIZES | sizes | {"num_attention_heads": kv_heads * group, "num_key_value_heads": kv_heads}


def _llama_for_gpus(head_dim: int, kv_heads: int, group: int, **switches: Any) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**_for_gpus(head_dim, kv_heads, group), **switches))


def _mistral_for_gpus(head_dim: int, kv_heads: int, group: int) -> PreTrainedModel:
    sizes = _for_gpus(head_dim, kv_heads, group)
    return MistralForCausalLM(MistralConfig(**sizes, sliding_window=50))


def _qwen2_for_gpus(head_dim: int, kv_heads: int, group: int, **switches: Any) -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**_for_gpus(head_dim, kv_heads, group), **switches))


def _qwen3_for_gpus(head_dim: int, kv_heads: int, group: int) -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**_for_gpus(head_dim, kv_heads, group)))


GPU_FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama, tied, 64 · 3 of 3, as SmolLM2": lambda: _llama_for_gpus(64, 3, 3, tie_word_embeddings=True),
    "llama, llama3 rope, 128 · 4 of 2": lambda: _llama_for_gpus(128, 2, 4, rope_parameters=_LLAMA3),
    "llama, 64 · 1 of 4": lambda: _llama_for_gpus(64, 4, 1),
    "mistral, sliding window, 128 · 8 of 1": lambda: _mistral_for_gpus(128, 1, 8),
    "qwen2, 128 · 7 of 1": lambda: _qwen2_for_gpus(128, 1, 7),
    "qwen2, window in upper layers, 64 · 6 of 2": lambda: _qwen2_for_gpus(
        64, 2, 6, use_sliding_window=True, sliding_window=20, max_window_layers=1
    ),
    "qwen3, 128 · 2 of 2": lambda: _qwen3_for_gpus(128, 2, 2),
    "qwen3, 128 · 5 of 2": lambda: _qwen3_for_gpus(128, 2, 5),
}


def tiny_model(family: str, folder: Path, *, shard_bytes: int = 10**9) -> PreTrainedModel:
    """Make a model of this family with weights from a fixed seed, and save it to `folder`."""
    return save_model((FAMILIES | GPU_FAMILIES)[family], folder, shard_bytes)


def tiny_model_of_blocks(folder: Path) -> None:
    """A model whose matrices are of 4-bit blocks, with the packed blocks beside their float weights, as converted."""
    save_model(_mistral_of_whole_blocks, folder)
    weights, packed = load_file(folder / "model.safetensors"), {}
    for name, weight in weights.items():
        if weight.dim() == 2:
            blocks = quantize(weight.numpy(), GGMLQuantizationType.Q4_1)
            weights[name] = torch.from_numpy(dequantize(blocks, GGMLQuantizationType.Q4_1))
            outputs, inputs = weight.shape
            packed[name] = PackedWeight(
                "q4_1", outputs, inputs, pack_blocks("q4_1", torch.from_numpy(blocks))
            )
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    write_packed(folder, packed)


def save_model(
    make: Callable[[], PreTrainedModel], folder: Path, shard_bytes: int = 10**9
) -> PreTrainedModel:
    """Give the model weights from a fixed seed, and save it to `folder`."""
    torch.manual_seed(17)
    model = make()
    model.train(False)
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:
            # As made they are ones and zeros, which hides mistakes.
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(folder, max_shard_size=shard_bytes)
    return model
