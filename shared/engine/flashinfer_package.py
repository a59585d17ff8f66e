"""The one place that imports FlashInfer: only on a GPU, and with what it reads from the environment at import."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shared.errors import StartError


def flashinfer_package() -> Any:
    """The package `flashinfer`. Raises `StartError` if it cannot be imported."""
    # Its norms would else be compiled by nvidia-cutlass-dsl, which Segue does not install.
    os.environ["FLASHINFER_USE_CUDA_NORM"] = "1"
    try:
        import flashinfer
    except ImportError as error:
        raise StartError(
            f"FlashInfer cannot be imported ({error}): install segue[cuda], or use device cpu"
        ) from None
    return flashinfer


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
