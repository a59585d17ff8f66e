"""Metrics as cores declare them: each field of a counter class names the metric that shows it.

    @all_declared
    @dataclass(slots=True)
    class ExampleCounters:
        resumes: int = total("segue_resumes_total", "Retracted requests …")  # a metric of its own
        finished: int = counted(REQUESTS, outcome="finished")  # one series of a metric
        refusals: Counter[str] = counted_by(REFUSALS)  # one series of a metric for each key
        itl_seconds: deque[float] = durations("segue_itl_seconds", "Seconds …")  # not published yet

A wrong declaration raises InvariantError when its module is imported, and mypy compares the types. The metrics here are
those that more than one class counts in; the others are declared with their field. Nothing here knows Prometheus:
`shared.process.metrics` publishes. No label value comes from a client, so the series of each metric are few.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, TypeVar

from shared.primitives.errors import InvariantError

OBSERVATIONS_MAX = 65536  # bounds the measurements of one field that is never published
_SHOWN_BY = "shown by"

C = TypeVar("C", bound=type[Any])


@dataclass(frozen=True, slots=True, eq=False)
class DeclaredMetric:
    """One metric; the object is its identity. Every metric also has the label `role`."""

    name: str
    text: str  # one sentence for the reader of /metrics and of docs/reference.md
    labels: tuple[str, ...] = ()


class CounterMetric(DeclaredMetric):
    """A total since the start of the process."""


class GaugeMetric(DeclaredMetric):
    """A value as of now."""


class HistogramMetric(DeclaredMetric):
    """A distribution of seconds."""


class ShownField(NamedTuple):
    """A field of a counter class, its metric, and its label values; None: each key of the field is one."""

    field: str
    metric: CounterMetric | HistogramMetric
    label_values: tuple[str, ...] | None


def counted(metric: CounterMetric, **labels: str) -> int:
    """Declare a total that is one series of `metric`."""
    if tuple(labels) != metric.labels:
        raise InvariantError(f"{metric.name} has the labels {metric.labels}, not {tuple(labels)}")
    return field(default=0, metadata={_SHOWN_BY: (metric, tuple(labels.values()))})


def counted_by(metric: CounterMetric, *from_zero: str) -> Counter[str]:
    """Declare totals by the one label of `metric`.

    The keys `from_zero` are shown before they first occur, so that a rate sees their first step.
    """
    if len(metric.labels) != 1:
        raise InvariantError(
            f"{metric.name} has the labels {metric.labels}; a count by key needs exactly one"
        )
    zeros = dict.fromkeys(from_zero, 0)
    return field(default_factory=lambda: Counter(zeros), metadata={_SHOWN_BY: (metric, None)})


def counted_by_labels(metric: CounterMetric, *from_zero: tuple[str, ...]) -> Counter[tuple[str, ...]]:
    """Declare totals by all labels of `metric`, in their order; those of `from_zero` as in `counted_by`."""
    zeros = dict.fromkeys(from_zero, 0)
    return field(default_factory=lambda: Counter(zeros), metadata={_SHOWN_BY: (metric, None)})


def observed(metric: HistogramMetric, **labels: str) -> deque[float]:
    """Declare measurements in seconds, one series of `metric`: the core appends them, publishing takes them out."""
    if tuple(labels) != metric.labels:
        raise InvariantError(f"{metric.name} has the labels {metric.labels}, not {tuple(labels)}")
    shown = metric, tuple(labels.values())
    return field(default_factory=lambda: deque(maxlen=OBSERVATIONS_MAX), metadata={_SHOWN_BY: shown})


def total(name: str, text: str) -> int:
    """Declare a total that has a metric of its own, without labels."""
    return counted(CounterMetric(name, text))


def durations(name: str, text: str) -> deque[float]:
    """Declare measurements in seconds that have a metric of their own."""
    return observed(HistogramMetric(name, text))


def shown_fields(*classes: type[Any]) -> list[ShownField]:
    """The fields of the counter classes that one process publishes.

    Raises InvariantError for a field that declares no metric, for a series that two fields claim, and for a name that
    two metrics have.
    """
    shown: list[ShownField] = []
    named: dict[str, DeclaredMetric] = {}
    claims: dict[DeclaredMetric, set[tuple[str, ...] | None]] = {}
    metric: CounterMetric | HistogramMetric
    for cls in classes:
        for each in fields(cls):
            if _SHOWN_BY not in each.metadata:
                raise InvariantError(f"{cls.__name__}.{each.name} declares no metric")
            metric, label_values = each.metadata[_SHOWN_BY]
            if named.setdefault(metric.name, metric) is not metric:
                raise InvariantError(f"{cls.__name__}.{each.name}: {metric.name} is declared twice")
            claimed = claims.setdefault(metric, set())
            if claimed & {label_values, None} or (claimed and label_values is None):
                raise InvariantError(
                    f"{cls.__name__}.{each.name}: another field is this series of {metric.name}"
                )
            claimed.add(label_values)
            shown.append(ShownField(each.name, metric, label_values))
    return shown


def all_declared(cls: C) -> C:
    """Check a counter class where it is defined."""
    shown_fields(cls)
    return cls


REQUESTS = CounterMetric(
    "segue_requests_total",
    "Requests. Routers count how those that reached the queues ended: the finish reason, or the HTTP status of the "
    "error; what they refuse before is in segue_http_refusals_total. Workers count those received, refused, cancelled "
    "and finished.",
    ("outcome",),
)
MIGRATIONS = CounterMetric(
    "segue_migrations_total",
    "Requests that migrated from one decode worker to another. The worker counts those it offered; routers count "
    "those whose pages were fetched (migrated) and those that were recomputed, by cause: the worker drains (drain), "
    "has few pages left (balance), or has computed the prompt while others wait (packed).",
    ("outcome", "cause"),
)
STALE_BATONS = CounterMetric(
    "segue_stale_batons_total", "Batons that could not be used, by cause.", ("cause",)
)
STEPS = CounterMetric("segue_steps_total", "Device steps, by forward mode.", ("mode",))
EXTEND_TOKENS = CounterMetric(
    "segue_extend_tokens_total", "Tokens of prompts that EXTEND and MIXED steps computed."
)
GENERATED_TOKENS = CounterMetric(
    "segue_generated_tokens_total",
    "Generated tokens. Decode workers count those they sampled, routers those they delivered to clients.",
)
CACHED_TOKENS = CounterMetric(
    "segue_cached_tokens_total",
    "Tokens whose KV was in a radix cache already, so that it was neither computed nor fetched.",
)
FETCHED_BYTES = CounterMetric("segue_kv_fetched_bytes_total", "Bytes of KV read from other workers' memory.")
PREFILL_QUEUE_SECONDS = HistogramMetric(
    "segue_prefill_queue_seconds", "Seconds from when a prefill worker received a request to its first step."
)
PREFILL_COMPUTE_SECONDS = HistogramMetric(
    "segue_prefill_compute_seconds",
    "Seconds from the first step of a request on a prefill worker to its first token.",
)
