"""Settings that both kinds of worker have: the model, the device, the KV pool and how pages travel.

What only one role decides by lies in `prefill/config.py` and `decode/config.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal, Self

from pydantic import Field

from shared.engine.config import KVLayoutChoice, ModelImpl
from shared.kv.radix_cache import EvictionPolicy
from shared.process.process_config import ProcessConfig
from shared.process.settings import Count, Fraction, Port, PositiveInt, Seconds
from shared.scheduling.prompt_queue import QueueRules
from shared.scheduling.queue_policy import QueuePolicy
from shared.transfer.protocol import KvTransport

DeviceChoice = Literal["auto", "cpu", "cuda", "cuda-on-cpu"]
DEVICE_DESCRIPTION = (
    "Device that computes. auto is cuda where there is a GPU, else cpu. cuda-on-cpu is the CUDA engine in plain torch, "
    "for tests and rehearsals: slow."
)


class WorkerConfig(ProcessConfig):
    """Settings of every worker."""

    groups: ClassVar[Mapping[str, str]] = {
        "model": "model served_model_name context_len model_impl dtype kv_cache_dtype kv_layout",
        "device and memory": "device tensor_parallel_size threads memory_bytes device_memory_share deterministic "
        "page_size kv_pages max_total_tokens max_running_requests",
        "network": "links_port kv_transport kv_ports kv_interface kv_devices kv_allow_unauthenticated_tcp",
        "time limits": "step_seconds_max drain_seconds",
    }
    defaults_on_cuda: ClassVar[dict[str, object]] = {"max_running_requests": 256}

    model: str = Field(
        default="",
        description="Folder with safetensors, config and tokenizer. Names and Hub ids are resolved by `segue up`.",
    )
    served_model_name: str = Field(
        default="", description="Name of the model for clients. Empty: the name of its folder."
    )
    links_port: Port = Field(default=8002, description="Port that routers connect to. 0: any free port.")
    kv_ports: str = Field(
        default="20000-20999",
        pattern=r"^\d{1,5}-\d{1,5}$",
        description="Range of ports for KV pages (UCX_TCP_PORT_RANGE with nixl). Workers on one host may share it: "
        "each takes the next free ones. On the interface lo nixl takes none.",
    )
    kv_interface: str = Field(
        default="lo",
        description="Network interface for KV pages. lo keeps them on this machine. Empty: with tls the one that "
        "leads outside, with nixl all that UCX finds.",
    )
    kv_devices: str = Field(
        default="",
        pattern=r"^([\w.-]+:\d+(,[\w.-]+:\d+)*)?$",
        description="RDMA devices for KV pages, each with its port, as mlx5_0:1; with commas. Only with nixl, which "
        "uses no RDMA beside kv_interface unless it is named here.",
    )
    kv_transport: KvTransport = Field(
        default="auto",
        description="What carries KV pages. tls is TCP that admits only workers of this deployment. nixl is UCX, "
        "which admits everybody: for one machine, or RDMA. auto is nixl on the interface lo, and else tls.",
    )
    kv_allow_unauthenticated_tcp: bool = Field(
        default=False,
        description="Whether nixl may use TCP on an interface other than lo. Whoever reaches its ports can then write "
        "any memory of the worker.",
    )
    device: DeviceChoice = Field(default="auto", description=DEVICE_DESCRIPTION)
    tensor_parallel_size: PositiveInt = Field(
        default=1,
        le=16,
        description="GPUs that compute the model together, each by a process of its own. More than 1 only on cuda, "
        "where it has not run yet, or cuda-on-cpu.",
    )
    model_impl: ModelImpl = Field(
        default="auto",
        description="What computes the model. segue is Segue's decoder, for the families in docs/operating.md. "
        "transformers is the code of that package, only on cpu: slower, and tokens may depend on the batch. auto takes "
        "transformers only where no family fits.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="Type of the weights. auto on cpu keeps the 4- and 8-bit blocks of a GGUF file, and else computes "
        "in float32, the only type there. auto on cuda is the type that the weights are stored in, but bfloat16 for "
        "float32, and float16 for bfloat16 before compute capability 8.0.",
    )
    kv_cache_dtype: Literal["auto", "float32", "float16", "bfloat16", "fp8_e4m3"] = Field(
        default="auto",
        description="Type of the KV cache. auto on cpu is float16 for a model of 4- or 8-bit blocks, else float32. "
        "On cuda it is the type of the weights, or fp8_e4m3: half of the memory, and less exact.",
    )
    kv_layout: KVLayoutChoice = Field(
        default="auto",
        description="How KV pages lie on cuda. head-major-1 has all of a head in a row, so that workers of any "
        "tensor_parallel_size read each other's pages: give it to all workers if one has more than 1. auto is "
        "page-major-1 for a worker of one GPU, else head-major-1.",
    )
    kernels: Literal["auto", "avx512", "avx2", "plain", "torch"] = Field(
        default="auto",
        description="Kernels on cpu. auto compiles for the best instruction set of the CPU, or takes torch without a "
        "compiler.",
    )
    kernels_folder: str = Field(
        default="", description="Folder that keeps compiled kernels. Empty: the user's cache folder."
    )
    threads: Count = Field(
        default=0,
        le=1024,
        description="CPU threads of the device. 0: the cores that the cgroup grants, else all of the machine.",
    )
    nice: Count = Field(
        default=0,
        le=19,
        description="Niceness of the process. A higher one yields the cores: `segue up` lets decode go first.",
    )
    memory_bytes: Count = Field(
        default=0,
        description="Bytes of memory that this process may take. 0: the cgroup's limit, else what is available.",
    )
    device_memory_share: Fraction = Field(
        default=0.9,
        description="Fraction of the GPU's memory that this process may take. Two workers on one GPU: 0.45 each.",
    )
    deterministic: bool = Field(
        default=False,
        description="Whether tokens on a GPU do not depend on the batch, run after run. Needs compute capability 9.0, "
        "and is slower. On cpu they never do.",
    )
    page_size: PositiveInt = Field(
        default=16,
        le=1024,
        description="Tokens a KV page: 16, 32, 64 or 128 on cpu. A request wastes half a page on average.",
    )
    kv_pages: Count = Field(
        default=0,
        description="Pages of the KV pool. 0: what memory leaves after the weights and 1 GiB of reserve.",
    )
    max_total_tokens: Count = Field(
        default=0,
        description="Upper bound on the KV pool in tokens, but never less than one full context. 0: unbounded.",
    )
    max_running_requests: PositiveInt = Field(
        default=64,
        le=4096,
        description="Requests on the device at a time. Each takes a slot of device state. Unless set, 256 on cuda.",
    )
    context_len: Count = Field(
        default=0,
        description="Tokens of prompt and output together. 0: the model's own, as far as the pool holds it.",
    )
    overlap: bool = Field(
        default=True,
        description="Whether step N+1 is launched before step N is settled. false is the plain loop, for debugging.",
    )
    step_seconds_max: Seconds = Field(
        default=10.0,
        description="Seconds without a turn of the loop or a layer of a step. Then the worker counts as lost until its "
        "loop turns again, and its streams continue elsewhere. The slowest layer must fit.",
    )
    lease_seconds: Seconds = Field(
        default=10.0,
        description="Seconds from the last renewal to the end of a lease. Several renewals may be lost within it.",
    )
    drain_seconds: Seconds = Field(
        default=30.0,
        description="Seconds that draining may take after SIGTERM. Requests end or migrate. A second SIGTERM ends at "
        "once.",
    )
    load_seconds: Seconds = Field(
        default=0.1,
        description="Seconds between two reports of a changed load to routers. Placement needs it fresh, not exact.",
    )
    radix_eviction_policy: EvictionPolicy = Field(
        default="lru", description="Which unlocked leaf of the radix cache is evicted first."
    )
    quarantine_seconds: Seconds = Field(
        default=10.0,
        description="Seconds that pages of an unfinished read stay in quarantine. Then the reader is closed, "
        "which ends the read.",
    )

    def on(self, device: str) -> Self:
        """Adapt the settings to the device that was found: a number that was not set gets the one that suits it."""
        defaults = self.defaults_on_cuda if device == "cuda" else {}
        unset = {name: value for name, value in defaults.items() if name not in self.model_fields_set}
        return self.model_copy(update={**unset, "device": device})


# ---- settings of a worker that computes prompts: its queue, and how it is ordered ------------------------------------


class PromptConfig(WorkerConfig):
    """Settings of every worker with a `PromptQueue`."""

    groups: ClassVar[Mapping[str, str]] = {"scheduling": "max_queued_requests queue_policy ageing_seconds"}

    max_queued_requests: PositiveInt = Field(
        default=1024,
        description="Requests that wait here. A further one is refused, and the router tries another worker.",
    )
    queue_policy: QueuePolicy = Field(
        default="fcfs", description="Order of the waiting requests, but for `ageing_seconds`."
    )
    ageing_seconds: Seconds = Field(
        default=5.0,
        description="Seconds after which a waiting request goes before all younger ones, whatever the policy. So no "
        "policy starves a long prompt, one of low priority or one that nobody has cached.",
    )
    prefix_aware_queue_max: PositiveInt = Field(
        default=128,
        description="Waiting requests that are compared with the cache and with each other. In a longer queue lpm and "
        "dfs-weight act as fcfs, because matching costs too much.",
    )
    shared_prefix_cached_tokens_max: Count = Field(
        default=32,
        description="Cached tokens up to which a request may wait one round for a prefix that another one computes.",
    )
    shared_prefix_tokens_min: PositiveInt = Field(
        default=32,
        description="Tokens that two waiting requests must share before the second one waits for the first.",
    )

    @property
    def queue_rules(self) -> QueueRules:
        """What bounds and orders the queue."""
        return QueueRules(
            max_queued_requests=self.max_queued_requests,
            queue_policy=self.queue_policy,
            ageing_seconds=self.ageing_seconds,
            prefix_aware_queue_max=self.prefix_aware_queue_max,
            shared_prefix_cached_tokens_max=self.shared_prefix_cached_tokens_max,
            shared_prefix_tokens_min=self.shared_prefix_tokens_min,
        )
