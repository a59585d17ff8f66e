"""Where the CUDA engine's parts come from: a GPU with FlashInfer, or a CPU with plain torch.

The second is for tests and rehearsals: all but the kernels' own arithmetic is the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shared.engine.attention.flashinfer import AttentionKernels, Capability, FlashInferAttention, check_bounds
from shared.engine.attention.flashinfer_package import aot_folder, check_compiled_for, flashinfer_package
from shared.engine.attention.flashinfer_workspace import Processors, workspace_bytes
from shared.engine.attention.protocol import PlanGuard, StreamAttention
from shared.engine.attention.reference import ReferenceAttention
from shared.engine.checkpoint.dtypes import Dtypes
from shared.engine.checkpoint.experts_config import Routing
from shared.engine.checkpoint.kv_cache import KVCache
from shared.engine.checkpoint.model_config import ModelConfig
from shared.engine.cuda.host_stream import HostStream
from shared.engine.cuda.kernels.expert_routing import GpuRouting
from shared.engine.cuda.kernels.fp8_inputs import CudaRounding
from shared.engine.cuda.kernels.gemv import Gemv
from shared.engine.cuda.kernels.head_kernels import CudaHeadWriter
from shared.engine.cuda.kernels.int4_tiles import CudaTiles
from shared.engine.cuda.kernels.packed_experts import GpuExperts, PackedKernels, unpacked_bytes
from shared.engine.cuda.kernels.step_kernels import CudaKernels, ReferenceKernels, StepKernels
from shared.engine.cuda.memory import GRAPH_TOKENS, DeviceMemory
from shared.engine.model.experts import GroupedExperts, check_experts, has_grouped
from shared.engine.model.ops import Bank, ExpertChoice, ExpertProducts, Gated, Head, Linear, Ops
from shared.engine.model.rank_ops import RankOps
from shared.engine.model.routing import Router
from shared.engine.model.torch_ops import TorchOps
from shared.engine.parallel.collectives import ALONE, Collectives
from shared.engine.parallel.shares import Share
from shared.engine.quantized.linears import NONE, ON_HOST, NarrowProducts
from shared.engine.streams import Mark, Stream, Work
from shared.primitives.errors import ConfigError, StartError

_HOST_GRAPH_TOKENS = 64  # in plain torch padding costs what requests do


@dataclass(frozen=True)
class Platform:
    """What a `CudaDevice` is built on."""

    device: torch.device
    forward: Stream
    copies: Stream
    ops: Ops
    kernels: StepKernels
    attention: Callable[[ModelConfig, KVCache, int, torch.dtype], StreamAttention]  # slots, type of queries
    check: Callable[[ModelConfig, Dtypes], None]  # raises `ConfigError` for what kernels do not support
    narrow: NarrowProducts  # what it multiplies in fewer than 16 bits
    capability: tuple[int, int] | None  # of the GPU
    memory: DeviceMemory | None  # of the GPU
    graph_tokens: int  # of an EXTEND step that a graph takes, at most
    description: str
    determinism: str  # what tokens depend on beside the model: part of a worker's fingerprint
    collectives: Collectives = ALONE  # those of `ops`


def host_platform(threads: int, collectives: Collectives = ALONE) -> Platform:
    """Plain torch on threads of the CPU."""
    return host_platform_on(HostStream(threads), HostStream(1), collectives)


def host_platform_on(forward: Stream, copies: Stream, collectives: Collectives = ALONE) -> Platform:
    """Plain torch on these streams, perhaps of one of several ranks."""
    ranks = collectives.share.ranks
    return Platform(
        torch.device("cpu"),
        forward,
        copies,
        TorchOps() if ranks == 1 else RankOps(TorchOps(), collectives),
        ReferenceKernels(),
        lambda config, cache, slots, _dtype: ReferenceAttention(config, cache, forward, slots),
        check=lambda _config, _dtypes: None,
        narrow=ON_HOST,
        capability=None,
        memory=None,
        graph_tokens=_HOST_GRAPH_TOKENS,
        description="cpu by the path of a GPU" + (f", {ranks} ranks" if ranks > 1 else ""),
        determinism=f"cuda-on-cpu,torch-{torch.__version__}" + (f",tp={ranks}" if ranks > 1 else ""),
        collectives=collectives,
    )


def check_model(
    config: ModelConfig, dtypes: Dtypes, *, capability: Capability, deterministic: bool = False
) -> None:
    """Raise `ConfigError` for a model that a GPU of this compute capability does not compute."""
    check_bounds(config, dtypes.weights, capability, deterministic=deterministic)
    if config.has_experts:
        if deterministic:
            raise ConfigError(
                "deterministic: true is not for models with experts: the tokens of a batch share their products"
            )
        check_experts(config, dtypes.weights, capability)
    NarrowProducts.on_gpu(capability, deterministic=deterministic).check(config.quantization, dtypes.weights)


def gpu_workspace(
    config: ModelConfig, slots: int, processors: Processors, narrow: NarrowProducts, *, unpacks: bool = False
) -> int:
    """Bytes beside weights and pages, for a model and so many slots. `unpacks`: packed experts, where rows are many."""
    dequantized = narrow.dequantized_bytes(config.quantization, config.linears())
    # Graphs keep memory of their own, but all share what experts are unpacked into.
    unpacked = unpacked_bytes(config) if unpacks else 0
    return workspace_bytes(config, slots, processors) + 2 * dequantized + unpacked


def use_gpu_of(share: Share, *, deterministic: bool) -> None:
    """Take the GPU of a rank. Raises `ConfigError` where there are too few, or ranks cannot keep what is asked."""
    found = torch.cuda.device_count()
    if found < share.ranks:
        raise ConfigError(
            f"tensor_parallel_size {share.ranks} needs as many GPUs, this process sees {found}: lower it, or give the "
            "worker more"
        )
    if deterministic:
        raise ConfigError(
            "deterministic: true is for one GPU: how NCCL adds up what ranks computed depends on the batch"
        )
    torch.cuda.set_device(share.rank)


def cuda_platform(deterministic: bool, collectives: Collectives = ALONE) -> Platform:
    """FlashInfer on the GPU. Raises `StartError` where there is none, or none that will do."""
    capability = find_gpu()
    if deterministic:
        make_products_deterministic()
    device = torch.device("cuda", torch.cuda.current_device())
    free, total = torch.cuda.mem_get_info(device)
    flashinfer = flashinfer_package()
    check_compiled_for(capability, aot_folder())
    forward, copies = CudaStream(device), CudaStream(device)
    heads = CudaHeadWriter.compiled(device)
    narrow = NarrowProducts.on_gpu(
        capability,
        deterministic=deterministic,
        dequantize=CudaTiles.compiled(device),
        rounding=CudaRounding.compiled(device),
    )

    def attention(config: ModelConfig, cache: KVCache, slots: int, dtype: torch.dtype) -> FlashInferAttention:
        return FlashInferAttention(
            config,
            cache,
            AttentionKernels(flashinfer, heads, dtype),
            lambda: PlanGuard(forward.record),
            requests=slots,
            deterministic=deterministic,
        )

    workspace = partial(
        gpu_workspace, processors=Processors.of(device), narrow=narrow, unpacks=has_grouped(capability)
    )
    ops = FlashInferOps(
        flashinfer,
        # A row's bits may depend on the number of rows, as with any library.
        None if deterministic else Gemv.compiled(device),
        narrow,
        experts=GpuExperts(partial(PackedKernels.compiled, device), capability),
        routing=GpuRouting.compiled(device),
    )
    ranks, name = collectives.share.ranks, torch.cuda.get_device_name(device)
    versions = f"torch-{torch.__version__},cuda-{torch.version.cuda},flashinfer-{flashinfer.__version__}"
    mode = "deterministic" if deterministic else "default"
    return Platform(
        device,
        forward,
        copies,
        ops if ranks == 1 else RankOps(ops, collectives),
        CudaKernels.compiled(device),
        attention,
        check=partial(check_model, capability=capability, deterministic=deterministic),
        narrow=narrow,
        capability=capability,
        memory=DeviceMemory(total, free, workspace),
        graph_tokens=GRAPH_TOKENS,
        description=f"{name}, FlashInfer {flashinfer.__version__}" + (f", {ranks} GPUs" if ranks > 1 else ""),
        determinism=f"{name},{versions},{mode}" + (f",tp={ranks}" if ranks > 1 else ""),
        collectives=collectives,
    )


# ---- is there a GPU that will do? ------------------------------------------------------------------------------------
CAPABILITY_MIN = (7, 5)  # FlashInfer's
# torch's name since 2.9, and the one before
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def find_gpu() -> tuple[int, int]:
    """The compute capability of the GPU. Raises `StartError` or `ConfigError` where it cannot be used."""
    if torch.version.cuda is None:
        raise StartError(
            f"device cuda needs torch's build for CUDA, found {torch.__version__}: install segue-llm[cuda], "
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


# ---- FlashInfer's kernels, and cuBLAS where torch has the better one -------------------------------------------------
class FlashInferOps:
    """See `Ops`."""

    share = Share()

    def __init__(
        self,
        flashinfer: Any,
        gemv: Gemv | None = None,
        narrow: NarrowProducts = NONE,
        experts: Callable[[Bank, Gated], ExpertProducts] = GroupedExperts,
        routing: Callable[[Routing, Tensor | None, torch.device], ExpertChoice] = Router,
    ) -> None:
        """`flashinfer` is the package, see `flashinfer_package`; `gemv` computes products of few rows.

        `experts`: see `Ops`; within `check_experts`. `routing`: see `Ops`.
        """
        self._flashinfer = flashinfer
        self._gemv = gemv
        self.narrow_linear = narrow.linear  # see `Ops`
        self.experts = experts
        self.routing = routing

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """See `Ops`."""
        gemv, many = self._gemv, partial(torch.nn.functional.linear, weight=weight, bias=bias)
        if gemv is None or not (few := gemv.rows_max(weight)):
            return many

        def product(x: Tensor) -> Tensor:
            if len(x) > few:
                return many(x)
            return gemv(x, weight, bias, x.new_empty(len(x), len(weight)))

        return product

    def head(self, weight: Tensor) -> Head:
        """See `Ops`."""
        gemv = self._gemv
        few = 0 if gemv is None else gemv.rows_max(weight)

        def product(x: Tensor, logits: Tensor) -> Tensor:
            if gemv is not None and len(x) <= few:
                return gemv(x, weight, None, logits)
            return torch.mm(x, weight.t(), out_dtype=torch.float32, out=logits)

        return product

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """See `Ops`; x [tokens, size] or [tokens, heads, size], whose rows may lie apart."""
        normed: Tensor = self._flashinfer.rmsnorm(x, weight, epsilon)
        return normed

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        """See `Ops`; both are overwritten."""
        self._flashinfer.fused_add_rmsnorm(x, residual, weight, epsilon)
        return x, residual

    def sum(self, x: Tensor) -> Tensor:
        """See `Ops`."""
        return x

    def sum_add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        """See `Ops`."""
        return self.add_rms_norm(x, residual, weight, epsilon)

    def gather(self, x: Tensor) -> Tensor:
        """See `Ops`."""
        return x.unsqueeze(0)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """See `Ops`."""
        product: Tensor = self._flashinfer.silu_and_mul(gate_up)
        return product

    def gelu_and_mul(self, gate_up: Tensor) -> Tensor:
        """See `Ops`; of torch, as no family that needs it has been brought to GPUs yet."""
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.gelu(gate, approximate="tanh") * up


# ---- Torch's streams and events as `Stream` and `Mark`, and CUDA graphs ----------------------------------------------


class CudaMark:
    """`Mark` by an event that lets the waiting thread sleep: a spinning one would take a core from the routers."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event: Any = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        self.event.record(stream)

    def wait(self) -> None:
        """See `Mark`."""
        self.event.synchronize()

    def passed(self) -> bool:
        """See `Mark`."""
        try:
            return bool(self.event.query())
        except RuntimeError:  # a kernel failed
            return True

    def seconds_since(self, earlier: Mark) -> float:
        """See `Mark`."""
        assert isinstance(earlier, CudaMark)
        return float(earlier.event.elapsed_time(self.event)) / 1000


