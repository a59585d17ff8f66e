"""Which models transformers' own code may compute where no family of the dense decoder fits, read from `config.json`.

They are decoders whose layers all attend over all that came before, or over a window of it, and keep nothing else
between tokens: then keys and values in pages are a request's whole state. What keeps a state of its own (Mamba, linear
attention, convolutions), reads another model's states, or brings code is refused by name. Knows no torch.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shared.engine.families import FAMILIES
from shared.engine.model_config import ModelConfig, read_json, read_model_config
from shared.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

ModelImpl = Literal["auto", "segue", "transformers"]
_LAYER_KINDS = {"full_attention", "sliding_attention", "attention"}
_ROPES_BY_LENGTH = {"dynamic", "longrope", "su"}  # transformers turns them by the longest sequence of a batch


@dataclass(frozen=True)
class FallbackConfig:
    """What memory, cache and a fingerprint need of a model that transformers computes."""

    architecture: str
    vocab_size: int
    layers: int
    kv_heads: int
    head_dim: int
    context_len: int  # tokens the model was made for
    parameters: int  # numbers in its weights
    digest: str  # of config.json


def read_config(folder: Path, impl: ModelImpl = "auto") -> ModelConfig | FallbackConfig:
    """What computes the model of a folder, and its shape; `ModelError` names what is unsupported.

    auto: transformers for an architecture that is no family's, the dense decoder for all others.
    """
    if impl == "transformers":
        return read_fallback_config(folder)
    names = read_json(folder / "config.json").get("architectures") or []
    if impl == "segue" or any(name in FAMILIES for name in names):
        return read_model_config(folder)
    try:
        return read_fallback_config(folder)
    except ModelError as error:
        supported = ", ".join(FAMILIES)
        raise ModelError(
            f"unsupported model: {error}; supported are {supported}, and what transformers can"
        ) from None


def read_fallback_config(folder: Path) -> FallbackConfig:
    """The `FallbackConfig` of a model folder; `ModelError` names what is unsupported, missing or malformed."""
    from transformers import AutoConfig  # it takes a second, and most models never need it

    content = read_json(folder / "config.json")
    architecture = _architecture(content)
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever a malformed file leads to
        reason = " ".join(str(error).split())[:200]
        raise ModelError(f"{folder / 'config.json'} is malformed: {type(error).__name__}: {reason}") from None
    return FallbackConfig(
        architecture=architecture,
        vocab_size=int(config.vocab_size),
        parameters=_parameters(folder),
        digest=hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest(),
        **_shape(architecture, config),
    )


def _architecture(content: Mapping[str, Any]) -> str:
    from transformers import __version__
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN

    names = content.get("architectures") or []
    if content.get("auto_map"):
        raise ModelError("the model needs its own code (auto_map), which is never run")
    if content.get("quantization_config"):
        raise ModelError("its weights are quantized")
    if content.get("is_encoder_decoder"):
        raise ModelError("it has an encoder, whose states are not kept in pages")
    if len(names) != 1 or KNOWN.get(str(content.get("model_type"))) != names[0]:
        met = ", ".join(map(str, names)) or "no architecture"
        raise ModelError(f"{met} is no text decoder of transformers {__version__}")
    return str(names[0])


def _shape(architecture: str, config: PreTrainedConfig) -> dict[str, int]:
    """Layers, key-value heads, their size and the context, as transformers' classes name them."""
    if unknown := sorted({str(kind) for kind in getattr(config, "layer_types", None) or []} - _LAYER_KINDS):
        raise ModelError(f"{architecture} has layers with a state of their own: {', '.join(unknown)}")
    rope = getattr(config, "rope_parameters", None) or {}
    ropes = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    if by_length := sorted({str(part.get("rope_type")) for part in ropes} & _ROPES_BY_LENGTH):
        raise ModelError(f"its rope ({by_length[0]}) changes with the longest sequence of a batch")
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int):
        raise ModelError(f"{architecture} has no attention heads, or another number of them in each layer")
    if getattr(config, "kv_lora_rank", None):
        raise ModelError(f"{architecture} has keys and values of different sizes")
    return {
        "layers": int(config.num_hidden_layers),
        "kv_heads": int(getattr(config, "num_key_value_heads", None) or heads),
        "head_dim": int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        "context_len": int(config.max_position_embeddings),
    }


def _parameters(folder: Path) -> int:
    """Numbers in the safetensors files, by their headers."""
    count = 0
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            header = file.read(int.from_bytes(file.read(8), "little"))
        try:
            entries = json.loads(header)
            count += sum(
                math.prod(entry["shape"]) for name, entry in entries.items() if name != "__metadata__"
            )
        except (ValueError, KeyError, TypeError):
            raise ModelError(f"{path} is not a complete safetensors file") from None
    return count
