"""Writes `docs/models.md`: how popular models are served, as the code reads their `config.json`.

`python -m tests.tidy.models_page` (or `make docs`); a test compares the page with what this would write.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from shared.engine.checkpoint.dtypes import Dtypes, dtypes_on_cuda, preferred_dtype
from shared.engine.checkpoint.model_config import ModelConfig, architectures
from shared.engine.checkpoint.model_impl import read_config
from shared.engine.checkpoint.transformers_config import FallbackConfig
from shared.engine.cuda.memory import room_for
from shared.engine.cuda.platform import check_model
from shared.primitives.errors import ConfigError, ModelError
from tests.unit.engine.checkpoint.popular_models import POPULAR
from tests.unit.engine.cuda.cards import CAPABILITY, CARDS, CONFIG, card_memory

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
HEAD = """# Which models are served

Written by `make docs` out of the code and `tests/unit/engine/checkpoint/popular_models.py`; edit those.

These are {count} text models that are run much in 2026: a choice, not a ranking by downloads.
Each row is what the code says of the model's `config.json`, before a weight is read. **What has run is less.** On a GPU
only dense shapes of Llama, Mistral and Qwen have run, with random weights ([what ran](lab/gpu.md)); everything else is
untried there. On a CPU each family is compared with transformers on tiny random models
([which](operating.md#models)); of the real models below only SmolLM2-135M is run by the tests of this repository.
Some files may have changed since their numbers were copied.
"""
OWN = """
## By Segue's own code

On `cuda` the cells say how many tokens of KV fit beside the weights on one GPU of Hopper's kind, as the worker reckons
it: 64 slots, a context of {context_len:,} tokens or the model's own if that is shorter, `device_memory_share` 0.9.
*No*: the weights and one whole request do not fit, and the worker says so when it starts. A model is on one GPU here;
`tensor_parallel_size` shares it among several. On `cpu` matrices of 16 bits stay so and others are float32, computed
in float32; the last column is what the weights take then.
"""
FALLBACK = """
## By transformers' code

On `cpu` alone, several times slower, in float32. Each is tried when it is loaded, and may still be refused then: where
its logits over pages differ from those of its own attention.
"""
REFUSED = """
## Refused

With this sentence; what follows in it, the list of what is supported, is left out here.
"""


def page() -> str:
    """The whole page."""
    rows: dict[str, list[str]] = {OWN: [], FALLBACK: [], REFUSED: []}
    for name, config in POPULAR.items():
        architecture = ", ".join(architectures(config))
        kind, cells = _row(config)
        rows[kind].append(f"| {' | '.join([name, f'`{architecture}`', *cells])} |")
    parts = [HEAD.format(count=len(POPULAR))]
    for kind, headers in {OWN: [*_columns()], FALLBACK: [], REFUSED: ["why"]}.items():
        columns = ["model", "architecture", *headers]
        parts.append(kind.format(context_len=CONFIG.context_len))
        parts += [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", *rows[kind]]
    return "\n".join(parts).replace("\n\n\n", "\n\n") + "\n"


def _columns() -> Iterator[str]:
    yield from (f"`cuda`, {card}" for card in CARDS)
    yield "`cpu`, weights"


def _row(config: dict[str, Any]) -> tuple[str, list[str]]:
    """The table that a model stands in, and its cells there."""
    try:
        shape = read(config)
    except ModelError as error:
        return REFUSED, [_sentence(error)]
    if isinstance(shape, FallbackConfig):
        return FALLBACK, []
    return OWN, [*_on_cuda(shape, _stored(config)), f"{_on_cpu(shape) / 2**30:,.1f} GiB"]


def read(config: dict[str, Any]) -> ModelConfig | FallbackConfig:
    """A model as a folder of its configuration alone is read; `ModelError` refuses it."""
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return read_config(Path(folder))


def _stored(config: dict[str, Any]) -> torch.dtype:
    """The type of a file's embedding: float16 where it says so. The others have bfloat16, said or not."""
    return torch.float16 if config.get("torch_dtype") == "float16" else torch.bfloat16


def _on_cpu(shape: ModelConfig) -> int:
    """Bytes: two a number where the file has so many, else four."""
    return shape.parameters * (2 if shape.quantization is None else 4)


def _on_cuda(shape: ModelConfig, stored: torch.dtype) -> list[str]:
    """A cell for each card."""
    dtypes = dtypes_on_cuda(
        "auto", "auto", stored=preferred_dtype(stored, shape.quantization), capability=CAPABILITY
    )
    try:
        check_model(shape, dtypes, capability=CAPABILITY)
    except ConfigError as error:
        return [f"refused: {_sentence(error)}", *["refused"] * (len(CARDS) - 1)]
    return [_tokens(shape, dtypes, gib) for gib in CARDS.values()]


def _tokens(shape: ModelConfig, dtypes: Dtypes, gib: float) -> str:
    assert CONFIG.context_len is not None
    config = replace(CONFIG, context_len=min(CONFIG.context_len, shape.context_len))
    try:
        room = room_for(shape, dtypes, config, card_memory(gib))
    except ModelError:
        return "no"
    return f"{room.pages * config.page_size:,}"


def _sentence(error: ConfigError | ModelError) -> str:
    """Without what is supported instead, and without the version that is installed."""
    sentence = re.split(r"; supported (?:are|is) ", str(error))[0]
    return re.sub(r"transformers \d[\w.]*", "transformers", sentence)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
