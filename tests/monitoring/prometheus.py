"""A real Prometheus that scrapes processes as its operator would have it scrape pods, by the rendered PodMonitor.

The operator's own part is here in three lines: which labels it gives to the pods of a PodMonitor.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx2
import yaml

from tests.monitoring.pods import Pods, free_ports
from tests.monitoring.rendered import program, rule_groups
from tests.waiting import until

SECONDS = 1.0  # between two scrapes, and between two looks at the rules
OPERATOR = [  # what its generated configuration begins with
    {"source_labels": ["__meta_kubernetes_namespace"], "target_label": "namespace"},
    {"source_labels": ["__meta_kubernetes_pod_name"], "target_label": "pod"},
]
_WINDOW = re.compile(r"\[\d+[smh](:\d+[smh])?\]")


def hurried(groups: dict[str, Any], window: str) -> dict[str, Any]:
    """The rules, with this window instead of minutes and hours; what they compare with stays."""
    text = yaml.safe_dump(groups)
    return dict(
        yaml.safe_load(_WINDOW.sub(lambda found: f"[{window}:1s]" if found[1] else f"[{window}]", text))
    )


def relabeling(monitor: dict[str, Any]) -> list[dict[str, Any]]:
    """The relabelings of a PodMonitor in the words of Prometheus' own file."""
    [endpoint] = monitor["spec"]["podMetricsEndpoints"]

    def in_snake_case(name: str) -> str:
        return re.sub(r"(?=[A-Z])", "_", name).lower()

    return [{in_snake_case(key): value for key, value in each.items()} for each in endpoint["relabelings"]]


@dataclass
class Prometheus:
    """A running server, and the pods that it is to find."""

    url: str
    targets: Path
    pods: Pods

    def find_pods(self) -> None:
        """Tell it which pods there are, as the API server would."""
        found = [
            {
                "targets": [f"127.0.0.1:{pod.admin_port}"],
                "labels": {
                    "__meta_kubernetes_namespace": "serving",
                    "__meta_kubernetes_pod_name": pod.name,
                    "__meta_kubernetes_pod_label_app_kubernetes_io_instance": "segue",
                },
            }
            for pod in self.pods.running.values()
        ]
        self.targets.with_suffix(".new").write_text(json.dumps(found), encoding="utf-8")
        self.targets.with_suffix(".new").replace(self.targets)

    def ask(self, path: str, **parameters: str | float) -> Any:
        """What its API answers under /api/v1; raises with its complaint."""
        answer = httpx2.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=30.0, verify=False).json()
        assert answer["status"] == "success", (parameters, answer)
        return answer["data"]

    def values(self, expression: str, start: float, end: float, step: float = SECONDS) -> list[Any]:
        """The series of an expression over a time: labels, and the moments and values that are numbers."""
        found = self.ask("query_range", query=expression, start=start, end=end, step=step)["result"]
        numbers = [
            (
                each["metric"],
                [(at, float(text)) for at, text in each["values"] if not math.isnan(float(text))],
            )
            for each in found
        ]
        return [(labels, values) for labels, values in numbers if values]

    def firing(self) -> set[str]:
        """The alerts that fire now."""
        alerts = self.ask("alerts")["alerts"]
        return {each["labels"]["alertname"] for each in alerts if each["state"] == "firing"}

    def first_fired(self, start: float, end: float) -> dict[str, float]:
        """When each alert that fired did so first, to the whole second: two questions tell the same moment."""
        first: dict[str, float] = {}
        start = math.ceil(start)
        if start > end:
            return first
        for labels, values in self.values('ALERTS{alertstate="firing"}', start, end):
            name = labels["alertname"]
            first[name] = min(first.get(name, math.inf), values[0][0])
        return first

    def labels_of_pods(self) -> set[str]:
        """Names of the pods that it scrapes with success, and that have the labels of the release."""
        targets = [(each["labels"], each["health"]) for each in self.ask("targets")["activeTargets"]]
        release = ("serving", "segue", "up")
        return {
            labels["pod"]
            for labels, health in targets
            if (labels["namespace"], labels["segue_release"], health) == release
        }

    def judged_at(self) -> float:
        """When all groups of rules were evaluated last."""
        groups = self.ask("rules")["groups"]
        return min(
            datetime.fromisoformat(each["lastEvaluation"][:19] + "+00:00").timestamp() for each in groups
        )

    def unhealthy_rules(self) -> list[str]:
        """Rules that could not be evaluated."""
        groups = self.ask("rules")["groups"]
        return [
            f"{rule['name']}: {rule.get('lastError')}"
            for group in groups
            for rule in group["rules"]
            if rule["health"] != "ok"
        ]

    def is_ready(self) -> bool:
        with suppress(httpx2.TransportError):
            return httpx2.get(f"{self.url}/-/ready", timeout=5.0, verify=False).status_code == 200
        return False


@contextmanager
def prometheus(
    folder: Path, pods: Pods, monitor: dict[str, Any], window: str, *sets: str
) -> Iterator[Prometheus]:
    """Debian's Prometheus with the rendered rules, hurried, and the rendered scrape."""
    [port] = free_ports(1)
    (folder / "rules.yaml").write_text(yaml.safe_dump(hurried(rule_groups(*sets), window)), encoding="utf-8")
    scrape = {
        "job_name": "serving/segue",
        "metrics_path": monitor["spec"]["podMetricsEndpoints"][0]["path"],
        "file_sd_configs": [{"files": [str(folder / "targets.json")]}],
        "relabel_configs": [*OPERATOR, *relabeling(monitor)],
    }
    often = {f"{what}_interval": f"{int(SECONDS * 1000)}ms" for what in ("scrape", "evaluation")}
    config = {
        "global": {**often, "scrape_timeout": often["scrape_interval"]},
        "rule_files": ["rules.yaml"],
        "scrape_configs": [scrape],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    found = Prometheus(f"http://127.0.0.1:{port}", folder / "targets.json", pods)
    found.find_pods()
    command = [
        program("prometheus"),
        f"--config.file={folder / 'prometheus.yaml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        "--enable-feature=exemplar-storage",
    ]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log
        )
    try:
        until(found.is_ready, 30, "Prometheus")
        yield found
    finally:
        process.terminate()
        process.wait(30)
