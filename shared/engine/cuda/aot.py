"""Compiles the modules of FlashInfer that Segue calls ahead of time, for an image that has no compiler.

    python -m shared.engine.cuda.aot --arch "9.0a" [FOLDER] [--dtype bfloat16] [--head-dim 64 128] [--fp8-kv]

FlashInfer compiles a module at the first call that needs it, unless FOLDER has it: by default `data/aot` of its own
package, where it looks. With FLASHINFER_DISABLE_JIT=1 a call that needs a module outside `modules()` fails. Needs nvcc
below CUDA_HOME, a C++ compiler and ninja; no GPU and no driver. MAX_JOBS is how many compilers run at once. Beside the
modules lies `archs.txt`, which says what GPUs they have code for: FlashInfer loads a module for any.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from shared.engine.attention.flashinfer_package import ARCHS_FILE, aot_folder

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


def _attention(dtype: torch.dtype, kept: torch.dtype, head_dim: int, window: bool) -> tuple[Module, Module]:
    """Prefill, which is decode on tensor cores as well, and decode without them. A window is compiled in."""
    types = (dtype, kept, dtype, torch.int32)  # queries, cache, results, indices
    shape = (head_dim, head_dim, NO_POSITIONS, window, False)  # the last: no logits cap
    return (
        Module("flashinfer.jit.attention", "gen_batch_prefill_module", ("fa2", *types, *shape, False)),
        Module("flashinfer.jit.attention", "gen_batch_decode_module", (*types, *shape)),
    )


def modules(
    dtypes: Iterable[torch.dtype] = DTYPES, head_dims: Iterable[int] = HEAD_DIMS, *, fp8_kv: bool = False
) -> tuple[Module, ...]:
    """What models of these dtypes and head_dims need; most of the time and size is attention's.

    `fp8_kv`: also for pages in 8 bits, which doubles that.
    """
    head_dims, pages = tuple(head_dims), (None, torch.float8_e4m3fn) if fp8_kv else (None,)
    return (
        Module("flashinfer.jit.norm", "gen_norm_module"),
        Module("flashinfer.jit.activation", "gen_act_and_mul_module", ("silu",)),
        *(
            module
            for kept, dtype, window, head_dim in product(pages, dtypes, (False, True), head_dims)
            for module in _attention(dtype, kept or dtype, head_dim, window)
        ),
    )


def compile_modules(wanted: Iterable[Module], folder: Path) -> list[Path]:
    """Compile what `folder` lacks, load all, and return the libraries, one a module.

    Raises RuntimeError with what the compiler said, or for a library that cannot be loaded.
    """
    jit = importlib.import_module("flashinfer.jit")
    specs = {folder / spec.name / f"{spec.name}.so": spec for spec in (module.spec() for module in wanted)}
    missing = {path: spec for path, spec in specs.items() if not path.exists()}
    jit.build_jit_specs(list(missing.values()), skip_prebuilt=False)
    for path, spec in missing.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(spec.jit_library_path, path)
    for path, spec in specs.items():
        spec.load(path)
    return list(specs)


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile all modules, or those of some models; print each library and its size."""
    parser = argparse.ArgumentParser(prog="python -m shared.engine.cuda.aot")
    parser.add_argument("folder", nargs="?", type=Path, help="default: data/aot of the package flashinfer")
    parser.add_argument(
        "--arch", required=True, help='compute capabilities, "9.0a 10.0f" (H100, B200 and B300) or more'
    )
    dtypes = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
    parser.add_argument("--dtype", nargs="+", choices=dtypes, default=list(dtypes), help="default: all")
    parser.add_argument("--head-dim", nargs="+", type=int, choices=HEAD_DIMS, default=HEAD_DIMS)
    parser.add_argument(
        "--fp8-kv", action="store_true", help="also for kv_cache_dtype fp8_e4m3; twice the modules"
    )
    parser.add_argument(
        "--list", action="store_true", help="print the names of the modules, and compile none"
    )
    read = parser.parse_args(arguments)
    os.environ["FLASHINFER_CUDA_ARCH_LIST"] = read.arch  # read when FlashInfer is imported
    wanted = modules([dtypes[name] for name in read.dtype], read.head_dim, fp8_kv=read.fp8_kv)
    if read.list:
        sys.stdout.writelines(f"{module.spec().name}\n" for module in wanted)
        return
    folder = read.folder or aot_folder()
    made = compile_modules(wanted, folder)
    (folder / ARCHS_FILE).write_text(f"{read.arch}\n", encoding="ascii")
    for path in made:
        sys.stdout.write(f"{path.stat().st_size / 2**20:6.1f} MiB {path.name}\n")


if __name__ == "__main__":
    main()
