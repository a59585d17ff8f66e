"""A model of random weights, and a tokenizer with a word for each token: what a machine without a network serves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM

from tests.unit.engine.checkpoint.published_models import PUBLISHED

TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 512,
}


def write_random_model(name: str, folder: Path, device: torch.device) -> None:
    """Qwen3 of this size as published, or `tiny`, in bfloat16: normal numbers of a standard deviation of 0.02."""
    folder.mkdir(parents=True)
    tiny = name == "tiny"
    config = PUBLISHED["Qwen3-0.6B" if tiny else f"Qwen3-{name}"].config | (TINY if tiny else {})
    config |= {"bos_token_id": 0, "eos_token_id": 0}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))  # type: ignore[no-untyped-call]
    generator = torch.Generator(device).manual_seed(0)
    weights = {}
    for key, like in model.state_dict().items():
        if key == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        drawn = torch.ones(like.shape, dtype=torch.bfloat16, device=device)
        weights[key] = drawn if "norm" in key else drawn.normal_(0.0, 0.02, generator=generator)
    save_file(
        {key: weight.cpu() for key, weight in weights.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    _write_tokenizer(folder, config["vocab_size"])


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    """All bytes, which any text is made of; and words that only the model says."""
    vocabulary = {
        byte: number for number, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()), start=1)
    }
    vocabulary |= {"<end>": 0} | {f"Ġw{number}": number for number in range(len(vocabulary) + 1, vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
