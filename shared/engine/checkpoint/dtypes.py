"""In which types a model computes and keeps its KV: what a device can do, against what was asked for.

A CPU computes in float32 alone: its kernels, and the linears of torch that give a row the same bits in any batch, have
no other type. Kernels of GPUs read queries in 16 bits, and KV pages in the same type or in 8 bits; bfloat16 exists from
compute capability 8.0 on (Ampere). The CUDA engine in plain torch takes what torch takes on CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shared.engine.quantized.formats import Quantization
from shared.engine.quantized.int4_formats import Int4Format
from shared.primitives.errors import ConfigError

EIGHT_BITS = torch.float8_e4m3fn  # of KV
_NAMES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8_e4m3": EIGHT_BITS,
}
_BFLOAT16_CAPABILITY = (8, 0)


@dataclass(frozen=True)
class Dtypes:
    """What a worker computes with."""

    weights: torch.dtype  # and of what lies between the layers
    kv: torch.dtype


def dtypes_on_cpu(dtype: str, kv_cache_dtype: str, *, blocks: bool) -> Dtypes:
    """auto is float32, and float16 for the KV of a folder with a GGUF file's `blocks`.

    Raises `ConfigError` for a type that the CPU engine has not.
    """
    reason = ", whose bits do not depend on the batch; other types need device cuda"
    halves_or_floats = (torch.float16, torch.float32) if blocks else (torch.float32, torch.float16)
    return Dtypes(
        _choose("dtype", dtype, [torch.float32], "on cpu", reason),
        _choose("kv_cache_dtype", kv_cache_dtype, halves_or_floats, "on cpu"),
    )


def dtypes_on_cuda(
    dtype: str, kv_cache_dtype: str, *, stored: torch.dtype, capability: tuple[int, int] | None
) -> Dtypes:
    """auto is the type of the `stored` weights where the device has it, else the first that it has.

    `capability` is the GPU's, None for plain torch on a CPU. Weights in float32 become bfloat16 on a GPU, and those in
    bfloat16 float16 where there is no bfloat16: numbers beyond 65,504 are then infinite. KV has the type of the
    weights, or 8 bits where that is asked for. Raises `ConfigError` for a type that the device has not.
    """
    if capability is None:
        able, where = [torch.float32, torch.bfloat16, torch.float16], "on cuda-on-cpu"
    elif capability >= _BFLOAT16_CAPABILITY:
        able, where = [torch.bfloat16, torch.float16], "on cuda"
    else:
        version = ".".join(map(str, capability))
        able, where = [torch.float16], f"on a GPU of compute capability {version} (bfloat16 needs 8.0)"
    able.sort(key=lambda each: each != stored)
    weights = _choose("dtype", dtype, able, where)
    reason = f": attention reads {dtype_name(weights)}, the type of the weights, or 8 bits"
    return Dtypes(weights, _choose("kv_cache_dtype", kv_cache_dtype, [weights, EIGHT_BITS], where, reason))


def preferred_dtype(stored: torch.dtype, quantization: Quantization | None) -> torch.dtype:
    """The type that `stored` stands for in `dtypes_on_cuda`.

    Files of 4-bit weights mostly have float16 beside them, which the kernel for those does not multiply in.
    """
    narrow = quantization is not None and isinstance(quantization.format, Int4Format)
    return torch.bfloat16 if narrow and stored == torch.float16 else stored


def dtype_name(dtype: torch.dtype) -> str:
    """As settings and fingerprints have it: `float16`."""
    return str(dtype).removeprefix("torch.")


def _choose(
    setting: str, name: str, able: Sequence[torch.dtype], where: str, reason: str = ""
) -> torch.dtype:
    """The type of this name if it is among `able`; for auto the first of them."""
    if name == "auto":
        return able[0]
    if _NAMES.get(name) not in able:
        *others, last = ["auto", *sorted(name for name, dtype in _NAMES.items() if dtype in able)]
        raise ConfigError(
            f"unsupported {setting}: {name}; supported {where} are {', '.join(others)} and {last}{reason}"
        )
    return _NAMES[name]
