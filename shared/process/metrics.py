"""Every Prometheus metric of every role, declared once, and how the cores' plain counters become them.

Cores count in dataclasses of ints, of `Counter[str]` by cause, and of (name, seconds) observations; they know nothing
of Prometheus. The shell calls `publish` between turns; scrapes, on another thread, read what was last published. Units
are base units (seconds, bytes, tokens). No label comes from a client.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from importlib.metadata import version
from typing import Literal

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from shared.errors import InvariantError
from shared.messages import Role

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


@dataclass(frozen=True, slots=True)
class Declared:
    """One metric. `counted` names the counters it shows: `source.field`, or `source.field=label value`.

    A field that is a `Counter[str]` gives one series a key; the first label then takes the key. Every metric also has
    the label `role`.
    """

    name: str
    text: str
    labels: tuple[str, ...] = ()
    counted: tuple[str, ...] = ()


COUNTERS = (
    Declared(
        "segue_requests_total",
        "requests by how they ended; at workers also those that came (outcome received)",
        ("outcome",),
        (
            "router.requests",
            "prefill.requests=received",
            "prefill.refused=refused",
            "prefill.cancelled=cancelled",
            "decode.requests=received",
            "decode.refused=refused",
            "decode.cancelled=cancelled",
            "decode.finished=finished",
        ),
    ),
    Declared(
        "segue_continuations_total",
        "new attempts of a request, by what the one before ran into",
        ("cause",),
        ("router.continuations",),
    ),
    Declared(
        "segue_stale_batons_total",
        "batons that could not be used, by cause",
        ("cause",),
        ("router.stale_batons", "decode.stale=lease_ended", "decode.unreachable=unreachable"),
    ),
    Declared("segue_refusals_total", "refusals of workers, by reason", ("reason",), ("router.refusals",)),
    Declared("segue_no_room_total", "batons refused for want of pages or slots", (), ("decode.no_room",)),
    Declared(
        "segue_dropped_messages_total",
        "messages about nothing that lives, by cause",
        ("cause",),
        ("router.dropped_messages",),
    ),
    Declared(
        "segue_transitions_total",
        "rows of the lifecycle table taken",
        ("row",),
        ("router.transitions",),
    ),
    Declared(
        "segue_workers_refused_total",
        "workers that said Hello and cannot serve here, by cause",
        ("cause",),
        ("router.workers_refused",),
    ),
    Declared("segue_prompt_tokens_total", "tokens of prompts", (), ("router.prompt_tokens",)),
    Declared(
        "segue_generated_tokens_total",
        "tokens generated",
        (),
        ("router.completion_tokens", "decode.generated_tokens"),
    ),
    Declared(
        "segue_cached_tokens_total",
        "tokens whose KV was in a radix cache already",
        (),
        ("router.cached_tokens", "prefill.cached_tokens", "decode.cached_tokens"),
    ),
    Declared(
        "segue_kv_fetched_bytes_total",
        "KV bytes read out of other workers' memory",
        (),
        ("router.fetched_bytes", "decode.fetched_bytes"),
    ),
    Declared("segue_joins_total", "requests that joined from a baton", (), ("decode.joined",)),
    Declared(
        "segue_prefix_waits_total",
        "requests that waited until another one had fetched their prefix",
        (),
        ("decode.waited_for_prefix",),
    ),
    Declared("segue_full_hits_total", "joins without a read: all cached here", (), ("decode.full_hits",)),
    Declared("segue_quarantines_total", "fetches whose end was not proven", (), ("decode.quarantines",)),
    Declared("segue_extend_tokens_total", "tokens computed by EXTEND steps", (), ("prefill.extend_tokens",)),
    Declared("segue_chunks_total", "EXTEND rows before the last of their request", (), ("prefill.chunks",)),
    Declared(
        "segue_steps_total",
        "device steps, by forward mode",
        ("mode",),
        ("prefill.extend_steps=extend", "decode.decode_steps=decode", "decode.prebuilt_steps=prebuilt"),
    ),
    Declared(
        "segue_leases_granted_total",
        "leases granted",
        (),
        ("prefill.leases_granted", "decode.leases_granted"),
    ),
    Declared(
        "segue_leases_ended_total",
        "leases ended, by how",
        ("cause",),
        (
            "prefill.leases_released=released",
            "prefill.leases_expired=expired",
            "decode.leases_released=released",
            "decode.leases_expired=expired",
        ),
    ),
    Declared(
        "segue_moves_total",
        "requests that left a leaving worker: moved by their pages, or recomputed; offered by that worker",
        ("outcome",),
        ("router.moves", "decode.moves=offered"),
    ),
    Declared("segue_retractions_total", "requests taken out for want of pages", (), ("decode.retractions",)),
    Declared("segue_backups_total", "retracted requests copied to host memory", (), ("decode.backups",)),
    Declared("segue_resumes_total", "retracted requests that came back", (), ("decode.resumes",)),
    Declared(
        "segue_sent_back_total",
        "retracted requests that another attempt recomputes",
        (),
        ("decode.sent_back",),
    ),
    Declared(
        "segue_extra_tokens_total",
        "tokens of an overlapped step for a request that had ended",
        (),
        ("decode.extra_tokens",),
    ),
    Declared("segue_sat_out_total", "rows that lacked a page and missed a step", (), ("decode.sat_out",)),
    Declared(
        "segue_link_refusals_total",
        "connections and handshakes that were refused, by cause",
        ("cause",),
        (
            "links.refused_no_handshake=no_handshake",
            "links.refused_unencrypted=unencrypted",
            "links.refused_foreign_key=foreign_key",
            "links.refused_wrong_role=wrong_role",
            "links.refused_hello=hello",
        ),
    ),
    Declared(
        "segue_link_faults_total",
        "frames that ended or did not reach a session, by cause",
        ("cause",),
        (
            "links.malformed=malformed",
            "links.out_of_session=out_of_session",
            "links.messages_unsent=unsent",
        ),
    ),
    Declared(
        "segue_link_sessions_total",
        "sessions with peers",
        ("event",),
        ("links.sessions_begun=begun", "links.sessions_ended=ended"),
    ),
)

GAUGES = (
    Declared("segue_info", "1; what this process runs", ("version",)),
    Declared("segue_ready", "1 when ready, else 0"),
    Declared("segue_pages", "KV pages by state; their sum is the pool", ("state",)),
    Declared("segue_leases", "leases that live"),
    Declared("segue_slots_used", "requests on the device"),
    Declared("segue_requests_running", "requests that are being served, by state", ("state",)),
    Declared("segue_workers", "workers that are up, by role", ("worker_role",)),
    Declared(
        "segue_discovery_reachable",
        "1 when the last list and watch of pods were answered, else 0: the fleet is the last one known",
        ("source",),
    ),
    Declared(
        "segue_discovery_age_seconds", "since the API server last said anything about the pods", ("source",)
    ),
    Declared("segue_discovery_pods", "workers' pods by state; dialed is what work is sent to", ("state",)),
    Declared(
        "segue_kv_link_bytes_per_second",
        "the best of the last fetches of at least 1 MiB from a peer, by the transport really used",
        ("peer", "transport"),
    ),
    Declared("segue_kv_links_slow", "peers whose link carries less than a quarter of the best one's"),
)

HISTOGRAMS = (
    Declared("segue_queue_seconds", "from arrival to the first placement"),
    Declared("segue_prefill_queue_seconds", "from a prefill worker's receipt to its first step"),
    Declared("segue_prefill_compute_seconds", "from that step to the first token"),
    Declared("segue_ready_seconds", "from the first token to placement on a decode worker"),
    Declared("segue_fetch_seconds", "reading KV pages, as the router heard of it"),
    Declared("segue_transfer_seconds", "from a baton's receipt until its pages had landed"),
    Declared("segue_ttft_seconds", "from arrival to the first token"),
    Declared("segue_itl_seconds", "between two tokens of a stream"),
    Declared("segue_request_seconds", "from arrival to the end"),
)

Key = tuple[str, tuple[str, ...]]  # metric, label values without the role


class Metrics:
    """The metrics of one process; each has a registry of its own. Safe to scrape from another thread."""

    def __init__(self, role: Role):
        self.role = role
        self.registry = CollectorRegistry()
        self._values: dict[Key, float] = {}
        self._lock = threading.Lock()
        self._labels = {declared.name: declared.labels for declared in (*COUNTERS, *GAUGES)}
        self._counted = _counted_fields()
        self._histograms = {
            declared.name: Histogram(
                declared.name, declared.text, ("role",), registry=self.registry, buckets=_LATENCY_BUCKETS
            ).labels(role)
            for declared in HISTOGRAMS
        }
        self.registry.register(_Published(self))
        self.set("segue_info", 1, version=version("segue"))

    def publish(self, source: str, counters: object) -> None:
        """Show a `Counters` dataclass; `source` is the role it belongs to, or `links`.

        Its `observations` are observed and taken out. Raises InvariantError for a field that no metric shows.
        """
        for field in fields(counters):  # type: ignore[arg-type]
            value = getattr(counters, field.name)
            if field.name == "observations":
                observations = list(value)
                value.clear()
                for name, seconds in observations:
                    self.observe(name, seconds)
                continue
            place = self._counted.get(f"{source}.{field.name}")
            if place is None:
                raise InvariantError(
                    f"no metric shows the counter {source}.{field.name}; declare it in shared/process/metrics.py"
                )
            name, label_values = place
            by_label = value.items() if isinstance(value, Mapping) else [(None, value)]
            with self._lock:
                for label, number in by_label:
                    self._values[name, label_values if label is None else (str(label),)] = number

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        assert self._labels[name] == tuple(labels), f"{name} has the labels {self._labels[name]}"
        with self._lock:
            self._values[name, tuple(labels.values())] = value

    def set_all(self, name: str, series: Mapping[tuple[str, ...], float]) -> None:
        """Set a gauge for these label values, and for no others: what has gone is shown no more."""
        with self._lock:
            for key in [key for key in self._values if key[0] == name]:
                del self._values[key]
            self._values.update({(name, labels): value for labels, value in series.items()})

    def observe(self, name: str, seconds: float) -> None:
        """Put one measurement into the histogram `segue_<name>`."""
        self._histograms[f"segue_{name}"].observe(seconds)

    def value(self, name: str, *label_values: str) -> float:
        """What was last published; 0 before."""
        return self._values.get((name, label_values), 0.0)

    def render(self) -> bytes:
        """The text of `/metrics`."""
        return generate_latest(self.registry)

    def published(self) -> dict[Key, float]:
        """A copy of all counters and gauges."""
        with self._lock:
            return dict(self._values)


class _Published(Collector):
    """Gives prometheus_client what was last published."""

    def __init__(self, metrics: Metrics):
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        """One family a metric that has a value."""
        values = self._metrics.published()
        for kind, declared in _kinds():
            series = [(key[1], value) for key, value in values.items() if key[0] == declared.name]
            if not series and declared.labels:
                continue
            names = ("role", *declared.labels)
            family: CounterMetricFamily | GaugeMetricFamily
            if kind == "counter":
                family = CounterMetricFamily(declared.name, declared.text, labels=names)
            else:
                family = GaugeMetricFamily(declared.name, declared.text, labels=names)
            for label_values, value in series or [((), 0.0)]:
                family.add_metric((self._metrics.role, *label_values), value)
            yield family


def _kinds() -> Iterable[tuple[Literal["counter", "gauge"], Declared]]:
    yield from (("counter", declared) for declared in COUNTERS)
    yield from (("gauge", declared) for declared in GAUGES)


def _counted_fields() -> dict[str, Key]:
    """`source.field` → the metric that shows it, and its fixed label values."""
    places: dict[str, Key] = {}
    for declared in COUNTERS:
        for entry in declared.counted:
            field, _, label = entry.partition("=")
            places[field] = (declared.name, (label,) if label else ())
    return places
