"""The shapes of models that are run much, as their authors publish them in `config.json`.

Each has what decides how it is served. Keys that no reader looks at are left out, such as most of the half for images,
and so are modules that are named as not quantized but are no linears. The numbers were compared with what others keep
of the same files: LitGPT's list of models, the model configs of NVIDIA's aiconfigurator and of Tenstorrent's tt-metal,
and the classes of transformers.
"""

from __future__ import annotations

from typing import Any

from tests.unit.engine.checkpoint.published_models import PUBLISHED

Config = dict[str, Any]


def published(name: str, **changes: Any) -> Config:
    return PUBLISHED[name].config | changes


def shape(hidden: int, inner: int, layers: int, heads: int, kv_heads: int) -> Config:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


# ---- quantization, as files say it -----------------------------------------------------------------------------------


def _compressed_tensors(form: str, weights: Config, inputs: Config | None) -> Config:
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


_EIGHT_BITS: Config = {"num_bits": 8, "type": "float", "symmetric": True}
FP8_DYNAMIC = _compressed_tensors(
    "float-quantized",
    _EIGHT_BITS | {"strategy": "channel", "dynamic": False},
    _EIGHT_BITS | {"strategy": "token", "dynamic": True},
)
FP8_BLOCKS: Config = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}

# ---- families --------------------------------------------------------------------------------------------------------

LLAMA_3_1 = published("Llama-3.1-8B")
LLAMA_3_2 = LLAMA_3_1 | {
    "rope_scaling": LLAMA_3_1["rope_scaling"] | {"factor": 32.0},
    "tie_word_embeddings": True,
}
LLAMA_3_70B = LLAMA_3_1 | shape(8192, 28672, 80, 64, 8)
LLAMA_4_SCOUT = {
    "architectures": ["Llama4ForConditionalGeneration"],
    "model_type": "llama4",
    "text_config": shape(5120, 8192, 48, 40, 8)
    | {
        "attention_chunk_size": 8192,
        "head_dim": 128,
        "hidden_act": "silu",
        "interleave_moe_layer_step": 1,
        "intermediate_size_mlp": 16384,
        "max_position_embeddings": 10485760,
        "model_type": "llama4_text",
        "num_experts_per_tok": 1,
        "num_local_experts": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "use_qk_norm": True,
        "vocab_size": 202048,
    },
    "torch_dtype": "bfloat16",
}
TINY_LLAMA = shape(2048, 5632, 22, 32, 4) | {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}
FALCON_3 = (
    TINY_LLAMA
    | shape(3072, 23040, 28, 12, 4)
    | {
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000042,
        "vocab_size": 131072,
    }
)
QWEN_2_5 = published("Qwen2.5-7B", max_position_embeddings=32768)
QWEN_2_5_SMALL = QWEN_2_5 | {"tie_word_embeddings": True, "vocab_size": 151936}
QWEN_2_5_32B = QWEN_2_5 | shape(5120, 27648, 64, 40, 8)
QWEN_3_32B = published("Qwen3-8B", max_window_layers=64) | shape(5120, 25600, 64, 64, 8)
QWEN_3_CODER = published("Qwen3-235B-A22B") | shape(6144, 8192, 62, 96, 8)
QWEN_3_CODER |= {
    "max_window_layers": 62,
    "max_position_embeddings": 262144,
    "moe_intermediate_size": 2560,
    "num_experts": 160,
    "rope_theta": 10_000_000,
    "shared_expert_intermediate_size": 0,
}
QWEN_3_NEXT = shape(2048, 5120, 48, 16, 2) | {
    "architectures": ["Qwen3NextForCausalLM"],
    "decoder_sparse_step": 1,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "model_type": "qwen3_next",
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN_2_5_VL = QWEN_2_5 | {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "max_position_embeddings": 128000,
    "model_type": "qwen2_5_vl",
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "sliding_window": None,
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_config": {"hidden_size": 1280},
}
QWEN_3_VL = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "image_token_id": 151655,
    "model_type": "qwen3_vl",
    "text_config": shape(4096, 12288, 36, 32, 8)
    | {
        "attention_bias": False,
        "dtype": "bfloat16",
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 262144,
        "model_type": "qwen3_vl_text",
        "rms_norm_eps": 1e-6,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "rope_theta": 5000000,
        "vocab_size": 151936,
    },
    "tie_word_embeddings": False,
    "video_token_id": 151656,
    "vision_config": {"hidden_size": 1152},
}
QWEN_3_5 = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "image_token_id": 248056,
    "model_type": "qwen3_5",
    "text_config": shape(4096, 12288, 32, 16, 4)
    | {
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 262144,
        "model_type": "qwen3_5_text",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "vocab_size": 248320,
    },
    "tie_word_embeddings": False,
    "vision_config": {"depth": 27, "hidden_size": 1152, "model_type": "qwen3_5", "num_heads": 16},
}
MISTRAL = published("Mistral-7B-v0.3")
MISTRAL_SMALL_TEXT = shape(5120, 32768, 40, 32, 8) | {
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "vocab_size": 131072,
}
MISTRAL_SMALL_3_2 = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "image_token_index": 10,
    "model_type": "mistral3",
    "spatial_merge_size": 2,
    "text_config": MISTRAL_SMALL_TEXT
    | {"max_position_embeddings": 131072, "model_type": "mistral", "rope_theta": 1000000000.0},
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1024},
    "vision_feature_layer": -1,
}
DEEPSEEK = shape(7168, 18432, 61, 128, 128) | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_deepseek.DeepseekV3Config",
        "AutoModel": "modeling_deepseek.DeepseekV3Model",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
    },
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": FP8_BLOCKS,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
KIMI_K2 = DEEPSEEK | {
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
    "model_type": "kimi_k2",
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "rope_scaling": DEEPSEEK["rope_scaling"] | {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0},
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "topk_group": 1,
    "vocab_size": 163840,
}
MINIMAX_M2_5 = shape(3072, 1536, 62, 48, 8) | {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_minimax_m2.MiniMaxM2Config",
        "AutoModelForCausalLM": "modeling_minimax_m2.MiniMaxM2ForCausalLM",
    },
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 196608,
    "model_type": "minimax_m2",
    "num_experts_per_tok": 8,
    "num_local_experts": 256,
    "quantization_config": FP8_BLOCKS | {"fmt": "float8_e4m3fn"},
    "rms_norm_eps": 1e-6,
    "rope_theta": 5000000,
    "rotary_dim": 64,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "vocab_size": 200064,
}
GEMMA_2 = shape(3584, 14336, 42, 16, 8) | {
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "torch_dtype": "bfloat16",
    "vocab_size": 256000,
}
GEMMA_3_1B = shape(1152, 6912, 26, 4, 1) | {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "vocab_size": 262144,
}


