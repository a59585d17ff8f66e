"""How the linears of a checkpoint are stored, read from `quantization_config` of its `config.json`.

A format says what a linear is made of, what that takes in memory, and what it is called (see `fp8_formats`). Embedding,
head and norms stay as they are stored, and so does what the file lists as left out. Everything else is refused by name
before a weight is read. Knows no torch.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shared.engine.quantized.fp8_formats import Fp8Format, of_compressed_tensors, of_fp8
from shared.engine.quantized.int4_formats import Int4Format, kept_of_gptq, of_awq, of_gptq, of_pack_quantized
from shared.engine.quantized.patterns import NameMatch, NamesKept
from shared.engine.quantized.unsupported import refused
from shared.primitives.errors import ModelError

IN_LAYERS = "model.layers."
_EXPERT = re.compile(r"\.experts\.\d+\.")
WeightFormat = Fp8Format | Int4Format


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
        raise refused(str(found)[:40])
    method = found.get("quant_method", "unnamed")
    if method == "compressed-tensors":
        form, entries, match = _compressed_tensors(found), found.get("ignore"), NameMatch.WHOLE
    elif method == "fp8":
        form, match = of_fp8(found), NameMatch.PREFIXES
        entries = found.get("modules_to_not_convert") or found.get("ignored_layers")
    elif method == "awq":
        form, entries, match = of_awq(found), found.get("modules_to_not_convert"), NameMatch.PARTS
    elif method == "gptq":
        form, entries, match = of_gptq(found), kept_of_gptq(found), NameMatch.WHOLE
    else:
        raise refused(str(method))
    if not isinstance(entries, list | tuple | None) or not all(
        isinstance(each, str) for each in entries or ()
    ):
        raise ModelError("the list of modules that are not quantized should hold names")
    kept = NamesKept(entries or (), match).among([name for group in linears for name in group])
    for group in linears:
        if 0 < sum(name in kept for name in group) < len(group):
            parts = ", ".join(f"{name} {'in 16 bits' if name in kept else form.name}" for name in group)
            raise ModelError(f"linears that are computed as one need one format, found {parts}")
    return Quantization(form, tuple(sorted(kept)))


def check_sizes(quantization: Quantization, linears: Iterable[Sequence[tuple[str, int, int]]]) -> None:
    """Raise `ModelError` for a linear whose size the format does not take; `linears` as `ModelConfig` gives them."""
    for name, outputs, inputs in (each for group in linears for each in group):
        if isinstance(form := quantization.format_of(name), Int4Format):
            form.check(name, outputs, inputs)


# ---- compressed-tensors: groups of modules, each with a scheme of its own --------------------------------------------


def _compressed_tensors(found: Mapping[str, Any]) -> WeightFormat:
    form = found.get("format")
    if form not in _COMPRESSED:
        raise refused(f"compressed-tensors of format {form}")
    if found.get("kv_cache_scheme"):
        raise refused("kv_cache_scheme of compressed-tensors (scales of keys and values)")
    for name in ("sparsity_config", "transform_config"):
        content = found.get(name)
        if content and not (isinstance(content, Mapping) and content.get("format") == "dense"):
            raise refused(f"{name} of compressed-tensors")
    groups = found.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        count = len(groups) if isinstance(groups, Mapping) else "no"
        raise refused(f"compressed-tensors of {count} groups of modules, not one")
    (group,) = groups.values()
    if not isinstance(group, Mapping) or group.get("targets") != ["Linear"]:
        targets = group.get("targets") if isinstance(group, Mapping) else group
        raise refused(f"compressed-tensors of {str(targets)[:80]}, not of all Linear")
    if group.get("format") not in (None, form):
        raise refused(f"compressed-tensors of format {group['format']}")
    if group.get("output_activations"):
        raise refused("output_activations of compressed-tensors")
    return _COMPRESSED[form](group)


_COMPRESSED: dict[object, Callable[[Mapping[str, Any]], WeightFormat]] = {
    "float-quantized": of_compressed_tensors,
    "pack-quantized": of_pack_quantized,
}
