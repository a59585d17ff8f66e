"""What has happened on a decode worker so far: plain numbers, published by the shell and read by tests."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from shared.batch.schedule_batch import ForwardMode
from shared.kv.leases import LeaseCounters
from shared.primitives.metric_fields import (
    CACHE_HIT_TOKENS,
    EXTEND_TOKENS,
    PREFILL_COMPUTE_SECONDS,
    PREFILL_QUEUE_SECONDS,
    STEPS,
    WORKER_REQUESTS,
    CounterMetric,
    all_declared,
    counted,
    durations,
    observed,
    total,
)
from shared.wire.messages import Prefilled

FETCH_FAILURES = CounterMetric(
    "segue_fetch_failures_total",
    "Requests whose pages could not be read from their holder: it had given them up (stale), or cannot be reached.",
    ("cause",),
)

PREFIX_WAITS = CounterMetric(
    "segue_prefix_waits_total",
    "Requests that waited until another one had fetched or computed the prefix that both have.",
    ("by",),
)


@all_declared
@dataclass(slots=True)
class DecodeCounters(LeaseCounters):
    """Totals since the start, and measurements since they were last published."""

    requests: int = counted(WORKER_REQUESTS, outcome="received")
    refused: int = counted(WORKER_REQUESTS, outcome="refused")
    cancelled: int = counted(WORKER_REQUESTS, outcome="cancelled")
    finished: int = counted(WORKER_REQUESTS, outcome="finished")
    stale: int = counted(FETCH_FAILURES, cause="stale")  # before all pages were read
    unreachable: int = counted(FETCH_FAILURES, cause="unreachable")
    no_room: int = total("segue_no_room_total", "Requests refused because pages or slots were lacking.")
    joined: int = total("segue_joins_total", "Requests that joined the running batch from a baton.")
    waited_for_prefix: int = counted(PREFIX_WAITS, by="fetch")
    waited_for_prompt: int = counted(PREFIX_WAITS, by="compute")
    full_hits: int = total(
        "segue_full_hits_total", "Requests that joined without a fetch: all pages were cached here."
    )
    quarantines: int = total(
        "segue_quarantines_total",
        "Fetches without proof that they had ended; their pages are locked until there is one.",
    )
    fetched_bytes: int = total(
        "segue_kv_fetched_bytes_total", "Bytes of KV that a decode worker read from other workers' memory."
    )
    cached_tokens: int = counted(CACHE_HIT_TOKENS)
    generated_tokens: int = total(
        "segue_sampled_tokens_total",
        "Tokens that a decode worker sampled. Routers count those that reach clients (segue_generated_tokens_total).",
    )
    extra_tokens: int = total(
        "segue_extra_tokens_total",
        "Tokens that an overlapped step computed for a request that had ended; they are discarded.",
    )
    decode_steps: int = counted(STEPS, mode="decode")
    prebuilt_steps: int = counted(STEPS, mode="prebuilt")
    mixed_steps: int = counted(STEPS, mode="mixed")
    extend_steps: int = counted(STEPS, mode="extend")
    extend_tokens: int = counted(EXTEND_TOKENS)
    rows_without_page: int = total(
        "segue_rows_without_page_total", "Rows that missed a decode step because they lacked a page."
    )
    rows_without_mask: int = total(
        "segue_rows_without_mask_total",
        "Rows that missed a decode step because the grammars of their tenant had used its time.",
    )
    mask_seconds: float = total(
        "segue_mask_seconds_total",
        "Seconds of the thread that computes decode steps that masks of grammars took.",
    )
    retractions: int = total(
        "segue_retractions_total", "Requests taken out of the running batch because pages were lacking."
    )
    turns: int = total(
        "segue_turns_total", "Running requests that left for a retracted one because their turn was over."
    )
    backups: int = total("segue_backups_total", "Retracted requests whose pages were copied to host memory.")
    recomputed: int = total(
        "segue_recomputed_total",
        "Retracted requests without room in host memory that were computed again here.",
    )
    local_prompts: int = total(
        "segue_local_prompts_total", "Prompts that this decode worker computed, whole or in part."
    )
    put_back: int = total(
        "segue_put_back_total",
        "Prompts that went back to their router while they were computed, since a stream needed their pages.",
    )
    resumes: int = total("segue_resumes_total", "Retracted requests that run again.")
    returned_to_router: int = total(
        "segue_returned_to_router_total",
        "Requests that had no room here or in host memory; another attempt recomputes them.",
    )
    migrations: int = total(
        "segue_migrations_offered_total", "Requests whose pages a decode worker offered to another one."
    )
    prefill_queue_seconds: deque[float] = observed(PREFILL_QUEUE_SECONDS)
    prefill_compute_seconds: deque[float] = observed(PREFILL_COMPUTE_SECONDS)
    transfer_seconds: deque[float] = durations(
        "segue_transfer_seconds",
        "Seconds from when a decode worker received a baton until all pages were in its memory.",
    )

    def computed(self, message: Prefilled) -> Prefilled:
        """Note how long a prompt took, and give the message that says so."""
        self.prefill_queue_seconds.append(message.queue_seconds)
        self.prefill_compute_seconds.append(message.compute_seconds)
        return message

    def count_step(self, mode: ForwardMode) -> None:
        """A step is planned."""
        match mode:
            case ForwardMode.DECODE:
                self.decode_steps += 1
            case ForwardMode.MIXED:
                self.mixed_steps += 1
            case ForwardMode.EXTEND:
                self.extend_steps += 1
            case ForwardMode.PREBUILT:
                self.prebuilt_steps += 1
