"""Loads transformers' tokenizer of a model folder, which splits text as the model was trained to read it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shared.limits.model_files import TEMPLATE_BYTES_MAX, read_json, read_text
from shared.primitives.errors import ModelError

# The first tokens of Mistral's own byte-level vocabulary (tekken), and by what it splits text.
_TEKKEN = {"[INST]": 3, "[/INST]": 4, "[AVAILABLE_TOOLS]": 5, "[/AVAILABLE_TOOLS]": 6}
_TEKKEN_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def load_tokenizer(folder: Path, chat_template: Path | None = None) -> Any:
    """The tokenizer of `folder` as tokenizer.json says; raises `ModelError` for a folder without one that is whole.

    The template in the file `chat_template` takes the place of the folder's own. Classes of families (LlamaTokenizer,
    Qwen2Tokenizer) take the vocabulary alone from tokenizer.json, and put a normalizer and a pre-tokenizer of their own
    in the place of the file's.
    """
    try:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        kind: Any = PreTrainedTokenizerFast if (folder / "tokenizer.json").is_file() else AutoTokenizer
        tokenizer = kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except MemoryError:
        raise
    except Exception as error:
        raise ModelError(f"cannot load the tokenizer of {folder}: {type(error).__name__}") from None
    if not getattr(tokenizer, "is_fast", False):
        raise ModelError(f"{folder} has no tokenizer.json; only such tokenizers are supported")
    if chat_template:
        tokenizer.chat_template = read_text(chat_template, TEMPLATE_BYTES_MAX)
    elif tokenizer.chat_template is None:
        tokenizer.chat_template = _template_of_processor(folder)
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()  # what a training cut and filled its texts to, and saved
    backend.no_padding()
    _split_as_mistral(backend)
    return tokenizer


def _template_of_processor(folder: Path) -> str | None:
    """The chat template that models which also read images may keep apart from their tokenizer."""
    path = folder / "chat_template.json"
    found = read_json(path).get("chat_template") if path.is_file() else None
    return found if isinstance(found, str) else None


def _split_as_mistral(backend: Any) -> None:
    """Give Mistral's vocabulary its own words where the file has those of Llama 3.

    Mistral's files of 2025 were converted so (Mistral Small 3.1, Magistral, Devstral), which cuts words of scripts with
    marks, such as Hindi, into other tokens than the model knows them by. transformers says so in a warning alone.
    """
    if any(backend.token_to_id(token) != number for token, number in _TEKKEN.items()):
        return
    from tokenizers import Regex, pre_tokenizers

    described = json.loads(backend.pre_tokenizer.__getstate__()) if backend.pre_tokenizer else {}
    first: dict[str, Any] = next(iter(described.get("pretokenizers") or ()), {})
    if first.get("type") == "Split" and first.get("pattern") == {"Regex": _LLAMA3_WORDS}:
        words = pre_tokenizers.Split(Regex(_TEKKEN_WORDS), "isolated")
        by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([words, by_bytes])
