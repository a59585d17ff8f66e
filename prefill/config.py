"""Settings of a prefill worker, beside those that every worker has."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from shared.process.settings import Count, PositiveInt, Share
from shared.process.worker_config import WorkerConfig


class PrefillConfig(WorkerConfig, frozen=True, kw_only=True):
    """Segue's prefill worker: computes prompts and leases their KV pages."""

    chunked_prefill_size: Annotated[
        PositiveInt, Meta(description="tokens of one EXTEND step, so a long prompt does not block short ones")
    ] = 2048
    max_prefill_tokens: Annotated[
        PositiveInt,
        Meta(description="uncached tokens admitted in one pass; bounds the activations of a step"),
    ] = 16384
    lease_share: Annotated[
        Share,
        Meta(
            description="of the pool under lease: above it no new EXTEND, so overload waits before computing"
        ),
    ] = 0.5
    leases_max: Annotated[
        PositiveInt, Meta(description="leases at a time: 8 bytes of registered memory each")
    ] = 1024
    queue_max: Annotated[
        PositiveInt,
        Meta(description="requests waiting here; above it Refused, so that the router tries elsewhere"),
    ] = 1024
    queue_policy: Annotated[
        Literal["fcfs", "lpm", "dfs-weight", "lof", "random", "routing-key", "priority"],
        Meta(description="who goes first; fcfs starves nobody"),
    ] = "fcfs"
    policy_queue_max: Annotated[
        PositiveInt,
        Meta(description="above so many waiting, lpm and dfs-weight are fcfs: matching costs too much"),
    ] = 128
    shared_prefix_cached_tokens_max: Annotated[
        Count,
        Meta(description="a request with at most so much cached may wait one round for another's prefix"),
    ] = 32
    shared_prefix_tokens_min: Annotated[
        PositiveInt,
        Meta(description="… when it shares at least so many tokens with one that is admitted now"),
    ] = 32
