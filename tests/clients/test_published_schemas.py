"""What the chart gives to programs of others, by their schemas: Prometheus' operator, gateways, Grafana."""

from __future__ import annotations

import json
import subprocess
from copy import deepcopy
from typing import Any

import pytest

from tests.charts.rendering import Object, objects, of_kind
from tests.charts.test_edges import ROUTE
from tests.clients.environments import client_command
from tests.monitoring.dashboard import FILE
from tests.monitoring.rendered import ALL, RDMA

pytestmark = pytest.mark.timeout(1800)  # the environments are made here


def told_by(program: str, given: object) -> Any:
    """What a program that reads JSON from stdin writes to stdout."""
    ended = subprocess.run(
        client_command(program), input=json.dumps(given), capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return json.loads(ended.stdout)


def for_the_operator() -> list[Object]:
    rendered = objects(
        None, *ALL, *RDMA, "monitoring.podMonitor.interval=5s", "monitoring.rules.labels.release=stack"
    )
    return [thing for kind in ("PodMonitor", "PrometheusRule") for thing in of_kind(rendered, kind).values()]


def test_the_operator_takes_scrape_and_rules() -> None:
    things = for_the_operator()
    assert len(things) == 2
    wrong = deepcopy(things)
    wrong[0]["spec"]["podMetricsEndpoints"][0]["interval"] = "5 seconds"
    wrong[1]["spec"]["groups"][0]["rules"][0]["for"] = 5
    complaints = told_by("resource_schemas", [*things, *wrong])
    assert complaints[:2] == ["", ""]
    assert "interval" in complaints[2]
    assert "for" in complaints[3]


def test_a_gateway_takes_the_route() -> None:
    sets = (*ROUTE, "router.httpRoute.hostnames={llm.example.com}", "router.httpRoute.pathPrefix=/small")
    [route] = of_kind(objects(None, *sets), "HTTPRoute").values()
    wrong = deepcopy(route)
    wrong["spec"]["rules"][0]["timeouts"]["request"] = "for ever"
    complaints = told_by("resource_schemas", [route, wrong])
    assert complaints[0] == ""
    assert "timeouts/request" in complaints[1]


def test_grafana_reads_the_dashboard_and_keeps_all_of_it() -> None:
    """What its classes do not know is lost when they write it again."""
    given = json.loads(FILE.read_text(encoding="utf-8"))
    told = told_by("grafana_library", given)
    assert lost(given, told["kept"]) == []
    prefix = "grafana_foundation_sdk.models"
    assert {f"{prefix}.prometheus", f"{prefix}.timeseries"} <= set(told["kinds"])
    misspelt = deepcopy(given)
    misspelt["panels"][1]["gridPoz"] = misspelt["panels"][1].pop("gridPos")
    assert lost(misspelt, told_by("grafana_library", misspelt)["kept"]) == ["/panels/1/gridPoz"]


def lost(given: Any, kept: Any, path: str = "") -> list[str]:
    """Paths of what is not in `kept` as it was given."""
    if isinstance(given, dict) and isinstance(kept, dict):
        return [
            line
            for key, value in given.items()
            for line in (lost(value, kept[key], f"{path}/{key}") if key in kept else [f"{path}/{key}"])
        ]
    if isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        return [line for at, value in enumerate(given) for line in lost(value, kept[at], f"{path}/{at}")]
    return [] if given == kept else [path]
