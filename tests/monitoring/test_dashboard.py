"""The dashboard is what its generator writes, names declared metrics, and reaches Grafana's sidecar."""

from __future__ import annotations

import json
import re
from typing import Any

from shared.primitives.metric_fields import HistogramMetric
from tests.charts.kubernetes_schemas import complaints, versions
from tests.charts.rendering import objects, of_kind
from tests.monitoring.dashboard import COLUMNS, FILE, WIDTH, dashboard, page
from tests.monitoring.rendered import ALL, RDMA, alerts_of, exposed_names, metrics_named, rule_groups
from tests.tidy.reference import declared_metrics

SHOWN = "monitoring.dashboard.enabled=true"


def expressions() -> list[str]:
    """All that the panels ask of Prometheus."""
    return [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", [])]


def test_the_dashboard_is_fresh() -> None:
    assert FILE.read_text(encoding="utf-8") == page(), "run: make docs"


def test_the_dashboard_names_declared_metrics_alone() -> None:
    named = metrics_named(page())
    assert len(named) > 50
    assert named - exposed_names() == set()


def test_every_metric_of_an_alert_has_a_panel() -> None:
    def bare(names: set[str]) -> set[str]:
        return {re.sub(r"_(bucket|count|sum)$", "", name) for name in names}

    asked = {name for rule in alerts_of(rule_groups(*RDMA)).values() for name in metrics_named(rule["expr"])}
    seldom = {  # what they say is whole in the alert
        "segue_api_keys_unread_total", "segue_leases_granted_total", "segue_log_lines_dropped_total",
        "segue_loop_hangs_total", "segue_ready", "segue_tls_certificate_expiry_timestamp_seconds",
    }  # fmt: skip
    assert bare(asked) - seldom - bare(metrics_named(page())) == set()


def test_every_query_is_of_the_chosen_release() -> None:
    for expression in expressions():
        braces = re.findall(
            r"\b(?:segue|process)_\w+(\{[^}]*\})?", re.sub(r"by \([^)]*\)|segue_release", "", expression)
        )
        assert braces
        assert all('namespace="$namespace",="$release"' in each for each in braces), expression


def test_panels_have_numbers_and_places_of_their_own() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: dict[tuple[int, int], Any] = {}
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= COLUMNS * WIDTH == 24
        for at in [
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        ]:
            assert taken.setdefault(at, panel["id"]) == panel["id"]
    titles = [panel["title"] for panel in panels]
    assert len(set(titles)) == len(titles)


def test_the_sidecar_finds_the_same_dashboard() -> None:
    rendered = of_kind(
        objects(None, *ALL, SHOWN, "monitoring.dashboard.annotations.grafana_folder=Serving"), "ConfigMap"
    )
    found = rendered["segue-dashboard"]
    assert json.loads(found["data"]["segue.json"]) == dashboard()
    assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert found["metadata"]["annotations"] == {"grafana_folder": "Serving"}
    assert complaints(found, versions()[0]) == []
    assert "segue-dashboard" not in of_kind(objects(None, *ALL), "ConfigMap")


def test_exemplars_are_asked_of_the_histograms_that_have_them() -> None:
    have = {
        each.name for each in declared_metrics() if isinstance(each, HistogramMetric) and each.has_exemplars
    }
    targets = [target for panel in dashboard()["panels"] for target in panel.get("targets", [])]
    asked = [target["expr"] for target in targets if target.get("exemplar")]
    assert {name for expression in asked for name in re.findall(r"segue_\w+(?=_bucket)", expression)} == have
    assert len(asked) == len(have), "each once"
