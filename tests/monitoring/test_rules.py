"""The rendered rules, judged by promtool: each alert fires when it should, alone, and is silent when it should be."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.charts.rendering import RELEASE, VALUE_SETS, RefusedError, manifest
from tests.monitoring.rendered import (
    ALL,
    RDMA,
    RELEASE_LABELS,
    alerts_of,
    exposed_names,
    metrics_named,
    pod_monitor,
    promtool,
    rule_groups,
    write_rules,
)

DOCS = Path(__file__).parents[2] / "docs"
CASES: dict[str, Any] = yaml.safe_load(
    Path(__file__).with_name("alert_cases.yaml").read_text(encoding="utf-8")
)
ROUTER = 'segue_ready{pod="r1",role="router"}'
SILENT_MINUTES = (2, 5, 10, 20, 30, 60, 80)
SLO = ("monitoring.slo.ttftSeconds=2",)


def series_of(given: dict[str, str]) -> list[dict[str, str]]:
    """Input series of promtool, with what the PodMonitor adds to all, and a ready router."""
    labels = ",".join(f'{name}="{value}"' for name, value in RELEASE_LABELS.items())
    whole = {} if ROUTER in given else {ROUTER: "1x200"}
    return [
        {"series": f"{name.removesuffix('}')},{labels}}}", "values": values}
        for name, values in (whole | given).items()
    ]


def promtool_test(name: str, given: dict[str, str], expected: list[dict[str, Any]]) -> dict[str, Any]:
    return {"name": name, "interval": "30s", "input_series": series_of(given), "alert_rule_test": expected}


def firing_test(alert: str, case: dict[str, Any], alerts: dict[str, Any]) -> dict[str, Any]:
    """At the moment this alert fires and no other does; a moment before it does not."""
    rule = alerts[alert]
    fires = {
        "exp_labels": rule["labels"] | case.get("labels", {}),
        "exp_annotations": {"summary": case["summary"], "runbook_url": rule["annotations"]["runbook_url"]},
    }
    expected: list[dict[str, Any]] = [
        {"eval_time": case["at"], "alertname": each, "exp_alerts": [fires] if each == alert else []}
        for each in alerts
    ]
    expected.append({"eval_time": case["not_yet"], "alertname": alert, "exp_alerts": []})
    return promtool_test(f"{alert} fires", case["series"], expected)


def silent_test(alert: str, why: str, given: dict[str, str]) -> dict[str, Any]:
    moments = [{"eval_time": f"{minute}m", "alertname": alert, "exp_alerts": []} for minute in SILENT_MINUTES]
    return promtool_test(f"{alert}: {why}", given, moments)


@pytest.fixture(scope="module")
def alerts() -> dict[str, Any]:
    return alerts_of(rule_groups(*RDMA))


@pytest.mark.parametrize(
    "sets", [(), RDMA, ("router.config.localPrefill=never",), ("monitoring.rules.for=5s",)]
)
def test_promtool_takes_the_rules(sets: tuple[str, ...], tmp_path: Path) -> None:
    groups = write_rules(tmp_path / "rules.yaml", *sets)
    rules = sum(len(group["rules"]) for group in groups["groups"])
    assert f"SUCCESS: {rules} rules found" in promtool("check", "rules", str(tmp_path / "rules.yaml"))
    expressions = "".join(rule["expr"] for group in groups["groups"] for rule in group["rules"])
    assert not re.search(r"<\w+>", expressions), "what the template should have put in"


def test_every_alert_has_a_case_and_a_paragraph(alerts: dict[str, Any]) -> None:
    page = (DOCS / "alerts.md").read_text(encoding="utf-8")
    assert list(alerts) == list(CASES)
    assert [line.removeprefix("## ") for line in page.splitlines() if line.startswith("## Segue")] == list(
        alerts
    )
    for name, rule in alerts.items():
        assert rule["annotations"]["runbook_url"].endswith(f"docs/alerts.md#{name.lower()}")


@pytest.mark.parametrize("alert", CASES)
def test_an_alert_fires_alone_and_is_silent(alert: str, alerts: dict[str, Any], tmp_path: Path) -> None:
    write_rules(tmp_path / "rules.yaml", *RDMA, *SLO)
    tests = [firing_test(alert, CASES[alert]["fires"], alerts)]
    tests += [silent_test(alert, why, given) for why, given in CASES[alert]["silent"].items()]
    file = {"rule_files": ["rules.yaml"], "evaluation_interval": "30s", "tests": tests}
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(file), encoding="utf-8")
    promtool("test", "rules", "tests.yaml", cwd=tmp_path)


def test_a_prefill_worker_is_missed_where_decode_workers_may_not_compute_prompts(tmp_path: Path) -> None:
    case = CASES["SegueRoleMissing"]["silent"]
    [given] = [series for why, series in case.items() if why.startswith("without prefill workers")]
    write_rules(tmp_path / "rules.yaml", "router.config.localPrefill=never")
    test = promtool_test(
        "never", given, [{"eval_time": "10m", "alertname": "SegueRoleMissing", "exp_alerts": []}]
    )
    file = {"rule_files": ["rules.yaml"], "evaluation_interval": "30s", "tests": [test]}
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(file), encoding="utf-8")
    with pytest.raises(AssertionError, match=r"no worker of prefill\|decode is linked"):
        promtool("test", "rules", "tests.yaml", cwd=tmp_path)


def test_rules_and_runbooks_name_declared_metrics_alone() -> None:
    rules = yaml.safe_dump(rule_groups(*RDMA))
    assert len(metrics_named(rules)) > 20
    for text in (rules, *((DOCS / page).read_text(encoding="utf-8") for page in ("alerts.md", "gitops.md"))):
        assert metrics_named(text)
        assert metrics_named(text) - exposed_names() == set()


def test_values_reach_the_rules() -> None:
    file = (
        "monitoring.rules.for=7s",
        "monitoring.slo.ttftSeconds=3",
        "monitoring.rules.runbookUrl=https://wiki/alerts",
    )
    alerts = alerts_of(rule_groups(*file))
    assert {rule.get("for", "7s") for rule in alerts.values()} == {"7s"}
    assert 'segue_release="segue"} > 3 and' in alerts["SegueTtftSlow"]["expr"]
    assert 'segue_release="segue"} > 0.1 and' in alerts["SegueItlSlow"]["expr"]
    assert alerts["SegueErrors"]["annotations"]["runbook_url"] == "https://wiki/alerts#segueerrors"
    assert "for" not in alerts["SegueWorkerHangs"]
    assert "SegueKvOverTcp" not in alerts


@pytest.mark.parametrize("values", VALUE_SETS)
def test_nothing_of_it_is_rendered_unless_it_is_asked_for(values: str) -> None:
    assert "monitoring.coreos.com" not in manifest(values)


def test_prometheus_finds_all_pods_and_names_their_release() -> None:
    spec = pod_monitor("monitoring.podMonitor.labels.release=stack", "monitoring.podMonitor.interval=5s")[
        "spec"
    ]
    assert spec["selector"]["matchExpressions"][0]["values"] == ["router", "prefill", "decode"]
    [endpoint] = spec["podMetricsEndpoints"]
    assert (endpoint["port"], endpoint["interval"]) == ("admin", "5s")
    # The CRD's default is said: Argo CD compares lists whole, and would never settle.
    assert [each["action"] for each in endpoint["relabelings"]] == ["replace"]
    labels = pod_monitor("monitoring.podMonitor.labels.release=stack")["metadata"]["labels"]
    assert labels["release"] == "stack"
    assert labels["app.kubernetes.io/instance"] == RELEASE


def test_a_scrape_that_no_policy_admits_is_refused() -> None:
    with pytest.raises(
        RefusedError, match=r"metricsFrom is empty: name the pods or the namespace of Prometheus"
    ):
        manifest(None, "monitoring.podMonitor.enabled=true")
    assert "PodMonitor" in manifest(None, "monitoring.podMonitor.enabled=true", "networkPolicy.enabled=false")
    assert "PodMonitor" in manifest(None, *ALL)
