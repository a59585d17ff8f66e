"""Tokenizers and chat templates shaped as those of well-known models, small enough to train in a test.

What differs between them is what cutting and control tokens depend on: normalizers, pre-tokenizers, spaces that are
put before a text, and how a template writes its special tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It doesn't stop, does it? We'll see 12 of 345.\n",
    "def main(argument):\n    return {'a': [1, 22, 333], \"b\": None}\n\n\n    # 4444 lines\t\tof code\n",
    "héllo wörld, ça va? Ünïcödé naïve façade — “quotes” … \n",
    "日本語のテキスト。\n中文文本。没有空格。\n한국어 텍스트\n",
    "🙂🙃 👩‍👩‍👧   spaces    and     more\n \n",
]
SPECIAL = ["<unk>", "<s>", "</s>", "<|start|>", "<|end|>", "[INST]", "[/INST]", "<|user|>"]
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _by_bytes(pre_tokenizer: pre_tokenizers.PreTokenizer) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    return _trained(tokenizer, pre_tokenizers.ByteLevel.alphabet())


def _by_regex(regex: str) -> Tokenizer:
    split = pre_tokenizers.Split(Regex(regex), "isolated")
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return _by_bytes(pre_tokenizers.Sequence([split, by_bytes]))


def _by_pieces(
    normalizer: normalizers.Normalizer | None, pre_tokenizer: pre_tokenizers.PreTokenizer | None
) -> Tokenizer:
    """As SentencePiece's: `▁` for a space, bytes for characters that have no piece."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return _trained(tokenizer, ["▁"])


def _trained(tokenizer: Tokenizer, alphabet: list[str]) -> Tokenizer:
    special = [AddedToken(token, special=True, normalized=False) for token in SPECIAL]
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    return tokenizer


def _begun(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def _smollm() -> Tokenizer:
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return _by_bytes(pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), by_bytes]))


def _qwen() -> Tokenizer:
    tokenizer = _by_regex(_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"))
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _llama2() -> Tokenizer:
    words = pre_tokenizers.Split("▁", "merged_with_next")  # for training: without it, merges would span words
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer = Tokenizer.from_str(_without_pre_tokenizer(_by_pieces(normalizer, words)))
    return _begun(tokenizer)


def _gemma() -> Tokenizer:
    return _begun(_by_pieces(normalizers.Replace(" ", "▁"), pre_tokenizers.Split("▁", "merged_with_next")))


def _without_pre_tokenizer(tokenizer: Tokenizer) -> str:
    return json.dumps(json.loads(tokenizer.to_str()) | {"pre_tokenizer": None})


# Each has split points, at which a long text may be cut.
CUTTABLE: dict[str, Callable[[], Tokenizer]] = {
    "gpt2": lambda: _by_regex(_GPT2),
    "gpt2 with a space before": lambda: _by_bytes(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "smollm": _smollm,
    "llama3": lambda: _begun(_by_regex(_LLAMA3)),
    "o200k": lambda: _by_regex(_O200K),
    "qwen": _qwen,
    "llama2": _llama2,
    "mistral": lambda: _begun(_by_pieces(None, pre_tokenizers.Metaspace(prepend_scheme="first"))),
    "gemma": _gemma,
}


def superwords() -> Tokenizer:
    """Without a pre-tokenizer: its tokens span words, so no place is safe to cut."""
    return _by_pieces(normalizers.Replace(" ", "▁"), None)


@cache
def shaped(name: str) -> Tokenizer:
    """One of `CUTTABLE`; trained once."""
    return CUTTABLE[name]()


CHATML = (
    "{% for message in messages %}<|start|>{{ message.role }}\n{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start|>' + message['role'] + '<|end|>\n\n' + message['content'] | trim + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant<|end|>\n\n' }}{% endif %}"
)
MISTRAL = (
    "{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] %}"
    "{%- set loop_messages = messages[1:] %}{%- else %}{%- set loop_messages = messages %}{%- endif %}"
    "{{- bos_token }}{%- for message in loop_messages %}{%- if message['role'] == 'user' %}"
    "{%- if loop.first and system is defined %}{{- '[INST] ' + system + '\n\n' + message['content'] + ' [/INST]' }}"
    "{%- else %}{{- '[INST] ' + message['content'] + ' [/INST]' }}{%- endif %}"
    "{%- else %}{{- ' ' + message['content'] + eos_token }}{%- endif %}{%- endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'system' %}"
    "{{ raise_exception('no system role') }}{% endif %}"
    "{% set role = 'model' if message.role == 'assistant' else message.role %}"
    "{{ '<|start|>' + role + '\n' + message['content'] | trim + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>model\n' }}{% endif %}"
)
TRANSFORMING = (
    "{% for message in messages %}<|start|>{{ message.role }}\n{{ message.content | tojson }}"
    "{{ message.content[:4] | upper }}{{ message.content.split('#')[-1] }}<|end|>{% endfor %}"
)
COMPOSING = (
    "{% for message in messages %}"
    "{{ '<|' + message.role + '|>\n' + message.content + '<|end|>\n' }}{% endfor %}"
)

# Template and the shape that it goes with. The first five write each special token in one piece.
TEMPLATES = {
    "chatml": (CHATML, "smollm"),
    "llama3": (LLAMA3, "llama3"),
    "mistral": (MISTRAL, "mistral"),
    "gemma": (GEMMA, "gemma"),
    "transforming": (TRANSFORMING, "qwen"),
}


def write_shape(folder: Path, tokenizer: Tokenizer, chat_template: str) -> Path:
    """A model folder around `tokenizer`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 4096, "eos_token_id": 2}))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": chat_template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
