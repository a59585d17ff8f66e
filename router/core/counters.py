"""What the router core has counted and measured; plain numbers that the shell publishes and tests read.

Every key is one of a few words of this program: none comes from a client, so each count by key is bounded.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from itertools import product
from typing import Literal, get_args

from shared.primitives.metric_fields import (
    ITL_SECONDS,
    REJECTIONS,
    REQUEST_SECONDS,
    SIZE_TOKENS,
    TTFT_SECONDS,
    CounterMetric,
    HistogramMetric,
    all_declared,
    counted,
    counted_by,
    counted_by_labels,
    durations,
    durations_of_requests,
    observed,
    total,
)
from shared.primitives.metric_fields import PAUSE_SECONDS as PAUSE_BUCKETS
from shared.wire.messages import FinishReason, RefusalReason

GapPart = Literal["queue", "fetch", "joining", "first_step"]  # see `HandOver`
PauseCause = Literal["moved", "lost_decode", "lost_prefill", "retracted", "no_room", "other"]
MigrationCause = Literal["drain", "balance", "packed"]
PAUSE_SECONDS = HistogramMetric(
    "segue_pause_seconds",
    "Seconds between two tokens of a stream, where they are more than one, by what held it up: it was moved to another "
    "decode worker, lost its worker, was retracted for lack of pages, or waited for room with its pages elsewhere.",
    ("cause",),
    PAUSE_BUCKETS,
)
SECOND_TOKEN_PART_SECONDS = HistogramMetric(
    "segue_second_token_part_seconds",
    "Seconds of each part of segue_second_token_seconds, of requests handed over: the queue for decode, fetch, joining "
    "(messages, and the step under way), and the first step, by what its worker told that one takes.",
    ("part",),
)
WayName = Literal["decode", "prefill"]  # the worker that computes a prompt
WAY_SECONDS = HistogramMetric(
    "segue_way_seconds",
    "Seconds from a prompt's placement until a decode worker has it, by the way it goes: computed there, or by way of "
    "prefill. Foreseen, and real; only of prompts for which they were foreseen.",
    ("way", "kind"),
)
FORESEEN_SECONDS = HistogramMetric(
    "segue_ttft_foreseen_seconds",
    "Seconds to the first token, of requests that came while others waited: foreseen at their arrival, and real.",
    ("kind",),
    TTFT_SECONDS,
)
MOVED_BYTES = CounterMetric(
    "segue_kv_moved_bytes_total",
    "Bytes of KV that requests brought to a decode worker, by purpose: handoff, after their prompt, or migration, from "
    "another decode worker.",
    ("purpose",),
)
# the statuses with which the core fails a request, beside the reasons for which one finishes
OUTCOMES = (*get_args(FinishReason), "aborted", "400", "404", "429", "500", "503", "504")


@all_declared
@dataclass(slots=True)
class RouterCounters:
    """Totals since the start, and measurements since they were last published."""

    requests: Counter[str] = counted_by(
        CounterMetric(
            "segue_requests_total",
            "Requests that reached a router's queues, by how they ended: the finish reason, or the HTTP status of the "
            "error. What is refused before is in segue_http_refusals_total.",
            ("outcome",),
        ),
        *OUTCOMES,
    )
    continuations: Counter[str] = counted_by(
        CounterMetric(
            "segue_continuations_total",
            "New attempts of a request, by what ended the attempt before.",
            ("cause",),
        ),
        "lost_prefill",
        "lost_decode",
    )
    migrations: Counter[tuple[str, ...]] = counted_by_labels(
        CounterMetric(
            "segue_migrations_total",
            "Requests that migrated from one decode worker to another: those whose pages were fetched (migrated) and "
            "those that were recomputed, by cause: the worker drains (drain), has few pages left (balance), or has "
            "computed the prompt while others wait (packed).",
            ("outcome", "cause"),
        ),
        *product(("migrated", "recomputed"), get_args(MigrationCause)),
    )
    stale_batons: Counter[str] = counted_by(
        CounterMetric("segue_stale_batons_total", "Batons that could not be used, by cause.", ("cause",)),
        "stale",
        "unreachable",
        "lease_ended",
    )
    refusals: Counter[str] = counted_by(
        CounterMetric("segue_refusals_total", "Requests that a worker refused, by its reason.", ("reason",)),
        *get_args(RefusalReason),
    )
    rejections: Counter[str] = counted_by(
        REJECTIONS, "queue_full", "wait_too_long", "target_missed", "tenant_queue_full", "tokens_per_minute"
    )
    targets: Counter[str] = counted_by(
        CounterMetric(
            "segue_ttft_targets_total",
            "Requests with a target for their first token, by outcome: met, missed, refused at arrival, or dropped "
            "before they were computed.",
            ("outcome",),
        ),
        "met",
        "missed",
        "refused",
        "dropped",
    )
    dropped_messages: Counter[str] = counted_by(
        CounterMetric(
            "segue_dropped_messages_total",
            "Messages from workers that concern no live attempt of a request, by cause.",
            ("cause",),
        )
    )
    transitions: Counter[str] = counted_by(
        CounterMetric(
            "segue_transitions_total",
            "State changes of requests, by row of the lifecycle table: the state before and the event.",
            ("row",),
        )
    )
    workers_refused: Counter[str] = counted_by(
        CounterMetric(
            "segue_workers_refused_total",
            "Workers that connected and cannot serve in this deployment, by cause.",
            ("cause",),
        )
    )
    worker_faults: Counter[str] = counted_by(
        CounterMetric(
            "segue_worker_faults_total",
            "Workers that were dropped because the router failed at a message of theirs, by the message's name.",
            ("message",),
        )
    )
    silent_workers: Counter[str] = counted_by(
        CounterMetric(
            "segue_silent_workers_total",
            "Workers that reported no request and answered none of those they had, while others did, by role.",
            ("worker_role",),
        ),
        "prefill",
        "decode",
    )
    local_prompts: Counter[str] = counted_by(
        CounterMetric(
            "segue_router_local_prompts_total",
            "Requests sent to decode workers with their prompts, by reason: no prefill worker, always, sooner "
            "than by way of prefill, or its sibling's prompt is there.",
            ("why",),
        ),
        "no_prefill",
        "always",
        "sooner",
        "sibling",
    )
    placements: Counter[tuple[str, ...]] = counted_by_labels(
        CounterMetric(
            "segue_router_placements_total",
            "Requests given to workers, by the worker's role and why this one, in one word (`PlacementReason`).",
            ("worker_role", "why"),
        )
    )
    prompt_tokens: int = total("segue_prompt_tokens_total", "Tokens of the prompts of all requests.")
    completion_tokens: int = total("segue_generated_tokens_total", "Tokens that were delivered to clients.")
    cached_tokens: int = total(
        "segue_cached_tokens_total",
        "Tokens of prompts that their first attempt found in a worker's radix cache, as answers say in usage.",
    )
    handoff_bytes: int = counted(MOVED_BYTES, purpose="handoff")
    migration_bytes: int = counted(MOVED_BYTES, purpose="migration")
    prompt_sizes: deque[float] = observed(
        HistogramMetric(
            "segue_request_prompt_tokens", "Tokens of the prompt of each request.", (), SIZE_TOKENS
        )
    )
    output_sizes: deque[float] = observed(
        HistogramMetric(
            "segue_request_generation_tokens",
            "Tokens of the output of each request that got any, at its end.",
            (),
            SIZE_TOKENS,
        )
    )
    queue_seconds: deque[float] = durations(
        "segue_queue_seconds", "Seconds that a request waited at its router for its first placement."
    )
    ready_seconds: deque[float] = durations(
        "segue_ready_seconds",
        "Seconds from when a request's pages can be fetched to its placement on a decode worker.",
    )
    fetch_seconds: deque[float] = durations(
        "segue_fetch_seconds", "Seconds that a decode worker needed to read a request's KV pages."
    )
    ttft_seconds: deque[tuple[float, str]] = durations_of_requests(
        "segue_ttft_seconds",
        "Seconds from the end of a request's head to its first token: body, template and tokenizer are in it.",
        TTFT_SECONDS,
    )
    ttft_foreseen: deque[float] = observed(FORESEEN_SECONDS, kind="foreseen")
    ttft_real: deque[float] = observed(FORESEEN_SECONDS, kind="real")
    way_decode_foreseen: deque[float] = observed(WAY_SECONDS, way="decode", kind="foreseen")
    way_decode_real: deque[float] = observed(WAY_SECONDS, way="decode", kind="real")
    way_prefill_foreseen: deque[float] = observed(WAY_SECONDS, way="prefill", kind="foreseen")
    way_prefill_real: deque[float] = observed(WAY_SECONDS, way="prefill", kind="real")
    second_token_seconds: deque[float] = durations(
        "segue_second_token_seconds",
        "Seconds from a request's first token, which prefill samples, to its second one, the first of decode.",
        TTFT_SECONDS,
    )
    second_token_queue: deque[float] = observed(SECOND_TOKEN_PART_SECONDS, part="queue")
    second_token_fetch: deque[float] = observed(SECOND_TOKEN_PART_SECONDS, part="fetch")
    second_token_joining: deque[float] = observed(SECOND_TOKEN_PART_SECONDS, part="joining")
    second_token_first_step: deque[float] = observed(SECOND_TOKEN_PART_SECONDS, part="first_step")
    itl_seconds: deque[float] = durations(
        "segue_itl_seconds", "Seconds between two tokens of a request; one measurement a token.", ITL_SECONDS
    )
    pauses_moved: deque[float] = observed(PAUSE_SECONDS, cause="moved")
    pauses_lost_decode: deque[float] = observed(PAUSE_SECONDS, cause="lost_decode")
    pauses_lost_prefill: deque[float] = observed(PAUSE_SECONDS, cause="lost_prefill")
    pauses_retracted: deque[float] = observed(PAUSE_SECONDS, cause="retracted")
    pauses_no_room: deque[float] = observed(PAUSE_SECONDS, cause="no_room")
    pauses_other: deque[float] = observed(PAUSE_SECONDS, cause="other")
    request_seconds: deque[tuple[float, str]] = durations_of_requests(
        "segue_request_seconds",
        "Seconds from the end of a request's head to its last token.",
        REQUEST_SECONDS,
    )
    drain_seconds: deque[float] = durations(
        "segue_drain_seconds",
        "Seconds from when a worker said that it drains to the end of its session, as its routers saw it.",
        PAUSE_BUCKETS,
    )

    def way(self, way: WayName, foreseen_seconds: float, seconds: float) -> None:
        """A decode worker has a prompt, by this way."""
        foreseen, real = (
            (self.way_decode_foreseen, self.way_decode_real)
            if way == "decode"
            else (self.way_prefill_foreseen, self.way_prefill_real)
        )
        foreseen.append(foreseen_seconds)
        real.append(seconds)

    def second_token_part(self, part: GapPart, seconds: float) -> None:
        """A part of the gap before a second token."""
        measured: deque[float] = getattr(self, f"second_token_{part}")
        measured.append(seconds)

    def paused(self, cause: PauseCause, seconds: float) -> None:
        """A stream has gone on after a pause."""
        pauses: deque[float] = getattr(self, f"pauses_{cause}")
        pauses.append(seconds)
