"""Metrics as cores declare them: each field of a counter class names the metric that shows it.

    @all_declared
    @dataclass(slots=True)
    class ExampleCounters:
        resumes: int = total("segue_resumes_total", "Retracted requests …")  # a metric of its own
        finished: int = counted(WORKER_REQUESTS, outcome="finished")  # one series of a metric
        refusals: Counter[str] = counted_by(REFUSALS)  # one series of a metric for each key
        itl_seconds: deque[float] = durations("segue_itl_seconds", "Seconds …")  # not published yet

A wrong declaration raises InvariantError when its module is imported, and mypy compares the types. The metrics here are
those that more than one class counts in; the others are declared with their field. A name means one thing: what routers
count and what workers count never share one. Nothing here knows Prometheus: `shared.process.metrics` publishes. No
label value comes from a client, so the series of each metric are few.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, TypeVar

from shared.primitives.errors import InvariantError

OBSERVATIONS_MAX = 65536  # bounds the measurements of one field that is never published

# Upper bounds of the buckets of histograms. A quantile is read off between two of them, so they are close where a value
# decides something.
SECONDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
)  # of a stage
ITL_SECONDS = (
    0.002,
    0.003,
    0.004,
    0.005,
    0.0075,
    0.01,
    0.015,
    0.02,
    0.025,
    0.03,
    0.04,
    0.05,
    0.075,
    0.1,
    0.2,
    0.5,
)
TTFT_SECONDS = (
    *(0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0),
    *(30.0, 60.0),
)
REQUEST_SECONDS = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0)
PAUSE_SECONDS = (1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0)
SIZE_TOKENS = (1.0, 4.0, 16.0, *(float(1 << power) for power in range(5, 18)))  # 1 … 131,072
ROWS = (1.0, 2.0, 4.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 96.0, 128.0, 192.0, 256.0)
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


@dataclass(frozen=True, slots=True, eq=False)
class HistogramMetric(DeclaredMetric):
    """A distribution, of seconds unless its name says otherwise."""

    buckets: tuple[float, ...] = SECONDS  # upper bounds, ascending; the last one above them is +Inf
    has_exemplars: bool = False  # each bucket names the request that it counted last


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
    """Declare measurements, one series of `metric`: the core appends them, publishing takes them out."""
    if tuple(labels) != metric.labels:
        raise InvariantError(f"{metric.name} has the labels {metric.labels}, not {tuple(labels)}")
    shown = metric, tuple(labels.values())
    return field(default_factory=lambda: deque(maxlen=OBSERVATIONS_MAX), metadata={_SHOWN_BY: shown})


def total(name: str, text: str) -> int:
    """Declare a total that has a metric of its own, without labels."""
    return counted(CounterMetric(name, text))


def durations(name: str, text: str, buckets: tuple[float, ...] = SECONDS) -> deque[float]:
    """Declare measurements in seconds that have a metric of their own."""
    return observed(HistogramMetric(name, text, (), buckets))


def durations_of_requests(
    name: str, text: str, buckets: tuple[float, ...] = SECONDS
) -> deque[tuple[float, str]]:
    """Declare measurements in seconds, each with the id of its request; they have a metric of their own."""
    shown = HistogramMetric(name, text, (), buckets, has_exemplars=True), ()
    return field(default_factory=lambda: deque(maxlen=OBSERVATIONS_MAX), metadata={_SHOWN_BY: shown})


def shown_fields(*classes: type[Any]) -> list[ShownField]:
    """The fields of the counter classes that one process publishes.

    Raises InvariantError for a field that declares no metric, for a series that two fields claim, and for a name that
    two metrics have. Two classes may count one metric by key, each by keys of its own.
    """
    shown: list[ShownField] = []
    named: dict[str, DeclaredMetric] = {}
    claims: dict[DeclaredMetric, dict[tuple[str, ...] | None, type[Any]]] = {}
    metric: CounterMetric | HistogramMetric
    for cls in classes:
        for each in fields(cls):
            if _SHOWN_BY not in each.metadata:
                raise InvariantError(f"{cls.__name__}.{each.name} declares no metric")
            metric, label_values = each.metadata[_SHOWN_BY]
            if named.setdefault(metric.name, metric) is not metric:
                raise InvariantError(f"{cls.__name__}.{each.name}: {metric.name} is declared twice")
            claimed = claims.setdefault(metric, {})
            by_keys_of_its_own = {label_values, *claimed} == {None} and claimed.get(None) is not cls
            if not by_keys_of_its_own and (
                claimed.keys() & {label_values, None} or (claimed and label_values is None)
            ):
                raise InvariantError(
                    f"{cls.__name__}.{each.name}: another field is this series of {metric.name}"
                )
            claimed[label_values] = cls
            shown.append(ShownField(each.name, metric, label_values))
    return shown


def all_declared(cls: C) -> C:
    """Check a counter class where it is defined."""
    shown_fields(cls)
    return cls


REJECTIONS = CounterMetric(
    "segue_rejections_total",
    "Requests answered with 429, by the code of the answer, or by what was full where that is rate_limit_exceeded: the "
    "limits of an API key (key_rpm, key_tpm, key_concurrent), the queue for tokenizers, memory for bodies or answers.",
    ("code",),
)
WORKER_REQUESTS = CounterMetric(
    "segue_worker_requests_total",
    "Requests at a worker: those it received, and of them those it refused, that were cancelled, and that it finished.",
    ("outcome",),
)
STEPS = CounterMetric("segue_steps_total", "Device steps, by forward mode.", ("mode",))
EXTEND_TOKENS = CounterMetric(
    "segue_extend_tokens_total", "Tokens of prompts that EXTEND and MIXED steps computed."
)
CACHE_HIT_TOKENS = CounterMetric(
    "segue_cache_hit_tokens_total",
    "Tokens whose KV was in a worker's radix cache already, so that it was neither computed nor fetched.",
)
PREFILL_QUEUE_SECONDS = HistogramMetric(
    "segue_prefill_queue_seconds",
    "Seconds from when a worker received a prompt to its first step. The worker that computes prompts observes it.",
)
PREFILL_COMPUTE_SECONDS = HistogramMetric(
    "segue_prefill_compute_seconds",
    "Seconds from the first step of a prompt on the worker that computes it to its first token.",
)
