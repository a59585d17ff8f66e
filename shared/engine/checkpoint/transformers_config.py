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
from typing import TYPE_CHECKING, Any

from shared.engine.checkpoint.model_config import architectures
from shared.limits.model_files import read_config as read_config_file
from shared.primitives.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_LAYER_KINDS = {"full_attention", "sliding_attention", "attention"}
_SINKS = {  # of transformers 5.23; known by `model_type`, since their weights may take minutes to load
    "flint", "granite_swa", "granitemoe_swa", "mimo_v2_flash", "openai_privacy_filter",
}  # fmt: skip
_ROPES_BY_LENGTH = {"dynamic", "longrope", "su"}  # transformers turns them by the longest sequence of a batch

_NEEDED = {
    "vocab_size": "how many tokens it knows",
    "num_hidden_layers": "how many layers it has",
    "max_position_embeddings": "for how many tokens it was made",
}
HEADER_BYTES_MAX = 100_000_000  # of a safetensors file, as the safetensors library has it


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

    @property
    def canonical(self) -> str:
        """What a fingerprint hashes of it, as of a `ModelConfig`."""
        return repr(self)


def read_fallback_config(folder: Path) -> FallbackConfig:
    """The `FallbackConfig` of a model folder; `ModelError` names what is unsupported, missing or malformed."""
    from transformers import AutoConfig  # it takes a second, and most models never need it

    content = read_config_file(folder)
    architecture = _architecture(content)
    parameters = _parameters(folder)
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        shape = _shape(architecture, config)
    except ModelError:
        raise
    except Exception as error:  # whatever a malformed file, or other names for its shape, leads to
        reason = " ".join(str(error).split())[:200]
        raise ModelError(
            f"{folder / 'config.json'} cannot be read: {type(error).__name__}: {reason}"
        ) from None
    return FallbackConfig(
        architecture=architecture,
        parameters=parameters,
        digest=hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest(),
        **shape,
    )


def _architecture(content: Mapping[str, Any]) -> str:
    from transformers import __version__
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN

    names = architectures(content)
    if content.get("auto_map"):
        raise ModelError("the model needs its own code (auto_map), which is never run")
    if content.get("quantization_config"):
        raise ModelError("its weights are quantized")
    if content.get("is_encoder_decoder"):
        raise ModelError("it has an encoder, whose states are not kept in pages")
    if content.get("model_type") in _SINKS:
        raise ModelError(f"{', '.join(names)} adds sinks to the scores of attention, which is not supported")
    if len(names) != 1 or KNOWN.get(str(content.get("model_type"))) != names[0]:
        met = ", ".join(names) or "no architecture"
        raise ModelError(f"{met} is no text decoder of transformers {__version__}")
    return names[0]


def _shape(architecture: str, config: PreTrainedConfig) -> dict[str, int]:
    """Vocabulary, layers, key-value heads, their size and the context, as transformers' classes name them."""
    if config.get_text_config() is not config:
        raise ModelError(
            f"{architecture} takes more than text: its decoder is one of several models in the file"
        )
    if getattr(config, "is_heterogeneous", False):
        raise ModelError(f"{architecture} has layers of different shapes")
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
    if missing := [name for name in _NEEDED if not isinstance(getattr(config, name, None), int)]:
        raise ModelError(f"its config.json does not say {_NEEDED[missing[0]]} ({missing[0]})")
    return {
        "vocab_size": int(config.vocab_size),
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
            length = int.from_bytes(file.read(8), "little")
            if length > HEADER_BYTES_MAX:
                raise ModelError(
                    f"{path} says that its header has {length:,} bytes, more than {HEADER_BYTES_MAX:,}"
                )
            header = file.read(length)
        try:
            entries = json.loads(header)
            count += sum(
                math.prod(entry["shape"]) for name, entry in entries.items() if name != "__metadata__"
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise ModelError(f"{path} is not a complete safetensors file") from None
    return count
