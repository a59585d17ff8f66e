"""Which kernels can compute on this CPU, and the words and the fingerprint that say so.

Compiled kernels for the best instruction set of the CPU; without a compiler those of torch, which are several times
slower. That fallback is logged, and never taken when a setting names an instruction set.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import structlog
import torch

from shared.engine.native.build import BuildError, build, choose
from shared.engine.native.kernels import Kernels
from shared.primitives.errors import ConfigError

log = structlog.get_logger(__name__)

_COMPILED = "compiled-2"  # raised when the compiled kernels may round differently
_TORCH = "blocked-2"  # the same for attention and linears on torch


KernelKind = Literal["compiled", "torch", "flashinfer"]


@dataclass(frozen=True)
class KernelChoice:
    """The kernels of a process. Only those of a CPU are described here: a GPU's platform describes itself."""

    kind: KernelKind
    library: Kernels | None = None  # only of compiled kernels
    description: str = ""
    determinism: str = ""  # what may change the last bit of a result


def choose_kernels(
    name: str, folder: str = "", on_compile: Callable[[], None] = lambda: None
) -> KernelChoice:
    """`auto`, the name of an instruction set, or `torch`; `ConfigError` for a name that cannot be had here."""
    if name == "torch":
        return KernelChoice("torch", None, "kernels of torch", _torch_determinism())
    instruction_set = choose(name)
    try:
        library = Kernels(build(instruction_set, folder, on_compile))
    except BuildError as error:
        if name != "auto":
            raise ConfigError(f"{name} kernels were asked for, and {error}") from None
        log.warning("engine.kernels_missing", computing="with torch, several times slower", reason=str(error))
        description = f"kernels of torch, several times slower ({error})"
        return KernelChoice("torch", None, description, _torch_determinism())
    fused = "fused" if "fma" in instruction_set.needs else "separate"
    determinism = f"{_COMPILED},{fused},rope and sampler={_torch()}"
    return KernelChoice("compiled", library, f"{instruction_set.name} kernels", determinism)


def transformers_choice() -> KernelChoice:
    """transformers' own code on torch, which promises no row the same bits in another batch."""
    version = importlib.metadata.version("transformers")
    return KernelChoice(
        "torch",
        None,
        f"the code of transformers {version}, several times slower",
        f"transformers-{version},{_torch()}",
    )


def _torch_determinism() -> str:
    return f"{_TORCH},{_torch()}"


def _torch() -> str:
    """MKL chooses its code by the maker of the CPU; oneDNN and torch's own functions by the instruction set."""
    makers = {
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if line.startswith(("vendor_id", "CPU implementer"))
    }
    isa = torch.backends.cpu.get_cpu_capability()
    return f"torch-{torch.__version__},{isa},{'+'.join(sorted(makers))}"
