"""Metrics: what the cores count is what a scrape shows, by role and cause; a wrong declaration ships nowhere."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from decode.counters import DecodeCounters
from prefill.counters import PrefillCounters
from router.access.key_ring import KeyCounters
from router.core.counters import RouterCounters
from router.listener.connections import ClientCounters
from router.listener.tls import CertificateCounters
from router.metrics_publisher import LoopCounters
from router.openai.answers.resumable_streams import ResumingCounters
from router.openai.prompts.prompts import PromptCounters
from router.openai.request_log import HttpCounters
from shared.engine.cuda.counters import DeviceCounters
from shared.links.counters import LinkCounters
from shared.primitives.errors import InvariantError
from shared.primitives.metric_fields import (
    REJECTIONS,
    WORKER_REQUESTS,
    CounterMetric,
    HistogramMetric,
    all_declared,
    counted,
    counted_by,
    durations,
    shown_fields,
    total,
)
from shared.process import gauges
from shared.process.logs import LogCounters
from shared.process.metrics import Metrics
from shared.scheduling.step_counters import StepCounters
from shared.transfer.counters import KvCounters
from shared.wire.messages import Role
from tests.tidy.reference import COUNTERS, declared_metrics

OF_ROUTERS = (
    *(RouterCounters, ClientCounters, KeyCounters, ResumingCounters),
    *(PromptCounters, HttpCounters, LoopCounters, CertificateCounters),
)
OF_WORKERS = (PrefillCounters, DecodeCounters, StepCounters, KvCounters, DeviceCounters)


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
    ("role", "counter_class"),
    [("prefill", PrefillCounters), ("decode", DecodeCounters), ("router", RouterCounters)],
)
def test_every_counter_of_a_core_and_of_its_links_is_shown(role: Role, counter_class: type[Any]) -> None:
    metrics, counters = Metrics(role), counter_class()
    for name, _, label_values in shown_fields(counter_class):
        if label_values is None:
            getattr(counters, name)["some cause"] = 1
    metrics.publish(counters)
    metrics.publish(LinkCounters())
    shown = {name.removesuffix("_count") for name, _ in scrape(metrics)}
    declared = {metric.name for _, metric, _ in shown_fields(counter_class, LinkCounters)}
    assert declared <= shown


def test_a_scrape_shows_what_was_published_last() -> None:
    metrics = Metrics("decode")
    counters = DecodeCounters(retractions=1)
    metrics.publish(counters)
    counters.retractions, counters.fetched_bytes = 3, 4096
    metrics.publish(counters)
    shown = scrape(metrics)
    assert shown["segue_retractions_total", ("decode",)] == 3
    assert shown["segue_kv_fetched_bytes_total", ("decode",)] == 4096


def test_fields_of_one_metric_are_apart_by_their_label() -> None:
    metrics = Metrics("prefill")
    metrics.publish(PrefillCounters(requests=5, refused=2))
    shown = scrape(metrics)
    assert shown["segue_worker_requests_total", ("prefill", "received")] == 5
    assert shown["segue_worker_requests_total", ("prefill", "refused")] == 2


def test_a_count_by_cause_is_a_series_a_cause() -> None:
    metrics = Metrics("router")
    metrics.publish(RouterCounters(continuations=Counter(Lost=2, Stale=1)))
    shown = scrape(metrics)
    assert shown["segue_continuations_total", ("router", "Lost")] == 2
    assert shown["segue_continuations_total", ("router", "Stale")] == 1


def test_a_count_by_cause_shows_some_causes_before_they_occur() -> None:
    metrics = Metrics("router")
    metrics.publish(RouterCounters())
    assert scrape(metrics)["segue_migrations_total", ("router", "recomputed", "drain")] == 0


def test_observations_are_taken_once() -> None:
    metrics = Metrics("router")
    counters = RouterCounters(ttft_seconds=deque([(0.25, "a"), (0.75, "b")]))
    metrics.publish(counters)
    metrics.publish(counters)
    shown = scrape(metrics)
    assert shown["segue_ttft_seconds_count", ("router",)] == 2
    assert shown["segue_ttft_seconds_sum", ("router",)] == 1.0
    assert not counters.ttft_seconds


def test_a_measurement_counts_in_the_bucket_that_it_is_not_above_and_in_all_larger_ones() -> None:
    metrics = Metrics("router")
    metrics.publish(RouterCounters(itl_seconds=deque([0.002, 0.0021, 0.4, 7.0])))
    shown = scrape(metrics)
    within = {
        le: shown["segue_itl_seconds_bucket", ("router", le)] for le in ("0.002", "0.003", "0.2", "0.5")
    }
    assert within == {"0.002": 1, "0.003": 2, "0.2": 2, "0.5": 3}
    assert shown["segue_itl_seconds_bucket", ("router", "+Inf")] == 4
    assert shown["segue_itl_seconds_sum", ("router",)] == pytest.approx(7.4041)


@pytest.mark.parametrize(
    ("name", "least", "most", "buckets"),
    [
        ("segue_itl_seconds", 0.002, 0.5, 16),
        ("segue_ttft_seconds", 0.02, 60.0, 18),
        ("segue_request_seconds", 0.25, 1800.0, 14),
    ],
)
def test_what_readers_feel_has_buckets_of_its_own(name: str, least: float, most: float, buckets: int) -> None:
    (metric,) = (m for m in declared_metrics() if m.name == name)
    assert isinstance(metric, HistogramMetric)
    assert (metric.buckets[0], metric.buckets[-1], len(metric.buckets)) == (least, most, buckets)


def test_buckets_ascend() -> None:
    for metric in declared_metrics():
        if isinstance(metric, HistogramMetric):
            assert list(metric.buckets) == sorted(set(metric.buckets)), metric.name


def test_a_process_shows_what_every_process_does() -> None:
    names = {name for name, _ in scrape(Metrics("decode"))}
    assert {"process_cpu_seconds_total", "process_open_fds", "process_max_fds", "python_info"} < names
    assert "python_gc_collections_total" in names


def test_two_classes_may_count_one_metric_each_by_keys_of_its_own() -> None:
    metrics = Metrics("router")
    metrics.publish(RouterCounters(rejections=Counter(queue_full=2)))
    metrics.publish(ClientCounters(rejections=Counter(key_rpm=3)))
    metrics.publish(RouterCounters(rejections=Counter(queue_full=4)))
    shown = scrape(metrics)
    assert shown["segue_rejections_total", ("router", "queue_full")] == 4
    assert shown["segue_rejections_total", ("router", "key_rpm")] == 3


def test_no_name_means_one_thing_at_a_router_and_another_at_a_worker() -> None:
    of_routers = {each.metric.name for each in shown_fields(*OF_ROUTERS)}
    of_workers = {name for cls in OF_WORKERS for name in (each.metric.name for each in shown_fields(cls))}
    assert not of_routers & of_workers
    assert {*OF_ROUTERS, *OF_WORKERS, LinkCounters, LogCounters} == set(COUNTERS)


def test_how_a_request_can_end_is_shown_before_any_ends() -> None:
    metrics = Metrics("router")
    metrics.publish(RouterCounters())
    shown = scrape(metrics)
    outcomes = ("stop", "length", "aborted", "400", "404", "429", "500", "503", "504")
    assert [shown["segue_requests_total", ("router", outcome)] for outcome in outcomes] == [0] * len(outcomes)


def test_a_gauge_keeps_its_labels_apart() -> None:
    metrics = Metrics("prefill")
    metrics.set(gauges.PAGES, 5, state="free")
    metrics.set(gauges.PAGES, 2, state="owned")
    shown = scrape(metrics)
    assert (shown["segue_pages", ("free", "prefill")], shown["segue_pages", ("owned", "prefill")]) == (5, 2)


def test_a_gauge_with_other_labels_than_its_own_is_refused() -> None:
    with pytest.raises(InvariantError, match="segue_pages"):
        Metrics("prefill").set(gauges.PAGES, 5, kind="free")


def test_a_peer_that_has_gone_is_shown_no_more() -> None:
    metrics = Metrics("decode")
    metrics.set_all(gauges.KV_LINK_BYTES_PER_SECOND, {("p0", "cma"): 5.0, ("p1", "cma"): 7.0})
    metrics.set_all(gauges.KV_LINK_BYTES_PER_SECOND, {("p1", "cma"): 9.0})
    shown = {key: value for key, value in scrape(metrics).items() if "link_bytes" in key[0]}
    assert shown == {("segue_kv_link_bytes_per_second", ("cma", "decode", "p1")): 9.0}


def test_a_process_that_loads_is_shown_as_not_ready() -> None:
    assert scrape(Metrics("decode"))["segue_ready", ("decode",)] == 0


def test_a_field_without_a_metric_cannot_be_defined() -> None:
    with pytest.raises(InvariantError, match=r"Unknown\.invented declares no metric"):

        @all_declared
        @dataclass
        class Unknown:
            invented: int = 0


def test_a_field_without_a_metric_cannot_be_published() -> None:
    @dataclass
    class Unchecked:
        invented: int = field(default=0)

    with pytest.raises(InvariantError, match=r"Unchecked\.invented declares no metric"):
        Metrics("decode").publish(Unchecked())


def test_two_fields_cannot_be_the_same_series() -> None:
    with pytest.raises(
        InvariantError, match=r"Twice\.again: another field is this series of segue_worker_requests_total"
    ):

        @all_declared
        @dataclass
        class Twice:
            requests: int = counted(WORKER_REQUESTS, outcome="received")
            again: int = counted(WORKER_REQUESTS, outcome="received")


def test_a_count_by_key_and_a_fixed_label_cannot_share_a_metric() -> None:
    with pytest.raises(InvariantError, match="segue_rejections_total"):

        @all_declared
        @dataclass
        class KeyedThenFixed:
            by_code: Counter[str] = counted_by(REJECTIONS)
            full: int = counted(REJECTIONS, code="full")

    with pytest.raises(InvariantError, match="segue_rejections_total"):

        @all_declared
        @dataclass
        class FixedThenKeyed:
            full: int = counted(REJECTIONS, code="full")
            by_code: Counter[str] = counted_by(REJECTIONS)


def test_a_name_cannot_be_declared_with_two_texts() -> None:
    with pytest.raises(InvariantError, match="segue_joins_total is declared twice"):

        @all_declared
        @dataclass
        class TwoTexts:
            one: int = total("segue_joins_total", "One text.")
            other: int = total("segue_joins_total", "Another text.")


def test_two_classes_of_a_process_cannot_show_the_same_series() -> None:
    metrics = Metrics("decode")
    metrics.publish(DecodeCounters())
    with pytest.raises(InvariantError, match="PrefillCounters"):
        metrics.publish(PrefillCounters())


def test_a_counter_names_the_labels_of_its_metric() -> None:
    with pytest.raises(InvariantError, match="segue_worker_requests_total has the labels"):
        counted(WORKER_REQUESTS, cause="received")
    with pytest.raises(InvariantError, match="segue_worker_requests_total has the labels"):
        counted(WORKER_REQUESTS)
    with pytest.raises(InvariantError, match="exactly one"):
        counted_by(CounterMetric("segue_plain_total", "Without labels."))


def test_measurements_that_nobody_publishes_are_bounded() -> None:
    @dataclass
    class WaitCounters:
        waited_seconds: deque[float] = durations("segue_waited_seconds", "Seconds waited.")

    assert WaitCounters().waited_seconds.maxlen


def test_all_processes_together_declare_each_name_once() -> None:
    names = [metric.name for metric in declared_metrics()]
    assert len(set(names)) == len(names)
    assert {shown.metric for counters in COUNTERS for shown in shown_fields(counters)} < set(
        declared_metrics()
    )


def test_names_say_their_kind_and_base_unit() -> None:
    for metric in declared_metrics():
        assert metric.name.startswith("segue_")
        assert isinstance(metric, CounterMetric) == metric.name.endswith("_total")
        assert not isinstance(metric, HistogramMetric) or metric.name.endswith(
            ("_seconds", "_tokens", "_rows")
        )
        assert not metric.name.endswith(("_ms", "_milliseconds", "_kb", "_mb"))


def test_texts_are_sentences_that_begin_with_their_unit() -> None:
    for metric in declared_metrics():
        assert metric.text[0].isupper() or metric.text[0] == "1"
        assert metric.text.endswith(".")
        if "_seconds" in metric.name:
            assert metric.text.startswith("Seconds ")
        if "_bytes_" in metric.name:
            assert metric.text.startswith("Bytes ")
