"""What a dense decoder model looks like, read from a Hugging Face `config.json`.

`ModelConfig` is the small frozen value that weights, cache, model and memory planning share. Reading it refuses, by
name, everything that Segue cannot compute exactly: a wrong rope or an ignored window would not crash, the model would
answer nonsense. Knows no torch and no weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.errors import ModelError

SUPPORTED_ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
SUPPORTED_ROPE_TYPES = ("default", "llama3")


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's stretching of the low frequencies (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_len: int  # tokens


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and switches of a dense decoder; `windows[layer]` is None where attention sees everything."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context_len: int  # tokens the model was made for
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Scaling | None
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]  # tokens, per layer

    @property
    def parameters(self) -> int:
        """Number of weights, for planning memory."""
        hidden, inner = self.hidden_size, self.intermediate_size
        q_size, kv_size = self.heads * self.head_dim, self.kv_heads * self.head_dim
        matrices = hidden * (2 * q_size + 2 * kv_size) + 3 * hidden * inner
        norms = 2 * hidden + 2 * self.head_dim * self.qk_norm
        biases = (
            (q_size + 2 * kv_size) * self.qkv_bias
            + hidden * self.output_bias
            + (2 * inner + hidden) * self.mlp_bias
        )
        embeddings = self.vocab_size * hidden * (1 if self.tied_embeddings else 2)
        return embeddings + self.layers * (matrices + norms + biases) + hidden

    @property
    def matrices(self) -> int:
        """How many matrices the weights are: seven a layer, the embedding, and the head if it is its own."""
        return 7 * self.layers + (1 if self.tied_embeddings else 2)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; `ModelError` if it is missing or not an object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"{path.parent} holds no {path.name}: expected a Hugging Face model folder"
        ) from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} should hold a JSON object, holds {type(content).__name__}")
    return content


def read_model_config(folder: Path) -> ModelConfig:
    """The `ModelConfig` of a model folder; `ModelError` names what is unsupported, missing or malformed."""
    config = read_json(folder / "config.json")
    try:
        return parse_model_config(config)
    except KeyError as error:
        raise ModelError(f"{folder / 'config.json'} lacks {error}") from None
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelError(f"{folder / 'config.json'} is malformed: {error}") from None


def parse_model_config(config: Mapping[str, Any]) -> ModelConfig:
    """Turn the content of a `config.json` into a `ModelConfig`, refusing what is not supported."""
    architecture = _architecture(config)
    heads = int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    hidden_size = int(config["hidden_size"])
    if heads % kv_heads:
        raise ModelError(f"{heads} attention heads cannot share {kv_heads} key-value heads evenly")
    theta, scaling = _rope(config)
    attention_bias = bool(config.get("attention_bias", False))
    return ModelConfig(
        architecture=architecture,
        vocab_size=int(config["vocab_size"]),
        hidden_size=hidden_size,
        intermediate_size=int(config["intermediate_size"]),
        layers=int(config["num_hidden_layers"]),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=int(config.get("head_dim") or hidden_size // heads),
        context_len=int(config["max_position_embeddings"]),
        rms_norm_eps=float(config["rms_norm_eps"]),
        rope_theta=theta,
        rope_scaling=scaling,
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
        output_bias=attention_bias and architecture != "Qwen2ForCausalLM",
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=architecture == "Qwen3ForCausalLM",
        windows=_windows(architecture, config),
    )


def _architecture(config: Mapping[str, Any]) -> str:
    supported = "supported are " + ", ".join(SUPPORTED_ARCHITECTURES)
    names = config.get("architectures") or []
    if len(names) != 1 or names[0] not in SUPPORTED_ARCHITECTURES:
        met = ", ".join(map(str, names)) or f"none named (model_type {config.get('model_type')!r})"
        raise ModelError(f"unsupported architecture: {met}; {supported}")
    if config.get("auto_map"):
        raise ModelError(f"the model needs its own code (auto_map), which is never run; {supported}")
    if quantization := config.get("quantization_config"):
        method = (
            quantization.get("quant_method", "unnamed") if isinstance(quantization, dict) else quantization
        )
        raise ModelError(
            f"unsupported quantization: {method}; supported are unquantized safetensors, and GGUF"
        )
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise ModelError(f"unsupported activation: {activation}; supported is silu")
    return str(names[0])


def _rope(config: Mapping[str, Any]) -> tuple[float, Llama3Scaling | None]:
    """Older files have `rope_theta` and `rope_scaling`; newer ones have both in `rope_parameters`."""
    rope = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial not in (None, 1.0):
        raise ModelError(f"unsupported partial_rotary_factor: {partial}; supported is 1.0")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in SUPPORTED_ROPE_TYPES:
        raise ModelError(f"unsupported rope type: {kind}; supported are {', '.join(SUPPORTED_ROPE_TYPES)}")
    if kind == "default":
        return theta, None
    return theta, Llama3Scaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_context_len=int(rope["original_max_position_embeddings"]),
    )


def _windows(architecture: str, config: Mapping[str, Any]) -> tuple[int | None, ...]:
    layers = int(config["num_hidden_layers"])
    window = config.get("sliding_window")
    if architecture.startswith("Qwen"):
        if not config.get("use_sliding_window", False):
            window = None
        first_windowed = int(config.get("max_window_layers", layers))
    else:
        first_windowed = 0 if architecture == "MistralForCausalLM" else layers
    kinds = config.get("layer_types") or [
        "sliding_attention" if layer >= first_windowed else "full_attention" for layer in range(layers)
    ]
    if unknown := sorted(set(kinds) - {"sliding_attention", "full_attention"}):
        raise ModelError(f"unsupported layer types: {', '.join(unknown)}")
    if len(kinds) != layers:
        raise ModelError(f"layer_types names {len(kinds)} layers, the model has {layers}")
    return tuple(int(window) if window and kind == "sliding_attention" else None for kind in kinds)


def read_eos_token_ids(folder: Path) -> frozenset[int]:
    """Every id that ends a sequence: of config.json, of generation_config.json, and of the tokenizer."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        if (folder / name).exists():
            ids = read_json(folder / name).get("eos_token_id")
            found.update(ids if isinstance(ids, list) else [ids] if ids is not None else [])
    return frozenset(int(token_id) for token_id in found) | _tokenizer_eos(folder)


def _tokenizer_eos(folder: Path) -> frozenset[int]:
    """The tokenizer's eos token ends a chat turn even where the model's own files name another."""
    if not ((folder / "tokenizer_config.json").exists() and (folder / "tokenizer.json").exists()):
        return frozenset()
    eos = read_json(folder / "tokenizer_config.json").get("eos_token")
    text = eos.get("content") if isinstance(eos, dict) else eos
    tokenizer = read_json(folder / "tokenizer.json")
    added = {entry["content"]: int(entry["id"]) for entry in tokenizer.get("added_tokens", [])}
    return frozenset({added[text]}) if text in added else frozenset()
