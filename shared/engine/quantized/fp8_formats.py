"""Linears stored as 8-bit floats (e4m3), as `config.json` says it. Three formats differ in what shares a scale:

    channel   each row of a weight            compressed-tensors, strategy channel
    tensor    all of a weight                 compressed-tensors, strategy tensor; fp8 without blocks
    block     128 by 128 numbers of a weight  fp8 with weight_block_size; compressed-tensors, strategy block

Inputs are rounded to e4m3 too, with a scale for each token that is found as they come (dynamic), or with the file's
one scale (static). Knows no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from shared.engine.quantized.unsupported import refused

BLOCK = 128  # rows and columns that share a scale
EXPERTS_STEP = 32  # numbers of a row of an expert that a kernel reads at once
_SCALE_BYTES = 4


class Scales(Enum):
    """What shares a scale."""

    CHANNEL = "channel"
    TENSOR = "tensor"
    BLOCK = "block"


@dataclass(frozen=True, slots=True)
class Fp8Format:
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

    def scale_rows(self, *parts: int) -> int:
        """Rows that share a scale in a matrix of an expert, made of parts of so many rows."""
        return BLOCK if self.scales is Scales.BLOCK and not any(part % BLOCK for part in parts) else 1

    def expert_bytes(self, outputs: int, inputs: int, *parts: int) -> int:
        """Bytes of such a matrix."""
        columns = -(-inputs // BLOCK) if self.scales is Scales.BLOCK else 1
        return outputs * inputs + -(-outputs // self.scale_rows(*parts)) * columns * _SCALE_BYTES


# ---- compressed-tensors: a scheme for weights and one for inputs -----------------------------------------------------


def of_compressed_tensors(group: Mapping[str, Any]) -> Fp8Format:
    """The format of a group of modules of `float-quantized`."""
    return _scheme(_eight_bits(group, "weights"), _eight_bits(group, "input_activations"))


def _eight_bits(group: Mapping[str, Any], part: str) -> Mapping[str, Any]:
    found = group.get(part)
    if not isinstance(found, Mapping):
        raise refused(f"compressed-tensors without {part}")
    kind = f"{found.get('type', 'int')}{found.get('num_bits', 8)}"
    if kind != "float8":
        raise refused(f"{part} of compressed-tensors in {kind}")
    if not found.get("symmetric", True):
        raise refused(f"asymmetric {part} of compressed-tensors")
    return found


def _scheme(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> Fp8Format:
    """Inputs are rounded by token where the file wants that, or a scale of all tokens of a batch."""
    strategy, of_inputs = weights.get("strategy"), inputs.get("strategy")
    dynamic = inputs.get("dynamic", False)
    if weights.get("dynamic"):
        raise refused("dynamic weights of compressed-tensors")
    if strategy == "block":
        if list(weights.get("block_structure") or ()) != [BLOCK, BLOCK]:
            raise refused(f"blocks of {weights.get('block_structure')}")
        if not (dynamic is True and of_inputs == "group" and inputs.get("group_size") == BLOCK):
            raise refused(f"blocks whose inputs have scales by {of_inputs}, dynamic {dynamic}")
        return Fp8Format(Scales.BLOCK)
    if strategy not in ("channel", "tensor"):
        raise refused(f"compressed-tensors of strategy {strategy}")
    if dynamic is True and of_inputs in ("token", "tensor"):
        return Fp8Format(Scales(strategy))
    if dynamic is False and of_inputs == "tensor":
        return Fp8Format(Scales(strategy), static_inputs=True)
    raise refused(f"inputs of compressed-tensors with scales by {of_inputs}, dynamic {dynamic}")


# ---- fp8: transformers' own, DeepSeek's, and AutoFP8's --------------------------------------------------------------
_SCALE_NAMES = ("weight_scale_inv", "weight_scale")  # the former multiplies too, whatever it is called
_INPUT_SCALE_NAMES = ("activation_scale", "input_scale")


def of_fp8(found: Mapping[str, Any]) -> Fp8Format:
    """The format of a file of `quant_method: fp8`."""
    for name, able in _FP8_SETTINGS.items():
        if found.get(name) not in able:
            raise refused(f"fp8 with {name} {str(found[name])[:40]}")
    scheme, blocks = found.get("activation_scheme", "dynamic"), found.get("weight_block_size")
    if scheme not in ("dynamic", "static"):
        raise refused(f"fp8 with activation_scheme {scheme}")
    static = scheme == "static"
    if blocks is None:
        return Fp8Format(Scales.TENSOR, static, _SCALE_NAMES, _INPUT_SCALE_NAMES)
    if not isinstance(blocks, Iterable) or list(blocks) != [BLOCK, BLOCK]:
        raise refused(f"fp8 in blocks of {str(blocks)[:40]}")
    if static:
        raise refused("fp8 in blocks with activation_scheme static")
    return Fp8Format(Scales.BLOCK, scale_names=_SCALE_NAMES)


_FP8_SETTINGS: dict[str, tuple[object, ...]] = {  # what each may say; absent is None
    "fmt": (None, "e4m3", "float8_e4m3fn"),
    "scale_fmt": (None, "float"),
    "expert_dtype": (None, "fp8"),
    "modules_to_convert": (None, [], ()),
    "kv_cache_scheme": (None, {}),
}
