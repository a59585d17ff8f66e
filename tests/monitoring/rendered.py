"""What the chart renders for Prometheus and Grafana, and Prometheus' own programs that judge it.

Debian's package `prometheus` has both. On a machine without them the tests are skipped, and say so; in CI (the variable
CI is set) they fail.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from shared.primitives.metric_fields import HistogramMetric
from tests.charts.rendering import Object, objects, of_kind
from tests.tidy.reference import declared_metrics

ALL = (
    "monitoring.rules.enabled=true",
    "monitoring.podMonitor.enabled=true",
    "networkPolicy.metricsFrom[0].namespaceSelector.matchLabels.a=b",
)
RDMA = ("rdma.enabled=true", "rdma.acknowledgeOpenFabric=true", "rdma.devices=mlx5_0:1")
RELEASE_LABELS = {"namespace": "serving", "segue_release": "segue"}
_METRIC = re.compile(r"\bsegue_[a-z0-9_]+")
NOT_METRICS = {"segue_release"}  # a label


def program(name: str) -> str:
    """Path of `promtool` or `prometheus`; without it the test is skipped, and fails in CI."""
    if found := shutil.which(name):
        return found
    (pytest.fail if os.environ.get("CI") else pytest.skip)(
        f"{name} is not on PATH: Debian's package `prometheus` has it"
    )
    raise AssertionError  # neither of the two returns


def promtool(*arguments: str, cwd: Path | None = None) -> str:
    """What promtool prints; raises AssertionError with it where it complains."""
    ended = subprocess.run(
        [program("promtool"), *arguments], capture_output=True, text=True, check=False, cwd=cwd
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def rule_groups(*sets: str, values: str | None = None) -> dict[str, Any]:
    """The rendered rules, as a file of Prometheus has them."""
    rendered = of_kind(objects(values, *ALL, *sets), "PrometheusRule")
    spec: dict[str, Any] = rendered["segue"]["spec"]
    return spec


def alerts_of(groups: dict[str, Any]) -> dict[str, Any]:
    """The alerts among the rules, by name."""
    return {rule["alert"]: rule for group in groups["groups"] for rule in group["rules"] if "alert" in rule}


def write_rules(file: Path, *sets: str) -> dict[str, Any]:
    """Write the rendered rules where Prometheus reads them; what was written."""
    groups = rule_groups(*sets)
    file.write_text(yaml.safe_dump(groups), encoding="utf-8")
    return groups


def pod_monitor(*sets: str) -> Object:
    """The rendered PodMonitor."""
    return of_kind(objects(None, *ALL, *sets), "PodMonitor")["segue"]


def metrics_named(text: str) -> set[str]:
    """Metrics of Segue's that a text names."""
    return set(_METRIC.findall(text)) - NOT_METRICS


def exposed_names() -> set[str]:
    """Names of all series that processes may expose, out of the declarations."""
    names = set()
    for metric in declared_metrics():
        suffixes = ("", "_bucket", "_sum", "_count") if isinstance(metric, HistogramMetric) else ("",)
        names |= {metric.name + suffix for suffix in suffixes}
    return names
