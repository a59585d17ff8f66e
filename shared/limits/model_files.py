"""Reads the JSON files of a model folder, and bounds what they may say before anything is built from it.

A folder may come from anybody. A layer count of 10^9 would fill memory with lists of layer kinds before the first
weight is looked for, here or in transformers' own classes; a vocabulary of that size would do so in a router. The
bounds are some ten times what the largest published models have. Knows no torch and no transformers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shared.primitives.errors import ModelError
from shared.wire.bounds import VOCABULARY_MAX

TEMPLATE_BYTES_MAX = 1 << 20  # of a chat template: the longest known have 20 kB
CONFIG_BYTES_MAX = 8 << 20  # of a configuration
INDEX_BYTES_MAX = 64 << 20  # of a list of all weights: DeepSeek's has 9 MB
TOKENIZER_BYTES_MAX = 64 << 20  # of tokenizer.json: Gemma's has 33 MB
LAYERS_MAX = 1024
HEADS_MAX = 4096
EXPERTS_MAX = 1 << 14
WIDTH_MAX = 1 << 21  # numbers of a token between layers, or within one
CONTEXT_MAX = 1 << 26  # tokens
_MOST = [  # by a field's name, the first that fits: transformers' classes have several names for a number
    (re.compile(r"^vocab_size$"), VOCABULARY_MAX),
    (re.compile(r"^(num_(hidden_|decoder_)?layers|n_layers?)$"), LAYERS_MAX),
    (re.compile(r"^(num_(attention|key_value|kv)_heads|n_heads?)$"), HEADS_MAX),
    (re.compile(r"^(num(_local|_routed)?_experts|n_routed_experts)$"), EXPERTS_MAX),
    (
        re.compile(r"^(max_position_embeddings|n_positions|n_ctx|max_seq(uence)?_len(gth)?|seq_length)$"),
        CONTEXT_MAX,
    ),
    (
        re.compile(r"^(hidden_size|intermediate_size|head_dim|d_model|d_ff|n_embd|n_inner|ffn_dim)$"),
        WIDTH_MAX,
    ),
]


def read_json(path: Path, bytes_max: int = CONFIG_BYTES_MAX) -> dict[str, Any]:
    """The JSON object in `path`; `ModelError` if it is missing, too large or not an object."""
    try:
        content = json.loads(_read(path, bytes_max))
    except FileNotFoundError:
        raise ModelError(
            f"{path.parent} holds no {path.name}: expected a Hugging Face model folder"
        ) from None
    except RecursionError:
        raise ModelError(f"{path} cannot be read as JSON: its lists or objects are nested too deep") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} should hold a JSON object, holds {type(content).__name__}")
    return content


def read_text(path: Path, bytes_max: int) -> str:
    """The text in `path`; `ModelError` if it is missing, too large or not UTF-8."""
    try:
        return _read(path, bytes_max).decode()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} should be text in UTF-8: byte {error.start} is not") from None


def _read(path: Path, bytes_max: int) -> bytes:
    with path.open("rb") as file:
        content = file.read(bytes_max + 1)
    if len(content) > bytes_max:
        raise ModelError(f"{path} has more than {bytes_max >> 20} MiB, the most that such a file may have")
    return content


def read_config(folder: Path) -> dict[str, Any]:
    """What `config.json` of a model folder says; `ModelError` also where a shape is beyond its bound."""
    if not folder.is_dir():
        raise ModelError(f"{folder} is not a folder: expected a model in Hugging Face's layout")
    content = read_json(folder / "config.json")
    for name, value in _fields(content):
        most = next((most for pattern, most in _MOST if pattern.search(name)), None)
        if most is None or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if not 0 <= value <= most:
            raise ModelError(
                f"{folder / 'config.json'} is malformed: {name} is {value:.6g}, expected 0 to {most:,}"
            )
    return content


def _fields(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every field, and those of configurations inside."""
    for name, value in config.items():
        yield name, value
        if isinstance(value, Mapping):
            yield from _fields(value)
