"""Metrics: what the cores count is what a scrape shows, by role and cause."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

import pytest
from prometheus_client.parser import text_string_to_metric_families

from decode.counters import DecodeCounters
from prefill.scheduler import PrefillCounters
from router.core.counters import RouterCounters as RouterCounters
from shared.errors import InvariantError
from shared.links.session import LinkCounters
from shared.messages import Role
from shared.process.metrics import COUNTERS, GAUGES, HISTOGRAMS, Metrics


def scrape(metrics: Metrics) -> dict[tuple[str, tuple[str, ...]], float]:
    """Sample name and label values (in reverse order of label names) → value, read as Prometheus reads it."""
    return {
        (
            sample.name,
            tuple(sample.labels[name] for name in sorted(sample.labels, reverse=True)),
        ): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }


@pytest.mark.parametrize(
    ("role", "source", "counters"),
    [
        ("prefill", "prefill", PrefillCounters()),
        ("decode", "decode", DecodeCounters()),
        ("router", "router", RouterCounters()),
        ("router", "links", LinkCounters()),
    ],
)
def test_every_counter_of_every_core_is_shown(role: Role, source: str, counters: object) -> None:
    Metrics(role).publish(source, counters)


def test_a_scrape_shows_what_was_published_last() -> None:
    metrics = Metrics("decode")
    counters = DecodeCounters(retractions=1)
    metrics.publish("decode", counters)
    counters.retractions, counters.fetched_bytes = 3, 4096
    metrics.publish("decode", counters)
    shown = scrape(metrics)
    assert shown["segue_retractions_total", ("decode",)] == 3
    assert shown["segue_kv_fetched_bytes_total", ("decode",)] == 4096


def test_a_count_by_cause_is_a_series_a_cause() -> None:
    metrics = Metrics("router")
    metrics.publish("router", RouterCounters(continuations=Counter(Lost=2, Stale=1)))
    shown = scrape(metrics)
    assert shown["segue_continuations_total", ("router", "Lost")] == 2
    assert shown["segue_continuations_total", ("router", "Stale")] == 1


def test_observations_are_taken_once() -> None:
    metrics = Metrics("router")
    counters = RouterCounters(observations=deque([("ttft_seconds", 0.25), ("ttft_seconds", 0.75)]))
    metrics.publish("router", counters)
    metrics.publish("router", counters)
    shown = scrape(metrics)
    assert shown["segue_ttft_seconds_count", ("router",)] == 2
    assert shown["segue_ttft_seconds_sum", ("router",)] == 1.0


def test_a_gauge_keeps_its_labels_apart() -> None:
    metrics = Metrics("prefill")
    metrics.set("segue_pages", 5, state="free")
    metrics.set("segue_pages", 2, state="owned")
    shown = scrape(metrics)
    assert (shown["segue_pages", ("free", "prefill")], shown["segue_pages", ("owned", "prefill")]) == (5, 2)


def test_a_peer_that_has_gone_is_shown_no_more() -> None:
    metrics = Metrics("decode")
    metrics.set_all("segue_kv_link_bytes_per_second", {("p0", "cma"): 5.0, ("p1", "cma"): 7.0})
    metrics.set_all("segue_kv_link_bytes_per_second", {("p1", "cma"): 9.0})
    shown = {key: value for key, value in scrape(metrics).items() if "link_bytes" in key[0]}
    assert shown == {("segue_kv_link_bytes_per_second", ("cma", "decode", "p1")): 9.0}


def test_every_counter_that_is_declared_counts_something() -> None:
    assert [declared.name for declared in COUNTERS if not declared.counted] == []


def test_a_counter_without_a_metric_is_named() -> None:
    @dataclass
    class Unknown:
        invented: int = 0
        observations: list[tuple[str, float]] = field(default_factory=list)

    with pytest.raises(InvariantError, match=r"decode\.invented"):
        Metrics("decode").publish("decode", Unknown())


def test_names_are_unique_and_say_their_base_unit() -> None:
    names = [declared.name for declared in (*COUNTERS, *GAUGES, *HISTOGRAMS)]
    assert len(set(names)) == len(names)
    assert all(declared.name.endswith("_total") for declared in COUNTERS)
    assert all(declared.name.endswith("_seconds") for declared in HISTOGRAMS)
    assert not [name for name in names if name.endswith(("_ms", "_milliseconds", "_kb", "_mb"))]
