"""Which kernels this process computes with, and the words and the fingerprint that say so.

Compiled ones for the best instruction set of the CPU, or torch's where there is no compiler: several times slower,
said aloud, and never chosen in silence over a name that was asked for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from shared.engine.native.build import BuildError, build, choose
from shared.engine.native.kernels import Kernels
from shared.errors import ConfigError

log = logging.getLogger(__name__)

_COMPILED = "compiled-1"  # raised when the compiled kernels may round differently
_TORCH = "blocked-2"  # the same for attention and linears on torch


@dataclass(frozen=True)
class KernelChoice:
    """The kernels of a process."""

    library: Kernels | None  # None: torch computes
    description: str
    determinism: str  # what may change the last bit of a result


def choose_kernels(
    name: str, folder: str = "", on_compile: Callable[[], None] = lambda: None
) -> KernelChoice:
    """`auto`, the name of an instruction set, or `torch`; `ConfigError` for a name that cannot be had here."""
    if name == "torch":
        return KernelChoice(None, "kernels of torch", _torch_determinism())
    instruction_set = choose(name)
    try:
        library = Kernels(build(instruction_set, folder, on_compile))
    except BuildError as error:
        if name != "auto":
            raise ConfigError(f"{name} kernels were asked for, and {error}") from None
        log.warning("computing with torch, several times slower: %s", error)
        return KernelChoice(None, f"kernels of torch, several times slower ({error})", _torch_determinism())
    fused = "fused" if "fma" in instruction_set.needs else "separate"
    determinism = f"{_COMPILED},{fused},rope and sampler={_torch()}"
    return KernelChoice(library, f"{instruction_set.name} kernels", determinism)


def _torch_determinism() -> str:
    return f"{_TORCH},{_torch()}"


def _torch() -> str:
    """MKL asks for the maker of the CPU, oneDNN and the vectors of torch's functions for the instruction set."""
    makers = {
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if line.startswith(("vendor_id", "CPU implementer"))
    }
    isa = torch.backends.cpu.get_cpu_capability()
    return f"torch-{torch.__version__},{isa},{'+'.join(sorted(makers))}"
