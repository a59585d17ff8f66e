"""Shows counters and gauges to Prometheus.

The shell calls `publish` between turns; scrapes, on another thread, read what was last published. Which metric shows
which field is declared in the counter classes (`metric_fields`); gauges are in `gauges`. A scraper that asks for
OpenMetrics gets exemplars as well: the id of the request that a bucket has counted last, for `/debug/requests/ID`.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString

from shared.primitives.errors import InvariantError
from shared.primitives.metric_fields import (
    CounterMetric,
    GaugeMetric,
    HistogramMetric,
    ShownField,
    shown_fields,
)
from shared.primitives.version import VERSION
from shared.process import gauges
from shared.wire.messages import PROTOCOL, Role

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text"
OPENMETRICS_VERSION = "1.0.0"
EXEMPLAR_LABEL = "request_id"
EXEMPLAR_ID_CHARACTERS_MAX = 128 - len(EXEMPLAR_LABEL)  # OpenMetrics allows 128 for names and values together

Series = dict[tuple[str, ...], float]  # label values without the role → value


class Metrics(Collector):
    """The metrics of one process, in a registry of its own. Safe to scrape from another thread.

    Beside Segue's own there are the usual ones of a process, of Python and its garbage collector, by their usual names.
    """

    def __init__(self, role: Role):
        self.role = role
        self.registry = CollectorRegistry()
        self._lock = threading.Lock()
        self._shown: dict[type[Any], list[ShownField]] = {}
        self._series: defaultdict[CounterMetric | GaugeMetric, Series] = defaultdict(dict)
        self._histograms: defaultdict[HistogramMetric, dict[tuple[str, ...], _Buckets]] = defaultdict(dict)
        self._at_scrape: dict[GaugeMetric, Callable[[], float]] = {}
        self.registry.register(self)
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)
        self.set(gauges.BUILD_INFO, 1, version=VERSION, protocol=str(PROTOCOL))
        self.set(gauges.READY, 0)

    def publish(self, counters: object) -> None:
        """Show an instance of a counter class. Its measurements are taken out of it.

        Raises InvariantError when a field declares no metric, or one that another class in this process shows.
        """
        shown = self._shown.get(type(counters)) or self._adopt(type(counters))
        with self._lock:
            for name, metric, label_values in shown:
                value = getattr(counters, name)
                if isinstance(metric, HistogramMetric):
                    if value:
                        self._histograms[metric][label_values or ()].take(value)
                elif label_values is None:
                    self._series[metric].update(
                        {key if isinstance(key, tuple) else (key,): number for key, number in value.items()}
                    )
                else:
                    self._series[metric][label_values] = value

    def _adopt(self, counter_class: type[Any]) -> list[ShownField]:
        shown_fields(*self._shown, counter_class)  # together they claim no series twice
        shown = shown_fields(counter_class)
        for _, metric, label_values in shown:
            if isinstance(metric, HistogramMetric):
                self._histograms[metric][label_values or ()] = _Buckets(metric)
        self._shown[counter_class] = shown
        return shown

    def set(self, gauge: GaugeMetric, value: float, **labels: str) -> None:
        """Set one series of a gauge. Raises InvariantError when the labels are not those of the gauge."""
        if tuple(labels) != gauge.labels:
            raise InvariantError(f"{gauge.name} has the labels {gauge.labels}, not {tuple(labels)}")
        with self._lock:
            self._series[gauge][tuple(labels.values())] = value

    def set_all(self, gauge: GaugeMetric, series: Mapping[tuple[str, ...], float]) -> None:
        """Set a gauge for these label values, and for no others: what has gone is shown no more."""
        with self._lock:
            self._series[gauge] = dict(series)

    def set_at_scrape(self, gauge: GaugeMetric, value: Callable[[], float]) -> None:
        """Ask for the value of a gauge without labels when it is scraped, on the thread that answers the scrape."""
        self._at_scrape[gauge] = value

    def histogram(self, name: str) -> tuple[list[tuple[str, float]], float]:
        """Cumulative counts by upper bound, and the sum, of a histogram without labels; nothing: there is none."""
        with self._lock:
            for metric, series in self._histograms.items():
                if metric.name == name and () in series:
                    return series[()].cumulative(), series[()].sum
        return [], 0.0

    def page(self, accept: str = "") -> tuple[str, bytes]:
        """Content type and text of `/metrics` for a scraper with this `Accept`."""
        if asks_for_openmetrics(accept):
            content_type = f"{OPENMETRICS}; version={OPENMETRICS_VERSION}; charset=utf-8"
            return content_type, bytes(generate_openmetrics(self.registry))  # type: ignore[no-untyped-call]
        return CONTENT_TYPE, self.render()

    def render(self) -> bytes:
        """The text of `/metrics`, in the format that every scraper reads."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """Give prometheus_client what was last published."""
        with self._lock:
            published = {metric: dict(series) for metric, series in self._series.items()}
            histograms = [self._histogram_family(metric) for metric in self._histograms]
        published |= {gauge: {(): value()} for gauge, value in self._at_scrape.items()}
        for metric, series in published.items():
            family_class = CounterMetricFamily if isinstance(metric, CounterMetric) else GaugeMetricFamily
            family = family_class(metric.name, metric.text, labels=("role", *metric.labels))
            for label_values, value in series.items():
                family.add_metric((self.role, *label_values), value)
            yield family
        yield from histograms

    def _histogram_family(self, metric: HistogramMetric) -> HistogramMetricFamily:
        family = HistogramMetricFamily(metric.name, metric.text, labels=("role", *metric.labels))
        for label_values, buckets in self._histograms[metric].items():
            family.add_metric((self.role, *label_values), buckets.with_exemplars(), buckets.sum)
        return family


def asks_for_openmetrics(accept: str) -> bool:
    """Whether a scraper takes OpenMetrics, in the version that is spoken here."""
    for offer in accept.lower().split(","):
        kind, *parameters = (part.strip() for part in offer.split(";"))
        given = dict(parameter.partition("=")[::2] for parameter in parameters)
        if kind == OPENMETRICS and given.get("version", OPENMETRICS_VERSION) == OPENMETRICS_VERSION:
            return given.get("q") not in ("0", "0.0")
    return False


class _Buckets:
    """One series of a histogram. Counting a measurement costs a search and two additions."""

    def __init__(self, metric: HistogramMetric):
        self.sum = 0.0
        self._bounds = metric.buckets
        self._has_exemplars = metric.has_exemplars
        self._counts = [0] * (len(metric.buckets) + 1)
        self._exemplars: list[Exemplar | None] = [None] * len(self._counts)

    def take(self, measured: deque[Any]) -> None:
        """Count all, and empty `measured`: values, or pairs of one and the id of its request."""
        counts, bounds = self._counts, self._bounds
        if self._has_exemplars:
            self._take_of_requests(measured)
        while measured:
            value = measured.popleft()
            counts[bisect_left(bounds, value)] += 1
            self.sum += value

    def _take_of_requests(self, measured: deque[tuple[float, str]]) -> None:
        now = time.time()
        while measured:
            value, rid = measured.popleft()
            at = bisect_left(self._bounds, value)
            self._counts[at] += 1
            self.sum += value
            if len(rid) <= EXEMPLAR_ID_CHARACTERS_MAX:
                self._exemplars[at] = Exemplar({EXEMPLAR_LABEL: rid}, value, now)

    def with_exemplars(self) -> list[tuple[str, float] | tuple[str, float, Exemplar]]:
        """As `cumulative`, with the last request of each bucket that has one."""
        pairs = zip(self.cumulative(), self._exemplars, strict=True)
        return [(*each, exemplar) if exemplar else each for each, exemplar in pairs]

    def cumulative(self) -> list[tuple[str, float]]:
        """How many were at most each bound."""
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        return list(zip(bounds, accumulate(self._counts), strict=True))
