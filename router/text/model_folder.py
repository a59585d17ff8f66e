"""What a router reads of a model folder beside its tokenizer: the ends of a text, and generation_config.json.

That file names the sampling that the model's makers recommend. It holds for requests that leave a field out, as in
vLLM and SGLang: many small models loop without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shared.limits.model_files import read_json
from shared.primitives.errors import ModelError, RequestError
from shared.wire.sampling_params import OF_MODELS, SamplingParams, validate


def read_eos_token_ids(folder: Path, config: Mapping[str, Any]) -> frozenset[int]:
    """Every id that either file says ends a text."""
    generation = _read_generation_config(folder)
    return token_ids(config.get("eos_token_id")) | token_ids(generation.get("eos_token_id"))


def read_sampling_defaults(folder: Path) -> dict[str, float]:
    """What generation_config.json recommends, by the names of `SamplingParams`; raises `ModelError`.

    Without `do_sample` the file's other values are transformers' own, and mean nothing.
    """
    generation = _read_generation_config(folder)
    if generation.get("do_sample") is False:
        return {}
    found = {name: generation[name] for name in OF_MODELS if generation.get(name) is not None}
    for name, value in found.items():
        if type(value) not in (int, float):
            raise ModelError(f"{name} in {folder}/generation_config.json is no number")
    if "top_k" in found:
        found["top_k"] = max(0, int(found["top_k"]))  # all: -1 or 0
    try:
        validate(SamplingParams(max_new_tokens=1, seed=0, **found), vocab_size=1)
    except RequestError as error:
        raise ModelError(
            f"{folder}/generation_config.json: {error}; generation_config none ignores it"
        ) from None
    return found


def token_ids(value: object) -> frozenset[int]:
    """One id or several, as either file writes them."""
    ids = value if isinstance(value, list) else [value]
    return frozenset(token_id for token_id in ids if isinstance(token_id, int))


def _read_generation_config(folder: Path) -> dict[str, Any]:
    path = folder / "generation_config.json"
    return read_json(path) if path.exists() else {}
