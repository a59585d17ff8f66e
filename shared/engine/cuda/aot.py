"""Compiles the modules of FlashInfer that Segue calls ahead of time, for an image that has no compiler.

    python -m shared.engine.cuda.aot [--arch "8.0 9.0a"] [FOLDER]

FlashInfer compiles a module at the first call that needs it, unless FOLDER has it: by default `data/aot` of its own
package, where it looks. With FLASHINFER_DISABLE_JIT=1 a call that needs a module outside `MODULES` fails. Needs nvcc
below CUDA_HOME, a C++ compiler and ninja; no GPU and no driver. MAX_JOBS is how many compilers run at once.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ARCHS = "8.0 8.9 9.0a 10.0a 12.0f"  # A100, L4 and L40S, H100 and H200, B200, RTX PRO 6000
HEAD_DIMS = (128, 64, 256)
DTYPES = (torch.bfloat16, torch.float16)
NO_POSITIONS = 0  # keys are rotated before they are written


@dataclass(frozen=True)
class Module:
    """A function of `flashinfer.jit` that describes a module, and its arguments."""

    package: str
    generator: str
    arguments: tuple[Any, ...] = ()

    def spec(self) -> Any:
        """FlashInfer's JitSpec: `name`, and where it is compiled. FlashInfer has to know an architecture."""
        return getattr(importlib.import_module(self.package), self.generator)(*self.arguments)


def _attention(dtype: torch.dtype, head_dim: int, window: bool) -> tuple[Module, Module]:
    """Prefill, which is decode on tensor cores as well, and decode without them. A window is compiled in."""
    types = (dtype, dtype, dtype, torch.int32)  # queries, cache, results, indices
    shape = (head_dim, head_dim, NO_POSITIONS, window, False)  # the last: no logits cap
    return (
        Module("flashinfer.jit.attention", "gen_batch_prefill_module", ("fa2", *types, *shape, False)),
        Module("flashinfer.jit.attention", "gen_batch_decode_module", (*types, *shape)),
    )


MODULES = (
    Module("flashinfer.jit.page", "gen_page_module"),
    Module("flashinfer.jit.norm", "gen_norm_module"),
    Module("flashinfer.jit.rope", "gen_rope_module"),
    Module("flashinfer.jit.activation", "gen_act_and_mul_module", ("silu",)),
    Module("flashinfer.jit.sampling", "gen_sampling_module"),
    *(
        module
        for dtype in DTYPES
        for window in (False, True)
        for head_dim in HEAD_DIMS
        for module in _attention(dtype, head_dim, window)
    ),
)


def compile_modules(folder: Path | None, modules: Sequence[Module] = MODULES) -> list[Path]:
    """Compile what `folder` lacks of `modules` (None: FlashInfer's own) and return the libraries, one a module.

    Raises FlashInfer's RuntimeError with what the compiler said.
    """
    jit = importlib.import_module("flashinfer.jit")
    target = folder or jit.env.FLASHINFER_AOT_DIR
    specs = {target / spec.name / f"{spec.name}.so": spec for spec in (module.spec() for module in modules)}
    missing = {path: spec for path, spec in specs.items() if not path.exists()}
    jit.build_jit_specs(list(missing.values()), skip_prebuilt=False)
    for path, spec in missing.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(spec.jit_library_path, path)
    return list(specs)


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile all of `MODULES`; print each library and its size."""
    parser = argparse.ArgumentParser(prog="python -m shared.engine.cuda.aot", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, help="default: data/aot of the package flashinfer")
    parser.add_argument("--arch", default=ARCHS, help=f'GPU architectures, default: "{ARCHS}"')
    read = parser.parse_args(arguments)
    os.environ["FLASHINFER_CUDA_ARCH_LIST"] = read.arch  # read when FlashInfer is imported
    for path in compile_modules(read.folder):
        sys.stdout.write(f"{path.stat().st_size / 2**20:6.1f} MiB {path.name}\n")


if __name__ == "__main__":
    main()