def gemma_3(**text: Any) -> Config:
    """Of a file with images, whose text_config leaves out what transformers' class has by default."""
    common = {
        "model_type": "gemma3_text",
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "image_token_index": 262144,
        "mm_tokens_per_image": 256,
        "model_type": "gemma3",
        "text_config": common | text,
        "torch_dtype": "bfloat16",
        "vision_config": {"hidden_size": 1152},
    }


GEMMA_4 = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "dtype": "bfloat16",
    "image_token_id": 258880,
    "model_type": "gemma4",
    "text_config": shape(2816, 2112, 30, 16, 8)
    | {
        "attention_k_eq_v": True,
        "enable_moe_block": True,
        "final_logit_softcapping": 30.0,
        "global_head_dim": 512,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": 0,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5,
        "max_position_embeddings": 262144,
        "model_type": "gemma4_text",
        "moe_intermediate_size": 704,
        "num_experts": 128,
        "num_global_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "full_attention": {
                "partial_rotary_factor": 0.25,
                "rope_theta": 1000000.0,
                "rope_type": "proportional",
            },
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "sliding_window": 1024,
        "tie_word_embeddings": True,
        "top_k_experts": 8,
        "use_bidirectional_attention": "vision",
        "vocab_size": 262144,
    },
    "tie_word_embeddings": True,
}
PHI_4 = shape(5120, 17920, 40, 40, 10) | {
    "architectures": ["Phi3ForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "max_position_embeddings": 16384,
    "model_type": "phi3",
    "original_max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 250000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 100352,
}
PHI_3_MINI = (
    PHI_4
    | shape(3072, 8192, 32, 32, 32)
    | {
        "auto_map": {
            "AutoConfig": "configuration_phi3.Phi3Config",
            "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
        },
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "sliding_window": 2047,
        "vocab_size": 32064,
    }
)
OLMO_2 = shape(4096, 11008, 32, 32, 32) | {
    "architectures": ["Olmo2ForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "model_type": "olmo2",
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 500000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 100352,
}
OLMO_3_1 = (
    OLMO_2
    | shape(5120, 27648, 64, 40, 8)
    | {
        "architectures": ["Olmo3ForCausalLM"],
        "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 16,
        "max_position_embeddings": 65536,
        "model_type": "olmo3",
        "rope_scaling": {
            "attention_factor": 1.2079441541679836,
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "yarn",
        },
        "sliding_window": 4096,
        "vocab_size": 100278,
    }
)
SMOLLM_3 = shape(2048, 11008, 36, 16, 4) | {
    "architectures": ["SmolLM3ForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "max_position_embeddings": 65536,
    "mlp_bias": False,
    "model_type": "smollm3",
    "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0] * 9,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 5000000.0,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 128256,
}
GRANITE = shape(4096, 12800, 40, 32, 8) | {
    "architectures": ["GraniteForCausalLM"],
    "attention_bias": False,
    "attention_multiplier": 0.0078125,
    "embedding_multiplier": 12.0,
    "hidden_act": "silu",
    "logits_scaling": 16.0,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "granite",
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 10000000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 49159,
}
COMMAND_R = shape(8192, 22528, 40, 64, 64) | {
    "architectures": ["CohereForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "max_position_embeddings": 8192,
    "model_type": "cohere",
    "rope_theta": 8000000.0,
    "torch_dtype": "float16",
    "use_qk_norm": False,
    "vocab_size": 256000,
}
GPT_2 = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "layer_norm_epsilon": 1e-5,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
}
BLOOM = {
    "architectures": ["BloomForCausalLM"],
    "model_type": "bloom",
    "n_embed": 1024,
    "n_layer": 24,
    "num_attention_heads": 16,
    "seq_length": 2048,
    "vocab_size": 250880,
}
STARCODER_2 = shape(3072, 12288, 30, 24, 2) | {
    "architectures": ["Starcoder2ForCausalLM"],
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 16384,
    "model_type": "starcoder2",
    "norm_epsilon": 1e-5,
    "rope_theta": 999999.4420358813,
    "sliding_window": 4096,
    "use_bias": True,
    "vocab_size": 49152,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
NEMOTRON_3 = shape(2688, 1856, 52, 32, 2) | {
    "architectures": ["NemotronHForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_nemotron_h.NemotronHConfig",
        "AutoModelForCausalLM": "modeling_nemotron_h.NemotronHForCausalLM",
    },
    "head_dim": 128,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "mamba_head_dim": 64,
    "mamba_num_heads": 64,
    "max_position_embeddings": 262144,
    "mlp_hidden_act": "relu2",
    "model_type": "nemotron_h",
    "moe_intermediate_size": 1856,
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "rope_theta": 10000,
    "ssm_state_size": 128,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 131072,
}
