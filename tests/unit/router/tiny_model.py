"""Model folders with a tokenizer of a few hundred tokens and a chat template: what a router reads, and nothing more."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

SPECIAL = ["<|pad|>", "<|start|>", "<|end|>"]
END_ID = SPECIAL.index("<|end|>")
CONTEXT_LEN = 256
CORPUS = [
    "The quick brown fox jumps over the lazy dog. ",
    "héllo wörld, ça va? ",
    "日本語のテキスト ",
    "🙂🙃 👩‍👩‍👧 ",
]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}{{ raise_exception('no tools: ' + message.content) }}{% endif %}"
    "<|start|>{{ message.role }}\n{{ message.content }}<|end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class TinyModel:
    """A model by what tests ask of it; `features` are its workers', `marks` special tokens."""

    chat_template: str = CHAT_TEMPLATE
    context_len: int = CONTEXT_LEN
    features: tuple[str, ...] = ("logprobs", "prompt_logprobs")
    marks: tuple[str, ...] = ()
    reasoning_parser: str = "auto"


def byte_level(corpus: list[str], marks: Sequence[str] = ()) -> Tokenizer:
    """As of Llama 3, Qwen and SmolLM: every byte is a token, some runs of bytes too."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[*SPECIAL, *marks],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus * 4, trainer)
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As of Llama 2 and Mistral: pieces of characters, `▁` for a space, bytes for characters that have no piece."""
    pieces = ["<unk>", *[f"<0x{byte:02X}>" for byte in range(256)], *"▁abcdefghijklmnopqrstuvwxyzé.,!"]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he")]
    pieces += ["".join(merge) for merge in merges]
    vocabulary = {piece: token_id for token_id, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def write_folder(
    folder: Path,
    *,
    chat_template: str | None = CHAT_TEMPLATE,
    context_len: int = CONTEXT_LEN,
    corpus: list[str] = CORPUS,
    marks: Sequence[str] = (),
) -> Path:
    """A model folder around the byte-level tokenizer, trained on `corpus`, with further special tokens `marks`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_level(corpus, marks)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "model_type": "llama",
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": context_len,
        "eos_token_id": END_ID,
    }
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    if chat_template:
        tokenizer_config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return folder
