"""Shows counters and gauges to Prometheus.

The shell calls `publish` between turns; scrapes, on another thread, read what was last published. Which metric shows
which field is declared in the counter classes (`metric_fields`); gauges are in `gauges`.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

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
from shared.wire.messages import Role

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

Series = dict[tuple[str, ...], float]  # label values without the role → value


class Metrics(Collector):
    """The metrics of one process, in a registry of its own. Safe to scrape from another thread."""

    def __init__(self, role: Role):
        self.role = role
        self.registry = CollectorRegistry()
        self._lock = threading.Lock()
        self._shown: dict[type[Any], list[ShownField]] = {}
        self._series: defaultdict[CounterMetric | GaugeMetric, Series] = defaultdict(dict)
        self._histograms: dict[tuple[HistogramMetric, tuple[str, ...] | None], Histogram] = {}  # by series
        self.registry.register(self)
        self.set(gauges.INFO, 1, version=VERSION)
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
                    while value:
                        self._histograms[metric, label_values].observe(value.popleft())
                elif label_values is None:
                    self._series[metric] = {
                        key if isinstance(key, tuple) else (key,): number for key, number in value.items()
                    }
                else:
                    self._series[metric][label_values] = value

    def _adopt(self, counter_class: type[Any]) -> list[ShownField]:
        shown_fields(*self._shown, counter_class)  # together they claim no series twice
        shown = shown_fields(counter_class)
        families: dict[HistogramMetric, Histogram] = {}
        for _, metric, label_values in shown:
            if isinstance(metric, HistogramMetric):
                if metric not in families:
                    labels = ("role", *metric.labels)
                    families[metric] = Histogram(
                        metric.name, metric.text, labels, registry=self.registry, buckets=_LATENCY_BUCKETS
                    )
                series = families[metric].labels(self.role, *(label_values or ()))
                self._histograms[metric, label_values] = series
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

    def render(self) -> bytes:
        """The text of `/metrics`."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """Give prometheus_client what was last published."""
        with self._lock:
            published = {metric: dict(series) for metric, series in self._series.items()}
        for metric, series in published.items():
            family_class = CounterMetricFamily if isinstance(metric, CounterMetric) else GaugeMetricFamily
            family = family_class(metric.name, metric.text, labels=("role", *metric.labels))
            for label_values, value in series.items():
                family.add_metric((self.role, *label_values), value)
            yield family