class CudaStream:
    """`Stream` on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._graphs: Any = None  # the memory pool that captured graphs share

    def buffer(self, words: int) -> Tensor:
        """See `Stream`."""
        return torch.zeros(words, dtype=torch.int32, pin_memory=True)

    def run(self, work: Work) -> None:
        """See `Stream`."""
        with self.on_host():
            work()

    def upload(self, target: Tensor, source: Tensor) -> None:
        """See `Stream`."""
        self.run(lambda: _copy(target, source))

    def download(self, target: Tensor, source: Tensor) -> None:
        """See `Stream`."""
        self.run(lambda: _copy(target, source))

    def record(self) -> CudaMark:
        """See `Stream`."""
        return CudaMark(self._stream)

    def wait_for(self, mark: Mark) -> None:
        """See `Stream`."""
        assert isinstance(mark, CudaMark)
        self._stream.wait_event(mark.event)

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """See `Stream`."""
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            yield

    def capture(self, work: Work) -> Work:
        """See `Stream`. The work must have run once before: libraries allocate and choose kernels at first use.

        Other threads may use the GPU meanwhile, such as those of a transfer.
        """
        graph = torch.cuda.CUDAGraph()
        with (
            torch.inference_mode(),
            torch.cuda.graph(
                graph, pool=self._graphs, stream=self._stream, capture_error_mode="thread_local"
            ),
        ):
            work()
        self._graphs = graph.pool()
        return graph.replay

    def synchronize(self) -> None:
        """See `Stream`."""
        torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """See `Stream`."""
        self._stream.synchronize()


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source, non_blocking=True)
