"""What has happened on a prefill worker so far: plain numbers, published by the shell and read by tests."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from shared.kv.leases import LeaseCounters
from shared.primitives.metric_fields import (
    CACHE_HIT_TOKENS,
    EXTEND_TOKENS,
    PREFILL_COMPUTE_SECONDS,
    PREFILL_QUEUE_SECONDS,
    STEPS,
    WORKER_REQUESTS,
    all_declared,
    counted,
    observed,
    total,
)


@all_declared
@dataclass(slots=True)
class PrefillCounters(LeaseCounters):
    """Totals since the start, and measurements since they were last published."""

    requests: int = counted(WORKER_REQUESTS, outcome="received")
    refused: int = counted(WORKER_REQUESTS, outcome="refused")
    cancelled: int = counted(WORKER_REQUESTS, outcome="cancelled")
    extend_steps: int = counted(STEPS, mode="extend")
    extend_tokens: int = counted(EXTEND_TOKENS)
    chunks: int = total("segue_chunks_total", "EXTEND rows that were not the last of their request.")
    cached_tokens: int = counted(CACHE_HIT_TOKENS)
    prefill_queue_seconds: deque[float] = observed(PREFILL_QUEUE_SECONDS)
    prefill_compute_seconds: deque[float] = observed(PREFILL_COMPUTE_SECONDS)
