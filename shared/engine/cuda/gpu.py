"""What a process asks of the GPU and its libraries before anything is loaded, and sentences for what is missing."""

from __future__ import annotations

import os

import torch

from shared.primitives.errors import ConfigError, StartError

CAPABILITY_MIN = (7, 5)  # FlashInfer's
ALLOCATOR_VARIABLES = (
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
)  # torch's name since 2.9, and the one before


def find_gpu() -> tuple[int, int]:
    """The compute capability of the GPU. Raises `StartError` or `ConfigError` where it cannot be used."""
    if torch.version.cuda is None:
        raise StartError(
            f"device cuda needs torch's build for CUDA, found {torch.__version__}: install segue[cuda], "
            "or use the worker's image of target cuda, or device cpu"
        )
    if not torch.cuda.is_available():
        raise StartError(
            f"device cuda finds no GPU with torch {torch.__version__}: `nvidia-smi` should show one, and a driver of "
            "580 or newer. A container needs the NVIDIA container toolkit, a pod the resource nvidia.com/gpu"
        )
    _refuse_unreadable_memory()
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) < CAPABILITY_MIN:
        wanted, name = ".".join(map(str, CAPABILITY_MIN)), torch.cuda.get_device_name()
        raise ConfigError(
            f"FlashInfer's kernels need compute capability {wanted}, {name} has {major}.{minor}: use device cpu"
        )
    return major, minor


def _refuse_unreadable_memory() -> None:
    """Memory must come from cudaMalloc: other processes cannot read any other by cuda_ipc."""
    for name in ALLOCATOR_VARIABLES:
        settings = os.environ.get(name, "").replace(" ", "").split(",")
        if "expandable_segments:True" in settings:
            raise ConfigError(
                f"{name} has expandable_segments, whose memory other processes cannot read by cuda_ipc: leave it out"
            )
    if (backend := torch.cuda.get_allocator_backend()) != "native":
        raise ConfigError(
            f"torch allocates by {backend}, whose memory other processes cannot read by cuda_ipc: leave backend out of "
            f"{' and '.join(ALLOCATOR_VARIABLES)}"
        )


def make_products_deterministic() -> None:
    """Let cuBLAS sum in one order for every batch: without split-k, whose parts depend on the number of rows.

    As vLLM does it for GPUs of compute capability 9.0 and above (batch_invariant.py). Before the first product.
    """
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
    os.environ["CUBLASLT_WORKSPACE_SIZE"] = "1"
    torch.backends.cuda.preferred_blas_library("cublaslt")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = (False, False)
