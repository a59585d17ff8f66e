"""How the linears of a checkpoint are stored, read from `quantization_config` of its `config.json`.

Three formats of 8-bit floats (e4m3) are read; they differ in what shares a scale:

    channel   each row of a weight            compressed-tensors, strategy channel
    tensor    all of a weight                 compressed-tensors, strategy tensor; fp8 without blocks
    block     128 by 128 numbers of a weight  fp8 with weight_block_size; compressed-tensors, strategy block

Inputs are rounded to e4m3 too, with a scale for each token that is found as they come (dynamic), or with the file's
one scale (static). Embedding, head and norms stay as they are stored, and so does what the file lists as left out.
Everything else is refused by name before a weight is read. Knows no torch.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from shared.engine.quantized.patterns import NamesKept
from shared.primitives.errors import ModelError

BLOCK = 128  # rows and columns that share a scale
SUPPORTED = (
    "FP8 (e4m3, symmetric) with a scale for each channel, tensor or block of 128 x 128, from compressed-tensors "
    "(float-quantized) or fp8; mxfp4 of gpt-oss; unquantized safetensors, and GGUF"
)
IN_LAYERS = "model.layers."
_SCALE_BYTES = 4
_EXPERT = re.compile(r"\.experts\.\d+\.")


class Scales(Enum):
    """What shares a scale."""

    CHANNEL = "channel"
    TENSOR = "tensor"
    BLOCK = "block"


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How a linear is stored. Of each pair of names the first that a file holds is read: writers differ."""

    scales: Scales
    # The file has one scale for all inputs of a linear; else each token finds its own.
    static_inputs: bool = False
    scale_names: tuple[str, ...] = ("weight_scale",)
    input_scale_names: tuple[str, ...] = ("input_scale",)

    @property
    def name(self) -> str:
        """For descriptions and fingerprints: `fp8-channel`."""
        return f"fp8-{self.scales.value}{'-static' if self.static_inputs else ''}"

    def scale_shape(self, outputs: int, inputs: int) -> tuple[int, ...]:
        """Shape of the scales of a weight [outputs, inputs]."""
        if self.scales is Scales.TENSOR:
            return ()
        if self.scales is Scales.CHANNEL:
            return (outputs, 1)
        return (-(-outputs // BLOCK), -(-inputs // BLOCK))

    def kept_bytes(self, outputs: int, inputs: int) -> int:
        """Bytes of a weight and its scales while it is computed with; a tensor's scale is spread over its rows."""
        columns = -(-inputs // BLOCK) if self.scales is Scales.BLOCK else 1
        return outputs * inputs + outputs * columns * _SCALE_BYTES


@dataclass(frozen=True)
class Quantization:
    """The format of a checkpoint's linears, and those that it does not hold for."""

    format: WeightFormat
    kept: tuple[str, ...] = ()  # names of linears that are stored in 16 bits, sorted

    def format_of(self, linear: str) -> WeightFormat | None:
        """The format of the linear of this name, `model.layers.0.mlp.down_proj`; None: it is not quantized.

        Embedding and head are in no layer. All experts of a layer are stored as its first one is.
        """
        if not linear.startswith(IN_LAYERS):
            return None
        linear = _EXPERT.sub(".experts.0.", linear)
        place = bisect_left(self.kept, linear)
        return None if self.kept[place : place + 1] == (linear,) else self.format


def read_quantization(config: Mapping[str, Any], linears: Sequence[Sequence[str]]) -> Quantization | None:
    """What a `config.json` says of its linears, whose names come in groups that are computed as one; None: nothing.

    `ModelError` names what is not supported.
    """
    found = config.get("quantization_config") or config.get("compression_config")
    if not found:
        return None
    if not isinstance(found, Mapping):
        raise _refused(str(found)[:40])
    method = found.get("quant_method", "unnamed")
    if method == "compressed-tensors":
        form, entries, prefixes = _compressed_tensors(found), found.get("ignore"), False
    elif method == "fp8":
        form, prefixes = _fine_grained(found), True
        entries = found.get("modules_to_not_convert") or found.get("ignored_layers")
    else:
        raise _refused(str(method))
    if not isinstance(entries, list | tuple | None) or not all(
        isinstance(each, str) for each in entries or ()
    ):
        raise ModelError("the list of modules that are not quantized should hold names")
    kept = NamesKept(entries or (), prefixes=prefixes).among([name for group in linears for name in group])
    for group in linears:
        if 0 < sum(name in kept for name in group) < len(group):
            parts = ", ".join(f"{name} {'in 16 bits' if name in kept else form.name}" for name in group)
            raise ModelError(f"linears that are computed as one need one format, found {parts}")
    return Quantization(form, tuple(sorted(kept)))


def _refused(what: str) -> ModelError:
    return ModelError(f"unsupported quantization: {what}; supported are {SUPPORTED}")


# ---- compressed-tensors: groups of modules, each with a scheme for weights and one for inputs ------------------------


def _compressed_tensors(found: Mapping[str, Any]) -> WeightFormat:
    form = found.get("format")
    if form != "float-quantized":
        raise _refused(f"compressed-tensors of format {form}")
    if found.get("kv_cache_scheme"):
        raise _refused("kv_cache_scheme of compressed-tensors (scales of keys and values)")
    for name in ("sparsity_config", "transform_config"):
        content = found.get(name)
        if content and not (isinstance(content, Mapping) and content.get("format") == "dense"):
            raise _refused(f"{name} of compressed-tensors")
    groups = found.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        count = len(groups) if isinstance(groups, Mapping) else "no"
        raise _refused(f"compressed-tensors of {count} groups of modules, not one")
    (group,) = groups.values()
    if not isinstance(group, Mapping) or group.get("targets") != ["Linear"]:
        targets = group.get("targets") if isinstance(group, Mapping) else group
        raise _refused(f"compressed-tensors of {str(targets)[:80]}, not of all Linear")
    if group.get("format") not in (None, form):
        raise _refused(f"compressed-tensors of format {group['format']}")
    if group.get("output_activations"):
        raise _refused("output_activations of compressed-tensors")
    return _scheme(_eight_bits(group, "weights"), _eight_bits(group, "input_activations"))


def _eight_bits(group: Mapping[str, Any], part: str) -> Mapping[str, Any]:
    found = group.get(part)
    if not isinstance(found, Mapping):
        raise _refused(f"compressed-tensors without {part}")
    kind = f"{found.get('type', 'int')}{found.get('num_bits', 8)}"
    if kind != "float8":
        raise _refused(f"{part} of compressed-tensors in {kind}")
    if not found.get("symmetric", True):
        raise _refused(f"asymmetric {part} of compressed-tensors")
    return found


def _scheme(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> WeightFormat:
    """Inputs are rounded by token where the file wants that, or a scale of all tokens of a batch."""
    strategy, of_inputs = weights.get("strategy"), inputs.get("strategy")
    dynamic = inputs.get("dynamic", False)
    if weights.get("dynamic"):
        raise _refused("dynamic weights of compressed-tensors")
    if strategy == "block":
        if list(weights.get("block_structure") or ()) != [BLOCK, BLOCK]:
            raise _refused(f"blocks of {weights.get('block_structure')}")
        if not (dynamic is True and of_inputs == "group" and inputs.get("group_size") == BLOCK):
            raise _refused(f"blocks whose inputs have scales by {of_inputs}, dynamic {dynamic}")
        return WeightFormat(Scales.BLOCK)
    if strategy not in ("channel", "tensor"):
        raise _refused(f"compressed-tensors of strategy {strategy}")
    if dynamic is True and of_inputs in ("token", "tensor"):
        return WeightFormat(Scales(strategy))
    if dynamic is False and of_inputs == "tensor":
        return WeightFormat(Scales(strategy), static_inputs=True)
    raise _refused(f"inputs of compressed-tensors with scales by {of_inputs}, dynamic {dynamic}")


# ---- fp8: transformers' own, DeepSeek's, and AutoFP8's --------------------------------------------------------------
_SCALE_NAMES = ("weight_scale_inv", "weight_scale")  # the former multiplies too, whatever it is called
_INPUT_SCALE_NAMES = ("activation_scale", "input_scale")


def _fine_grained(found: Mapping[str, Any]) -> WeightFormat:
    for name, able in _FP8_SETTINGS.items():
        if found.get(name) not in able:
            raise _refused(f"fp8 with {name} {str(found[name])[:40]}")
    scheme, blocks = found.get("activation_scheme", "dynamic"), found.get("weight_block_size")
    if scheme not in ("dynamic", "static"):
        raise _refused(f"fp8 with activation_scheme {scheme}")
    static = scheme == "static"
    if blocks is None:
        return WeightFormat(Scales.TENSOR, static, _SCALE_NAMES, _INPUT_SCALE_NAMES)
    if not isinstance(blocks, Iterable) or list(blocks) != [BLOCK, BLOCK]:
        raise _refused(f"fp8 in blocks of {str(blocks)[:40]}")
    if static:
        raise _refused("fp8 in blocks with activation_scheme static")
    return WeightFormat(Scales.BLOCK, scale_names=_SCALE_NAMES)


_FP8_SETTINGS: dict[str, tuple[object, ...]] = {  # what each may say; absent is None
    "fmt": (None, "e4m3", "float8_e4m3fn"),
    "scale_fmt": (None, "float"),
    "expert_dtype": (None, "fp8"),
    "modules_to_convert": (None, [], ()),
    "kv_cache_scheme": (None, {}),
}
