"""What a router reads of a model folder beside its tokenizer: context, the ends of a text, and generation_config.json.

That file names the sampling that the model's makers recommend. It holds for requests that leave a field out, as in
vLLM and SGLang: many small models loop without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shared.limits.model_files import CONTEXT_MAX, read_json
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


def read_context_len(config: Mapping[str, Any]) -> int:
    """Tokens that config.json says the model was made for; 0: it does not say.

    YaRN stretches the context by its factor. Whoever adds it to a file, as Qwen's cards say, changes nothing else.
    """
    written = config.get("max_position_embeddings") or 0
    told, stretched = config.get("original_max_position_embeddings"), 0.0
    for rope in _ropes(config):
        if "yarn" in (rope.get("rope_type"), rope.get("type")):
            original = told or rope.get("original_max_position_embeddings") or written
            stretched = max(stretched, _number(original) * _number(rope.get("factor")))
    return max(int(written), int(min(stretched, CONTEXT_MAX)))


def _ropes(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """What the file says of rotations: of all layers, or by their kind."""
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(found := config.get(name), Mapping):
            yield from (each for each in (found, *found.values()) if isinstance(each, Mapping))


def _number(value: object) -> float:
    """A value of a file that should be one; 0 where it is none: a worker says what is wrong with it."""
    return float(value) if isinstance(value, int | float) and value > 0 else 0.0


def token_ids(value: object) -> frozenset[int]:
    """One id or several, as either file writes them."""
    ids = value if isinstance(value, list) else [value]
    return frozenset(token_id for token_id in ids if isinstance(token_id, int))


def _read_generation_config(folder: Path) -> dict[str, Any]:
    path = folder / "generation_config.json"
    return read_json(path) if path.exists() else {}
