"""The one place that imports FlashInfer: only on a GPU, and with what it reads from the environment at import.

The range in pyproject.toml begins with the one version whose attention has run on a GPU. What Segue does not call is no
reason for it: filters that can hang below 0.6.14 (flashinfer#3610), products of experts that can in it
(flashinfer#3971). From 0.6.15 attention over pages reckons the places of values apart from those of keys
(flashinfer#3684), which is slower until flashinfer#4736.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shared.primitives.errors import StartError

ARCHS_FILE = "archs.txt"  # of a folder of compiled modules: what they have code for


def flashinfer_package() -> Any:
    """The package `flashinfer`. Raises `StartError` if it cannot be imported."""
    # Its norms would else be compiled by nvidia-cutlass-dsl, which Segue does not install.
    os.environ["FLASHINFER_USE_CUDA_NORM"] = "1"
    try:
        import flashinfer
    except ImportError as error:
        raise StartError(
            f"FlashInfer cannot be imported ({error}): install segue-llm[cuda], or use device cpu"
        ) from None
    return flashinfer


def aot_folder() -> Path:
    """Where FlashInfer looks for modules that were compiled ahead of time."""
    return Path(importlib.import_module("flashinfer.jit").env.FLASHINFER_AOT_DIR)


def check_compiled_for(capability: tuple[int, int], folder: Path) -> None:
    """Raises `StartError` if the modules in `folder` have no code for a GPU of this compute capability.

    A module loads on any GPU, and its first kernel would fail. Without `archs.txt` nothing is known, and nothing said.
    """
    try:
        archs = (folder / ARCHS_FILE).read_text(encoding="ascii").split()
    except FileNotFoundError:
        return
    if not any(runs_on(arch, capability) for arch in archs):
        gpu = ".".join(map(str, capability))
        raise StartError(
            f"FlashInfer's kernels are compiled for {', '.join(archs)}, this GPU has compute capability {gpu}: "
            "build the image with it in CUDA_ARCHS, or use device cpu"
        )


def runs_on(arch: str, capability: tuple[int, int]) -> bool:
    """Whether code for `arch`, as nvcc writes it, runs on a GPU: 8.0 on 8.0 to 8.9, 9.0a on 9.0 alone, 12.0f on 12.x.

    By NVIDIA's rules for code without PTX (CUDA C++ Programming Guide, "Application Compatibility", "Family-Specific
    Architecture Features").
    """
    major, minor = arch.rstrip("af").split(".")
    if arch.endswith("a"):
        return capability == (int(major), int(minor))
    return capability[0] == int(major) and capability[1] >= int(minor)


@contextmanager
def missing_kernels_named() -> Iterator[None]:
    """`StartError` where FlashInfer may not compile a kernel that was not compiled ahead of time, as in our image."""
    try:
        yield
    except RuntimeError as error:
        if type(error).__name__ != "MissingJITCacheError":
            raise
        raise StartError(
            f"FlashInfer's kernels for this GPU or model are not in the image ({str(error).splitlines()[0]}): build it "
            "with this architecture in CUDA_ARCHS, or use device cpu"
        ) from None
