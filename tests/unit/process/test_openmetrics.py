"""OpenMetrics, for a scraper that asks for it: the same series, and exemplars that name requests."""

from __future__ import annotations

import time
from collections import deque

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as of_openmetrics
from prometheus_client.parser import text_string_to_metric_families as of_text
from prometheus_client.samples import Sample

from router.core.counters import RouterCounters
from shared.process.metrics import CONTENT_TYPE, EXEMPLAR_ID_CHARACTERS_MAX, Metrics, asks_for_openmetrics

# what Prometheus 2.42 of Debian and Prometheus 3 send
DEBIANS = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
THIRD = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;q=0.4,*/*;q=0.2"
)


def measured(*first_tokens: tuple[float, str]) -> Metrics:
    metrics = Metrics("router")
    metrics.publish(RouterCounters(ttft_seconds=deque(first_tokens), itl_seconds=deque([0.004])))
    return metrics


def samples(metrics: Metrics) -> list[Sample]:
    """Of OpenMetrics, read as strictly as its own parser reads."""
    text = metrics.page(DEBIANS)[1].decode()
    families = of_openmetrics(text)  # type: ignore[no-untyped-call]
    return [sample for family in families for sample in family.samples]


def request_ids(metrics: Metrics) -> dict[str, str]:
    """The request of each bucket of segue_ttft_seconds that names one."""
    return {
        sample.labels["le"]: sample.exemplar.labels["request_id"]
        for sample in samples(metrics)
        if sample.name == "segue_ttft_seconds_bucket" and sample.exemplar
    }


def test_each_bucket_of_first_tokens_names_the_request_that_it_counted_last() -> None:
    metrics = measured((0.015, "first"), (0.25, "slow"), (0.018, "second"), (99.0, "slowest"))
    assert request_ids(metrics) == {"0.02": "second", "0.3": "slow", "+Inf": "slowest"}
    [slow] = [each.exemplar for each in samples(metrics) if each.exemplar and each.labels["le"] == "0.3"]
    assert slow.value == 0.25
    assert slow.timestamp is not None
    assert time.time() - 60 < float(slow.timestamp) <= time.time()


def test_whole_requests_name_theirs_and_tokens_name_none() -> None:
    metrics = measured((0.015, "first"))
    metrics.publish(RouterCounters(request_seconds=deque([(0.7, "whole")])))
    names = {each.name: each.exemplar.labels["request_id"] for each in samples(metrics) if each.exemplar}
    assert names == {"segue_ttft_seconds_bucket": "first", "segue_request_seconds_bucket": "whole"}


def test_an_id_that_is_longer_than_openmetrics_allows_is_counted_and_not_named() -> None:
    metrics = measured(
        (0.015, "x" * EXEMPLAR_ID_CHARACTERS_MAX), (0.25, "x" * (EXEMPLAR_ID_CHARACTERS_MAX + 1))
    )
    assert list(request_ids(metrics)) == ["0.02"]
    [count] = [each.value for each in samples(metrics) if each.name == "segue_ttft_seconds_count"]
    assert count == 2


def test_both_formats_have_the_same_series_and_values_and_text_names_no_request() -> None:
    metrics = measured((0.015, "first"))
    content_type, text = metrics.page("text/plain;version=0.0.4")
    assert content_type == CONTENT_TYPE
    assert text.startswith(b"# HELP ")
    assert b"request_id" not in text

    def series(families: object) -> dict[tuple[str, ...], float]:
        found: dict[tuple[str, ...], float] = {}
        for family in families:  # type: ignore[attr-defined]
            for each in family.samples:
                if each.name.startswith("segue_"):
                    found[each.name, *each.labels.items()] = each.value
        return found

    openmetrics = metrics.page(DEBIANS)[1].decode()
    assert series(of_text(text.decode())) == series(of_openmetrics(openmetrics))  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    ("accept", "asked"),
    [
        (DEBIANS, True),
        (THIRD, True),
        ("application/openmetrics-text", True),
        ("application/openmetrics-text; version=0.0.1", False),
        ("application/openmetrics-text; version=2.0.0", False),
        ("application/openmetrics-text; version=1.0.0; q=0", False),
        ("application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily, */*", False),
        ("text/plain;version=0.0.4", False),
        ("*/*", False),
        ("", False),
        (";;,=;version", False),
    ],
)
def test_openmetrics_is_for_who_names_its_version(accept: str, asked: bool) -> None:
    assert asks_for_openmetrics(accept) is asked
