"""Settings that both kinds of worker have: the model, the device, the KV pool and how pages travel.

What only one role decides by lies in `prefill/config.py` and `decode/config.py`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from shared.process.settings import Count, Port, PositiveInt, ProcessConfig, Seconds

DeviceChoice = Literal["auto", "cpu", "cuda"]


class WorkerConfig(ProcessConfig, frozen=True, kw_only=True):
    """What every worker can be told."""

    model: Annotated[
        str,
        Meta(description="folder with safetensors, config and tokenizer; `segue up` resolves names and ids"),
    ] = ""
    served_model_name: Annotated[
        str, Meta(description="what clients call the model; empty: the name of its folder")
    ] = ""
    http_port: Annotated[Port, Meta(description="/livez, /readyz and /metrics; 0: any free port")] = 8001
    links_port: Annotated[Port, Meta(description="where routers dial in; 0: any free port")] = 8002
    kv_ports: Annotated[
        str,
        Meta(
            pattern=r"^\d{1,5}-\d{1,5}$",
            description="ports of the KV plane (UCX_TCP_PORT_RANGE): one range for NetworkPolicy; "
            "workers on one host may share it, each takes the next free port",
        ),
    ] = "20000-20999"
    kv_interface: Annotated[
        str, Meta(description="network interface of the KV plane; `lo` keeps it on this machine; empty: all")
    ] = "lo"
    device: Annotated[DeviceChoice, Meta(description="auto: cuda where torch finds it, else cpu")] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(description="of weights; auto: a GGUF file's own 4- and 8-bit blocks on cpu, else float32"),
    ] = "auto"
    kv_dtype: Annotated[
        Literal["auto", "float32", "float16"],
        Meta(description="of the KV cache; auto: float16 for a model of 4- or 8-bit blocks, else float32"),
    ] = "auto"
    kernels: Annotated[
        Literal["auto", "avx512", "avx2", "plain", "torch"],
        Meta(
            description="what computes on cpu; auto: compiled for the CPU's best instruction set, else torch"
        ),
    ] = "auto"
    kernels_folder: Annotated[
        str, Meta(description="where compiled kernels are kept; empty: the user's cache; see native/build.py")
    ] = ""
    threads: Annotated[
        Count,
        Meta(
            le=1024,
            description="CPU threads of the device; 0: the cgroup's share of cores, else the machine's",
        ),
    ] = 0
    nice: Annotated[
        Count,
        Meta(
            le=19,
            description="how far to stand back for others on these cores; `segue up` lets decode go first",
        ),
    ] = 0
    memory_bytes: Annotated[
        Count,
        Meta(description="memory this process may take; 0: the cgroup's limit, else what the machine has"),
    ] = 0
    page_size: Annotated[
        PositiveInt,
        Meta(le=1024, description="tokens a page: 16, 32, 64 or 128 on cpu; 16 wastes half a page a request"),
    ] = 16
    pages: Annotated[
        Count, Meta(description="pages of the KV pool; 0: what memory leaves after weights and 1 GiB of room")
    ] = 0
    max_total_tokens: Annotated[
        Count,
        Meta(description="tokens the KV pool is made for, and at least one whole context; 0: no bound"),
    ] = 0
    slots: Annotated[
        PositiveInt, Meta(le=4096, description="requests on the device at a time; bounds the per-slot state")
    ] = 64
    context_len: Annotated[
        Count,
        Meta(description="tokens of prompt and output together; 0: the model's, as far as the pool holds it"),
    ] = 0
    overlap: Annotated[
        bool, Meta(description="launch step N+1 before N is settled; false: the normal loop, for debugging")
    ] = True
    lease_seconds: Annotated[
        Seconds, Meta(description="a lease ends so long after its last renewal; a few renewals may be lost")
    ] = 10.0
    drain_seconds: Annotated[
        Seconds,
        Meta(
            description="from SIGTERM until the end, for requests to be moved or to end; a second one ends it"
        ),
    ] = 30.0
    load_seconds: Annotated[
        Seconds,
        Meta(description="between two reports of a changed load: placement needs it fresh, not exact"),
    ] = 0.1
    cache_policy: Annotated[
        Literal["lru", "lfu", "fifo", "mru", "filo", "priority", "slru"],
        Meta(description="which unlocked leaf of the radix cache is evicted first"),
    ] = "lru"
    quarantine_seconds: Annotated[
        Seconds,
        Meta(
            description="a read unproven for so long costs the agent that made it: closing that is the fence"
        ),
    ] = 10.0
