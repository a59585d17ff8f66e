"""Which engine computes a model, as a table: who builds by the device, by its kernels and by whose code the model is.

Nothing else decides that. `load` finds the three, each once: the device is one that `resolve_device` gave, the code is
the setting `model_impl` and what the folder holds, and the kernels are what the CPU and its compiler can. Where the
table has one row for a device, nothing is looked for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from shared.engine.attention.flashinfer_package import missing_kernels_named
from shared.engine.checkpoint.dtypes import dtypes_on_cpu
from shared.engine.checkpoint.memory_plan import context_bound
from shared.engine.checkpoint.model_config import ModelConfig
from shared.engine.checkpoint.model_impl import read_config
from shared.engine.checkpoint.transformers_config import FallbackConfig
from shared.engine.config import EngineConfig, ModelImpl
from shared.engine.cpu.cpu_engine import blocked_decoder, compiled_decoder, load_on_cpu, transformers_model
from shared.engine.cpu.kernel_choice import (
    KernelChoice,
    KernelKind,
    choose_kernels,
    transformers_choice,
)
from shared.engine.cuda.assembly import platform_for
from shared.engine.cuda.loading import load_on
from shared.engine.cuda.platform import Platform
from shared.engine.model.weights import OnProgress
from shared.engine.parallel.shares import ModelShare, Share
from shared.engine.parts import Engine, Followers, LoadJob, OnLogits
from shared.primitives.errors import ConfigError

Build = Callable[[LoadJob, KernelChoice], Engine]


def _on_gpu(job: LoadJob, _kernels: KernelChoice) -> Engine:
    platform = _platform(job)
    with missing_kernels_named():
        return load_on(platform, job)


def _on_host(job: LoadJob, _kernels: KernelChoice) -> Engine:
    return load_on(_platform(job), job)


def _platform(job: LoadJob) -> Platform:
    if (followers := job.followers) is None:
        return platform_for(job.config, Share(), None)
    assert isinstance(job.shape, ModelConfig)
    share = ModelShare(job.shape, Share(0, followers.ranks)).share  # refused before others are waited for
    return platform_for(job.config, share, followers.meeting)


BUILDERS: dict[tuple[str, KernelKind, ModelImpl], Build] = {
    ("cpu", "compiled", "segue"): partial(load_on_cpu, compiled_decoder),
    ("cpu", "torch", "segue"): partial(load_on_cpu, blocked_decoder),
    ("cpu", "torch", "transformers"): partial(load_on_cpu, transformers_model),
    ("cuda", "flashinfer", "segue"): _on_gpu,
    ("cuda-on-cpu", "torch", "segue"): _on_host,
}
DEVICES = tuple(dict.fromkeys(device for device, _, _ in BUILDERS))


def resolve_device(device: str) -> str:
    """auto is cuda where torch finds a GPU, and else cpu. `ConfigError` for a device that there is not."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    _require_device(device)
    return device


def load(
    folder: Path,
    config: EngineConfig,
    *,
    on_progress: OnProgress = lambda _what, _share: None,
    on_logits: OnLogits | None = None,
    followers: Followers | None = None,
) -> Engine:
    """Load the Hugging Face folder. `followers`: other ranks that load it as well, not on cpu.

    Raises `ModelError` when the folder is at fault, `ConfigError` when a setting is, `StartError` when the GPU is.
    """
    assert config.device != "auto", "a device is resolved before"
    _require_device(config.device)
    asked = _asked_impl(config)
    if config.device == "cpu":  # before anything is read, and kernels are compiled
        dtypes_on_cpu(config.dtype, config.kv_cache_dtype, blocks=False)
        if config.kv_layout != "auto":
            raise ConfigError(
                f"kv_layout {config.kv_layout} is one of cuda, and this device is cpu: leave it at auto"
            )
    shape, impl = _read_shape(folder, config, asked)
    job = LoadJob(folder, config, shape, on_progress, on_logits, followers)
    kernels = _kernels(job, impl)
    return BUILDERS[config.device, kernels.kind, impl](job, kernels)


def _require_device(device: str) -> None:
    if device not in DEVICES:
        raise ConfigError(f"unsupported device: {device}; supported are auto, {', '.join(DEVICES)}")


def _asked_impl(config: EngineConfig) -> ModelImpl:
    """The setting; not auto where the table leaves no choice."""
    able = tuple(dict.fromkeys(impl for device, _, impl in BUILDERS if device == config.device))
    if config.model_impl not in ("auto", *able):
        raise ConfigError(f"model_impl {config.model_impl} needs device cpu, this one is {config.device}")
    return able[0] if len(able) == 1 else config.model_impl


def _read_shape(
    folder: Path, config: EngineConfig, asked: ModelImpl
) -> tuple[ModelConfig | FallbackConfig, ModelImpl]:
    """The model's shape at the context of this engine, and whose code computes it."""
    shape = read_config(folder, asked)
    context_len, _ = context_bound(shape, config.context_len)
    if isinstance(shape, FallbackConfig):
        return shape, "transformers"
    return shape.at_context(context_len), "segue"


def _kernels(job: LoadJob, impl: ModelImpl) -> KernelChoice:
    config = job.config
    if impl == "transformers":
        return transformers_choice()
    assert isinstance(job.shape, ModelConfig)
    able = [kernels for device, kernels, by in BUILDERS if (device, by) == (config.device, impl)]
    if len(able) == 1:
        return KernelChoice(able[0])
    return choose_kernels(
        config.kernels, config.kernels_folder, lambda: job.on_progress("compiling kernels", 0.0)
    )
