"""Loads a model folder into everything a worker needs, on the device that was asked for."""

from __future__ import annotations

from pathlib import Path

import torch

from shared.engine.attention.flashinfer_package import missing_kernels_named
from shared.engine.checkpoint.fallback_config import ModelImpl
from shared.engine.cpu.cpu_engine import load_on_cpu
from shared.engine.cpu.torch_device import OnLogits
from shared.engine.cuda.loading import load_on
from shared.engine.cuda.platform import cuda_platform, host_platform
from shared.engine.model.weights import OnProgress
from shared.engine.parts import Engine, Sizes
from shared.primitives.errors import ConfigError

DEVICES = ("cpu", "cuda", "cuda-on-cpu")


def resolve_device(device: str) -> str:
    """auto is cuda where torch finds a GPU, and else cpu. `ConfigError` for a device that there is not."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device not in DEVICES:
        raise ConfigError(f"unsupported device: {device}; supported are auto, {', '.join(DEVICES)}")
    return device


def load(
    folder: Path,
    sizes: Sizes,
    *,
    device: str = "auto",
    model_impl: ModelImpl = "auto",
    dtype: str = "auto",
    kv_cache_dtype: str = "auto",
    kernels: str = "auto",
    kernels_folder: str = "",
    threads: int = 1,
    deterministic: bool = False,
    on_progress: OnProgress = lambda _what, _share: None,
    on_logits: OnLogits | None = None,
) -> Engine:
    """Load the Hugging Face folder.

    `model_impl`, `kernels`, its folder and `threads` are a CPU's, `deterministic` is a GPU's.

    Raises `ModelError` when the folder is at fault, `ConfigError` when a setting is, `StartError` when the GPU is.
    """
    device = resolve_device(device)
    if device == "cpu":
        return load_on_cpu(
            folder,
            sizes,
            model_impl=model_impl,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            kernels=kernels,
            kernels_folder=kernels_folder,
            threads=threads,
            on_progress=on_progress,
            on_logits=on_logits,
        )
    if model_impl == "transformers":
        raise ConfigError(f"model_impl transformers needs device cpu, this one is {device}")
    platform = host_platform(threads) if device == "cuda-on-cpu" else cuda_platform(deterministic)
    with missing_kernels_named():
        return load_on(
            platform,
            folder,
            sizes,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            on_progress=on_progress,
            on_logits=on_logits,
        )
