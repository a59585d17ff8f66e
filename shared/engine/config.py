"""What a worker asks of an engine, in one value: made once from the worker's settings, and read where it counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ModelImpl = Literal["auto", "segue", "transformers"]
KVLayoutChoice = Literal["auto", "page-major-1", "head-major-1"]


@dataclass(frozen=True)
class Budget:
    """Bytes this process may use, and where the figure comes from."""

    memory_bytes: int
    origin: str


UNBOUNDED = Budget(2**62, "unbounded")


@dataclass(frozen=True)
class EngineConfig:
    """The settings of an engine. Defaults are those of `shared.worker.worker_config`, where each setting has its help.

    None means chosen by what memory allows, and explained in `Engine.description`. Names are checked by their readers,
    which raise `ConfigError` and say what is supported.
    """

    # How much it holds: `checkpoint.memory_plan` on a CPU, `cuda.memory` on a GPU.
    pages: int | None  # of the KV pool
    page_size: int  # tokens
    slots: int  # requests at a time
    max_total_tokens: int = 0  # what pages are chosen for; 0: no bound
    host_fraction: float = 0.0  # pages in host memory for each page of the pool
    context_len: int | None = None  # tokens of prompt and output
    extend_tokens: int = 8192  # of one EXTEND step at most; only on cuda
    budget: Budget = UNBOUNDED  # of the host
    device_memory_share: float = 0.9  # of the GPU's memory; only on cuda

    # Who computes: the table in `engine`.
    device: str = "cpu"  # one of `engine.DEVICES`: auto is resolved before, by `engine.resolve_device`
    model_impl: ModelImpl = "auto"
    kernels: str = "auto"  # an instruction set, or torch: `cpu.kernel_choice`; only on cpu
    kernels_folder: str = ""  # where compiled kernels are kept; empty: the user's cache folder

    # How it computes.
    dtype: str = "auto"  # of the weights: `checkpoint.dtypes`
    kv_cache_dtype: str = "auto"  # the same
    kv_layout: KVLayoutChoice = "auto"  # of pages: `checkpoint.kv_cache`; only on cuda
    threads: int = 1  # `cpu.cpu_engine`, and `cuda.platform` on cuda-on-cpu
    deterministic: bool = False  # no token depends on the batch: `cuda.platform`; on a CPU none ever does
