"""Settings of a prefill worker, beside those that every worker has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from shared.process.settings import Count, Fraction, PositiveInt
from shared.scheduling.queue_policy import QueuePolicy
from shared.worker.worker_config import WorkerConfig


class PrefillConfig(WorkerConfig):
    """Segue's prefill worker: computes prompts and leases their KV pages."""

    groups: ClassVar[Mapping[str, str]] = {
        "scheduling": "chunked_prefill_size max_prefill_tokens short_share max_queued_requests queue_policy",
    }
    defaults_on_cuda: ClassVar[dict[str, object]] = {
        **WorkerConfig.defaults_on_cuda,
        "chunked_prefill_size": 8192,
    }

    chunked_prefill_size: PositiveInt = Field(
        default=128,
        description="Tokens of one EXTEND step, of one long prompt or of many short ones. A request that comes waits "
        "for the step under way: 128 take 0.1 s on two free cores with the default model. On a CPU larger steps "
        "compute less than a tenth faster. On cuda 8192 unless it is set.",
    )
    short_share: Fraction = Field(
        default=0.25,
        description="Fraction of the steps of a prompt in chunks that shorter prompts may take. They join its steps, "
        "and what they do not need the long prompt takes. It becomes slower by 1 / (1 - fraction) at most. At 0 other "
        "prompts wait until it is computed, and its steps overlap with their planning.",
    )
    max_prefill_tokens: PositiveInt = Field(
        default=16384,
        description="Uncached tokens admitted in one pass. This bounds the activations of a step.",
    )
    lease_fraction: Fraction = Field(
        default=0.5,
        description="Fraction of the pool that may be under lease before new prompts wait. Under overload they wait "
        "before they are computed.",
    )
    leases_max: PositiveInt = Field(
        default=1024, description="Leases at a time. Each takes 8 bytes of registered memory."
    )
    max_queued_requests: PositiveInt = Field(
        default=1024,
        description="Requests that wait here. A further one is refused, and the router tries another worker.",
    )
    queue_policy: QueuePolicy = Field(
        default="fcfs", description="Order of the waiting requests. fcfs starves none."
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
