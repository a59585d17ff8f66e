"""The text half of models that also read images: its configuration, and what its files call its weights.

Its decoder is a family's. Where positions have several axes for images (mrope), those of text are equal on all of them:
that is the family's own rotation. Knows no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from shared.primitives.errors import ModelError

TEXT_HALVES = {
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Mistral3ForConditionalGeneration": "MistralForCausalLM",
    "Qwen2_5_VLForConditionalGeneration": "Qwen2ForCausalLM",
    "Qwen3VLForConditionalGeneration": "Qwen3ForCausalLM",
}
# Decoders, by model_type of text_config, where files of one architecture have several: Mistral Small 4 has another one.
_DECODERS = {"Mistral3ForConditionalGeneration": ("mistral", "ministral3")}
# What transformers' configuration classes say where a file says nothing: of fields that text-only files have.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "Gemma3ForConditionalGeneration": {
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
    },
    "Mistral3ForConditionalGeneration": {"sliding_window": None},
    "Qwen2_5_VLForConditionalGeneration": {"rms_norm_eps": 1e-5},
}
# Of the layers, and of the head: as the decoder asks for them, and as files of both halves have them.
_PREFIXES = (
    ("model.", "lm_head."),
    ("language_model.model.", "language_model.lm_head."),
    ("model.language_model.", "lm_head."),
)


def text_half(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration of the decoder in a `config.json`; the same one where the model reads text alone."""
    names = config.get("architectures")
    whole = names[0] if isinstance(names, list) and len(names) == 1 else None
    if whole not in TEXT_HALVES:
        return config
    found = config.get("text_config", config)
    if not isinstance(found, Mapping):
        raise ModelError(f"text_config should hold an object, holds {type(found).__name__}")
    decoder, able = found.get("model_type"), _DECODERS.get(whole, ())
    if able and decoder is not None and decoder not in able:
        raise ModelError(
            f"unsupported decoder of {whole}: {str(decoder)[:40]}; supported are {', '.join(able)}"
        )
    half = _DEFAULTS.get(whole, {}) | dict(found) | {"architectures": [TEXT_HALVES[whole]]}
    for name in ("tie_word_embeddings", "quantization_config", "auto_map"):
        if config.get(name) is not None:  # of both halves
            half[name] = config[name]
    scaling = half.get("rope_scaling")
    if isinstance(scaling, Mapping) and "mrope" in (scaling.get("type"), scaling.get("rope_type")):
        half["rope_scaling"] = None
    return half


def stored_names(names: Collection[str]) -> Callable[[str], str]:
    """What files with these names call a weight of the decoder."""
    layers, head = next(
        (pair for pair in _PREFIXES if f"{pair[0]}embed_tokens.weight" in names), _PREFIXES[0]
    )

    def stored(name: str) -> str:
        for asked, prefix in zip(_PREFIXES[0], (layers, head), strict=True):
            if name.startswith(asked):
                return prefix + name.removeprefix(asked)
        return name

    return stored
