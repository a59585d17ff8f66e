"""Linears stored in 4 bits, whose numbers in a group share a scale and a zero, as `config.json` says it.

A weight is `(number - zero) * scale`, numbers from 0 to 15. A group is 32, 64, 128 or 256 inputs of an output, or all
of them (channel). Inputs are not rounded. Three writers differ in how they pack eight numbers into a word, and in names
(see `int4_packings`):

    awq           AutoAWQ's, version gemm
    gptq          AutoGPTQ's and GPTQModel's; without desc_act, whose groups are scattered over the inputs
    packed        compressed-tensors, pack-quantized

What was packed again for one kernel (Marlin, ExLlama, gemv) is refused. Knows no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from shared.engine.quantized.unsupported import refused
from shared.primitives.errors import ModelError

GROUPS = (32, 64, 128, 256)  # inputs that share a scale; kernels of GPUs read no others
SMALLEST_GROUP = GROUPS[0]
WORD = 8  # numbers in an int32
_CHANNEL = -1
_GROUP_BYTES = 2 + 2  # a scale and a zero in 16 bits
_EXPERT_GROUP_BYTES = 4 + 1
_ROUTERS = (r"re:.*\.gate$", r"re:.*\.router$")


class Packing(Enum):
    """Which numbers a word holds, and what a zero is stored as."""

    AWQ = "awq"
    GPTQ = "gptq"  # zeros less one
    GPTQ_V2 = "gptq_v2"  # zeros as they are
    COMPRESSED = "packed"


@dataclass(frozen=True, slots=True)
class Int4Format:
    """How a linear is stored."""

    packing: Packing
    group: int | None  # inputs that share a scale; None: all of them
    symmetric: bool = False  # the file has no zeros: all are 8

    @property
    def name(self) -> str:
        """For descriptions and fingerprints: `int4-awq-128`."""
        symmetric = "-symmetric" if self.symmetric else ""
        return f"int4-{self.packing.value}-{self.group or 'channel'}{symmetric}"

    def groups(self, inputs: int) -> int:
        """How many scales an output has in the file."""
        return inputs // (self.group or inputs)

    def kept_group(self, inputs: int) -> int:
        """Inputs that share a scale while they are computed with."""
        return self.group or next(size for size in reversed(GROUPS) if inputs % size == 0)

    def kept_bytes(self, outputs: int, inputs: int) -> int:
        """Bytes of a weight with its scales and zeros while it is computed with."""
        return outputs * inputs // 2 + outputs * (inputs // self.kept_group(inputs)) * _GROUP_BYTES

    def expert_bytes(self, outputs: int, inputs: int, *_parts: int) -> int:
        """Bytes of a matrix of an expert: scales stay in 32 bits, zeros in 8."""
        return outputs * inputs // 2 + outputs * (inputs // self.kept_group(inputs)) * _EXPERT_GROUP_BYTES

    def check(self, name: str, outputs: int, inputs: int) -> None:
        """Raise `ModelError` for a linear [outputs, inputs] that groups or words do not divide."""
        group = self.group or SMALLEST_GROUP
        if inputs % group or outputs % WORD:
            raise ModelError(
                f"{name} has {inputs} inputs and {outputs} outputs; {self.name} needs whole groups of {group} inputs "
                f"and whole words of {WORD} outputs"
            )


def _group_of(size: object, where: str) -> int | None:
    if size == _CHANNEL:
        return None
    if not isinstance(size, int) or size not in GROUPS:
        sizes = ", ".join(map(str, GROUPS))
        raise refused(f"{where} in groups of {str(size)[:40]}, not of {sizes} or all (-1)")
    return size


def _four_bits(bits: object, where: str) -> None:
    if bits != 4:
        raise refused(f"{where} of {str(bits)[:40]} bits, not of 4")


def _settings(found: Mapping[str, Any], able: Mapping[str, tuple[object, ...]], where: str) -> None:
    for name, values in able.items():
        if (value := found.get(name)) not in values:
            raise refused(f"{where} with {name} {str(value)[:80]}")


# ---- AWQ -------------------------------------------------------------------------------------------------------------


def of_awq(found: Mapping[str, Any]) -> Int4Format:
    """The format of a file of `quant_method: awq`."""
    _four_bits(found.get("bits", found.get("w_bit")), "awq")
    if (version := str(found.get("version") or found.get("format") or "gemm").lower()) != "gemm":
        raise refused(f"awq of version {version[:40]}, not gemm")
    if found.get("backend") == "llm-awq":  # others name kernels, which read what autoawq writes
        raise refused("awq with backend llm-awq")
    _settings(found, _AWQ_SETTINGS, "awq")
    return Int4Format(Packing.AWQ, _group_of(found.get("group_size", found.get("q_group_size")), "awq"))


_AWQ_SETTINGS: dict[str, tuple[object, ...]] = {
    "zero_point": (None, True)
}  # what each may say; absent is None


# ---- GPTQ ------------------------------------------------------------------------------------------------------------


def of_gptq(found: Mapping[str, Any]) -> Int4Format:
    """The format of a file of `quant_method: gptq`."""
    _four_bits(found.get("bits"), "gptq")
    _settings(found, _GPTQ_SETTINGS, "gptq")
    packing = found.get("checkpoint_format") or found.get("format") or Packing.GPTQ.value
    if packing not in (Packing.GPTQ.value, Packing.GPTQ_V2.value):
        raise refused(f"gptq of checkpoint_format {str(packing)[:40]}")
    return Int4Format(Packing(packing), _group_of(found.get("group_size"), "gptq"))


def kept_of_gptq(found: Mapping[str, Any]) -> list[str]:
    """Patterns of the linears that such a file leaves in 16 bits: no writer quantizes routers of experts.

    `dynamic` may say other things of a module, which is refused.
    """
    rules = found.get("dynamic") or {}
    if not isinstance(rules, Mapping) or not all(str(rule).startswith("-:") for rule in rules):
        raise refused(f"gptq with dynamic {str(rules)[:80]}")
    return [*(f"re:{rule.removeprefix('-:')}" for rule in rules), *_ROUTERS]


_GPTQ_SETTINGS: dict[str, tuple[object, ...]] = {
    "desc_act": (None, False),
    "is_marlin_format": (None, False),
    "lm_head": (None, False),
    "modules_in_block_to_quantize": (None, [], ()),
    "pack_dtype": (None, "int32"),
}


# ---- compressed-tensors ----------------------------------------------------------------------------------------------


def of_pack_quantized(group: Mapping[str, Any]) -> Int4Format:
    """The format of a group of modules of `pack-quantized`."""
    weights, where = group.get("weights"), "pack-quantized"
    if not isinstance(weights, Mapping):
        raise refused("compressed-tensors without weights")
    if group.get("input_activations"):
        raise refused("input_activations of pack-quantized")
    if (kind := weights.get("type", "int")) != "int":
        raise refused(f"weights of pack-quantized in {str(kind)[:40]}")
    _four_bits(weights.get("num_bits"), where)
    _settings(weights, _PACKED_SETTINGS, where)
    strategy, size = weights.get("strategy"), weights.get("group_size")
    if strategy not in ("group", "channel"):
        raise refused(f"pack-quantized of strategy {strategy}")
    inputs = None if strategy == "channel" else _group_of(size, where)
    return Int4Format(Packing.COMPRESSED, inputs, symmetric=bool(weights.get("symmetric", True)))


_PACKED_SETTINGS: dict[str, tuple[object, ...]] = {
    "dynamic": (None, False),
    # others scatter groups over the inputs
    "actorder": (None, False, "weight", "static"),
}
