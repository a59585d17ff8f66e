"""Where the CUDA engine's parts come from: a GPU with FlashInfer, or a CPU with plain torch.

The second is for tests and rehearsals: all but the kernels' own arithmetic is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from shared.engine.attention.flashinfer import FlashInferAttention, check_bounds
from shared.engine.attention.flashinfer_package import aot_folder, check_compiled_for, flashinfer_package
from shared.engine.attention.flashinfer_workspace import Processors, workspace_bytes
from shared.engine.attention.plan_guard import PlanGuard
from shared.engine.attention.protocol import StreamAttention
from shared.engine.attention.reference import ReferenceAttention
from shared.engine.checkpoint.dtypes import Dtypes
from shared.engine.checkpoint.kv_cache import KVCache
from shared.engine.checkpoint.model_config import ModelConfig
from shared.engine.cuda.gpu import find_gpu, make_products_deterministic
from shared.engine.cuda.host_stream import HostStream
from shared.engine.cuda.kernels import CudaKernels
from shared.engine.cuda.memory import DeviceMemory
from shared.engine.cuda.ops import FlashInferOps
from shared.engine.cuda.reference import ReferenceKernels
from shared.engine.cuda.step_kernels import StepKernels
from shared.engine.cuda.stream import CudaStream
from shared.engine.model.ops import Ops
from shared.engine.model.torch_ops import TorchOps
from shared.engine.streams import Stream


@dataclass(frozen=True)
class Platform:
    """What a `CudaDevice` is built on."""

    device: torch.device
    forward: Stream
    copies: Stream
    ops: Ops
    kernels: StepKernels
    attention: Callable[[ModelConfig, KVCache, int], StreamAttention]  # the last: slots
    check: Callable[[ModelConfig, Dtypes], None]  # raises `ConfigError` for what kernels do not support
    capability: tuple[int, int] | None  # of the GPU
    memory: DeviceMemory | None  # of the GPU
    description: str
    determinism: str  # what tokens depend on beside the model: part of a worker's fingerprint


def host_platform(threads: int) -> Platform:
    """Plain torch on threads of the CPU."""
    return host_platform_on(HostStream(threads), HostStream(1))


def host_platform_on(forward: Stream, copies: Stream) -> Platform:
    """Plain torch on these streams."""
    return Platform(
        torch.device("cpu"),
        forward,
        copies,
        TorchOps(),
        ReferenceKernels(),
        lambda config, cache, slots: ReferenceAttention(config, cache, forward, slots),
        check=lambda _config, _dtypes: None,
        capability=None,
        memory=None,
        description="cpu by the path of a GPU",
        determinism=f"cuda-on-cpu,torch-{torch.__version__}",
    )


def cuda_platform(deterministic: bool) -> Platform:
    """FlashInfer on the GPU. Raises `StartError` where there is none, or none that will do. Has not run on one yet."""
    capability = find_gpu()
    if deterministic:
        make_products_deterministic()
    device = torch.device("cuda", torch.cuda.current_device())
    free, total = torch.cuda.mem_get_info(device)
    flashinfer = flashinfer_package()
    check_compiled_for(capability, aot_folder())
    forward, copies = CudaStream(device), CudaStream(device)

    def attention(config: ModelConfig, cache: KVCache, slots: int) -> FlashInferAttention:
        guard = PlanGuard(forward.record)
        return FlashInferAttention(
            config, cache, flashinfer, guard, requests=slots, deterministic=deterministic
        )

    def check(config: ModelConfig, dtypes: Dtypes) -> None:
        check_bounds(config, dtypes.kv, capability, deterministic=deterministic)

    name = torch.cuda.get_device_name(device)
    versions = f"torch-{torch.__version__},cuda-{torch.version.cuda},flashinfer-{flashinfer.__version__}"
    mode = "deterministic" if deterministic else "default"
    return Platform(
        device,
        forward,
        copies,
        FlashInferOps(flashinfer),
        CudaKernels.compiled(device),
        attention,
        check=check,
        capability=capability,
        memory=DeviceMemory(
            total, free, lambda config, slots: workspace_bytes(config, slots, Processors.of(device))
        ),
        description=f"{name}, FlashInfer {flashinfer.__version__}",
        determinism=f"{name},{versions},{mode}",
    )
