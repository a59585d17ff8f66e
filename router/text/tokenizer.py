"""From text to token ids: the model's tokenizer and its chat template.

The only file of the router that imports transformers. It knows the model folder (tokenizer, chat template, config.json)
and neither HTTP nor requests. The template is the folder's own, rendered in transformers' sandbox; a client never
supplies one. Going back from ids to text step by step is `router.text.detokenizer`.

transformers imports torch wherever it is installed, which costs a router seconds and half a gigabyte for nothing.
`hide_torch`, called before the first load, hides torch from this process.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from shared.errors import ModelError, RequestError

Message = Mapping[str, str]  # role and content


class Decoder(Protocol):
    """What turns token ids into text: the side of `Tokenizer` that `detokenizer` needs."""

    def decode(self, token_ids: Sequence[int]) -> str: ...


def hide_torch() -> None:
    """Make torch impossible to import in this process, and transformers silent about its absence."""
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # requests are parallel already
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a router reads a folder, never the network


class Tokenizer:
    """The tokenizer of one model folder. All methods may be called from any thread."""

    def __init__(self, folder: Path):
        """Load `folder`; raises `ModelError` naming what is missing or broken."""
        config = _read_config(folder)
        self._tokenizer = _load(folder)
        self._backend = self._tokenizer.backend_tokenizer
        added = self._backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(
            token_id for token_id, token in added.items() if token.special
        ) | frozenset(self._tokenizer.all_special_ids)
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        self.vocab_size = int(config.get("vocab_size") or 0) or max(vocabulary.values()) + 1
        self.longest_token_chars = max(map(len, vocabulary))
        self.context_len = int(config.get("max_position_embeddings") or 0)  # 0: the folder does not say
        self.eos_token_ids = _eos_token_ids(folder, config) | _own_eos(self._tokenizer.eos_token_id)

    @property
    def has_chat_template(self) -> bool:
        return self._tokenizer.chat_template is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Token ids of `text`."""
        return tuple(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """The prompt that the model's template makes of a chat; raises `RequestError` if it refuses.

        The template's own words are not repeated: they may quote the messages.
        """
        if not self.has_chat_template:
            raise RequestError("this model has no chat template: use /v1/completions", param="messages")
        try:
            prompt = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        except Exception:  # jinja2's errors, and whatever a template's expressions raise
            raise RequestError(
                "the model's chat template does not accept these messages: check the order of their roles",
                param="messages",
            ) from None
        return str(prompt)

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """The vocabulary's own spelling of each id."""
        return [self._backend.id_to_token(token_id) or "" for token_id in token_ids]

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids` without special tokens."""
        return str(self._backend.decode(token_ids, skip_special_tokens=True))

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids`, special tokens spelled out."""
        return str(self._backend.decode(token_ids, skip_special_tokens=False))


def _load(folder: Path) -> Any:
    try:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ModelError(f"cannot load the tokenizer of {folder}: {type(error).__name__}") from None
    if not getattr(tokenizer, "is_fast", False):
        raise ModelError(f"{folder} has no tokenizer.json; only such tokenizers are supported")
    return tokenizer


def _read_config(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise ModelError(f"{folder} is not a folder: the router reads a model in Hugging Face's layout")
    return _read_json(folder / "config.json", required=True)


def _read_json(path: Path, *, required: bool = False) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        if required:
            raise ModelError(f"{path} is missing") from None
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {type(error).__name__}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return content


def _eos_token_ids(folder: Path, config: dict[str, Any]) -> frozenset[int]:
    generation = _read_json(folder / "generation_config.json")
    return _own_eos(config.get("eos_token_id")) | _own_eos(generation.get("eos_token_id"))


def _own_eos(value: object) -> frozenset[int]:
    ids = value if isinstance(value, list) else [value]
    return frozenset(token_id for token_id in ids if isinstance(token_id, int))
