"""`config.json` of models that many people run, as published on the Hugging Face Hub, and how many weights they have.

Keys that no reader looks at are left out, but not those that could mislead one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shared.engine.quantized.weight_source import Part

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 40960,
    "model_type": "qwen3",
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1_000_000,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
_QWEN3_MOE = _QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "tie_word_embeddings": False,
}
_GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
_MISTRAL: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}


@dataclass(frozen=True)
class Published:
    """A model as its authors describe it."""

    config: dict[str, Any]
    parameters: int  # all weights, a head that shares the embedding not counted again
    group: int  # query heads of a key-value head
    computed: int | None = None  # weights that a token meets; None: all
    window: int | None = None  # tokens, of windowed layers
    head_dim: int = 128


class MetaWeights:
    """`WeightSource` of shapes alone, which remembers how many weights each name took."""

    def __init__(self) -> None:
        self.taken: dict[str, int] = {}
        self._starts: set[tuple[str, int]] = set()

    def __contains__(self, _name: str) -> bool:
        return True

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, part: Part | None = None) -> Tensor:
        """See `WeightSource`."""
        start = part.start if part else 0
        assert (name, start) not in self._starts
        self._starts.add((name, start))
        whole = torch.empty(shape, dtype=dtype, device="meta")
        found = whole[part.index_in(shape)] if part else whole
        self.taken[name] = self.taken.get(name, 0) + found.numel()
        assert self.taken[name] <= math.prod(shape)
        return found


PUBLISHED = {
    "Qwen3-0.6B": Published(
        _QWEN3
        | {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "max_window_layers": 28,
            "num_attention_heads": 16,
            "num_hidden_layers": 28,
            "tie_word_embeddings": True,
        },
        parameters=596_049_920,
        group=2,
    ),
    "Qwen3-1.7B": Published(
        _QWEN3
        | {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "max_window_layers": 28,
            "num_attention_heads": 16,
            "num_hidden_layers": 28,
            "tie_word_embeddings": True,
        },
        parameters=1_720_574_976,
        group=2,
    ),
    "Qwen3-8B": Published(
        _QWEN3
        | {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "max_window_layers": 36,
            "num_attention_heads": 32,
            "num_hidden_layers": 36,
            "tie_word_embeddings": False,
        },
        parameters=8_190_735_360,
        group=4,
    ),
    "Qwen3-14B": Published(
        _QWEN3
        | {
            "hidden_size": 5120,
            "intermediate_size": 17408,
            "max_window_layers": 40,
            "num_attention_heads": 40,
            "num_hidden_layers": 40,
            "tie_word_embeddings": False,
        },
        parameters=14_768_307_200,
        group=5,
    ),
    "Llama-3.1-8B": Published(
        {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 128000,
            "eos_token_id": 128001,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "initializer_range": 0.02,
            "intermediate_size": 14336,
            "max_position_embeddings": 131072,
            "mlp_bias": False,
            "model_type": "llama",
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-5,
            "rope_scaling": {
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "rope_theta": 500_000.0,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "vocab_size": 128256,
        },
        parameters=8_030_261_248,
        group=4,
    ),
    "Mistral-7B-v0.1": Published(
        _MISTRAL | {"rope_theta": 10_000.0, "sliding_window": 4096, "vocab_size": 32000},
        parameters=7_241_732_096,
        group=4,
        window=4096,
    ),
    "Mistral-7B-v0.3": Published(
        _MISTRAL | {"attention_dropout": 0.0, "rope_theta": 1e6, "sliding_window": None, "vocab_size": 32768},
        parameters=7_248_023_552,
        group=4,
    ),
    "SmolLM2-135M": Published(
        {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "hidden_act": "silu",
            "hidden_size": 576,
            "initializer_range": 0.041666666666666664,
            "intermediate_size": 1536,
            "is_llama_config": True,
            "max_position_embeddings": 8192,
            "mlp_bias": False,
            "model_type": "llama",
            "num_attention_heads": 9,
            "num_hidden_layers": 30,
            "num_key_value_heads": 3,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-5,
            "rope_interleaved": False,
            "rope_scaling": None,
            "rope_theta": 100_000,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "vocab_size": 49152,
        },
        parameters=134_515_008,
        group=3,
        head_dim=64,
    ),
    "Qwen2.5-7B": Published(
        {
            "architectures": ["Qwen2ForCausalLM"],
            "attention_dropout": 0.0,
            "bos_token_id": 151643,
            "eos_token_id": 151643,
            "hidden_act": "silu",
            "hidden_size": 3584,
            "initializer_range": 0.02,
            "intermediate_size": 18944,
            "max_position_embeddings": 131072,
            "max_window_layers": 28,
            "model_type": "qwen2",
            "num_attention_heads": 28,
            "num_hidden_layers": 28,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1_000_000.0,
            "sliding_window": 131072,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "use_mrope": False,
            "use_sliding_window": False,
            "vocab_size": 152064,
        },
        parameters=7_615_616_512,
        group=7,
    ),
    "Qwen3-30B-A3B": Published(_QWEN3_MOE, parameters=30_532_122_624, computed=3_353_032_704, group=8),
    "Qwen3-235B-A22B": Published(
        _QWEN3_MOE
        | {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "max_window_layers": 94,
            "moe_intermediate_size": 1536,
            "num_attention_heads": 64,
            "num_hidden_layers": 94,
        },
        parameters=235_093_634_560,
        computed=22_190_763_520,
        group=16,
    ),
    "Mixtral-8x7B-v0.1": Published(
        _MISTRAL
        | {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
            "output_router_logits": False,
            "rope_theta": 1e6,
            "router_aux_loss_coef": 0.02,
            "sliding_window": None,
            "vocab_size": 32000,
        },
        parameters=46_702_792_704,
        computed=12_879_925_248,
        group=4,
    ),
    "GLM-4.5-Air": Published(  # without the layer that predicts further tokens, which is not read
        {
            "architectures": ["Glm4MoeForCausalLM"],
            "attention_bias": True,
            "first_k_dense_replace": 1,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "intermediate_size": 10944,
            "max_position_embeddings": 131072,
            "model_type": "glm4_moe",
            "moe_intermediate_size": 1408,
            "n_group": 1,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_attention_heads": 96,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 46,
            "num_key_value_heads": 8,
            "num_nextn_predict_layers": 1,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-5,
            "rope_scaling": None,
            "rope_theta": 1_000_000,
            "routed_scaling_factor": 1.0,
            "tie_word_embeddings": False,
            "topk_group": 1,
            "use_qk_norm": False,
            "vocab_size": 151552,
        },
        parameters=106_852_251_264,
        computed=13_424_123_904,
        group=12,
    ),
    "gpt-oss-20b": Published(  # its experts in 16 bits
        _GPT_OSS,
        parameters=20_914_757_184,
        computed=4_186_610_496,
        group=8,
        head_dim=64,
        window=128,
    ),
    "gpt-oss-120b": Published(
        _GPT_OSS
        | {
            "layer_types": ["sliding_attention", "full_attention"] * 18,
            "num_hidden_layers": 36,
            "num_local_experts": 128,
        },
        parameters=116_829_156_672,
        computed=5_710_734_144,
        group=8,
        head_dim=64,
        window=128,
    ),
}
