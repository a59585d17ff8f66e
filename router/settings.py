"""What the router core must be told: every bound it keeps, with its unit and the reason for its default.

The process's configuration holds the same names; this struct is what remains of it inside the core, which knows
no flags, files or environment.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """Bounds and policies of `RouterCore`. Seconds are those of the clock that `now` comes from."""

    models: tuple[str, ...] = ()  # names that are known (no 404) before any worker has told them
    prefill_policy: str = "cache_aware"  # a computed prefix is the cheapest one
    decode_policy: str = "total_tokens"  # KV held is what slows a decode step and fills its pool
    queue_max: int = 1024  # waiting requests; above it 429, for a later answer would come too late anyway
    ready_max: int = 512  # requests in prefill or ready: each of them ties up pages of a prefill pod
    losses_max: int = 3  # lost attempts of a request, so one that kills its workers cannot kill them all
    waiting_seconds_max: float = 30.0  # until a worker takes a new request; then 503
    ready_seconds_max: float = 30.0  # from the first token until a decode pod has room; then 503
    worker_return_seconds: float = 60.0  # a broken-off stream waits so long: a pod restarts within it
    request_seconds_max: float = 0.0  # the whole request, then 504; 0: no limit, long outputs are legitimate
    renew_seconds: float = 1.0  # between renewals of a lease: a few fit into `lease_seconds`
    retry_after_seconds: float = 1.0  # told with 429 and 503
    no_room_seconds: float = 0.1  # a worker that refused is left alone so long: as often as it tells its load
    prefilling_per_slot: float = (
        2.0  # outstanding requests a prefill slot: one computes, one stands behind it
    )
    cache_hit_tokens_min: int = 128  # a shorter expected hit saves too little to unbalance the fleet
    imbalance_tokens_max: int = 8192  # above this gap in queued tokens a hit no longer attracts
    imbalance_ratio_max: float = 1.5  # … if the fullest also has so many times the tokens of the emptiest
    prefix_blocks_max: int = 16384  # remembered prefix blocks a worker: about a million tokens of prompts
    ended_requests_max: int = 1000  # kept for /debug after their end
