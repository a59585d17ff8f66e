"""Ways to the routers from outside of the cluster: an Ingress, and an HTTPRoute. Both are off by default."""

from __future__ import annotations

from typing import Any

import pytest

from tests.charts.kubernetes_schemas import complaints, versions
from tests.charts.rendering import RefusedError, manifest, objects, of_kind

ADMITTED = "networkPolicy.clientsFrom[0].namespaceSelector.matchLabels.name=edge"
INGRESS = ("router.ingress.enabled=true", ADMITTED)
METRICS = "router.config.metricsOnApiPort=true"
ROUTE = ("router.httpRoute.enabled=true", "router.httpRoute.parentRefs[0].name=public", ADMITTED)


def the_only(kind: str, *sets: str) -> Any:
    return of_kind(objects(None, *sets), kind)["segue-router"]


def test_neither_is_there_unless_it_is_asked_for() -> None:
    assert not {"Ingress", "HTTPRoute"} & {thing["kind"] for thing in objects(None)}


@pytest.mark.parametrize("version", [versions()[0], versions()[-1]])
def test_an_ingress_leads_each_host_to_the_service_unbuffered(version: str) -> None:
    tls = ("router.ingress.tls[0].secretName=llm", "router.ingress.tls[0].hosts={a.example.com}")
    hosts = "router.ingress.hosts={a.example.com,b.example.com}"
    ingress = the_only(
        "Ingress", *INGRESS, hosts, *tls, "router.ingress.className=nginx", "router.service.port=80"
    )
    assert complaints(ingress, version) == []
    assert [rule["host"] for rule in ingress["spec"]["rules"]] == ["a.example.com", "b.example.com"]
    service = the_only("Service", "router.service.port=80")
    named = {port["name"] for port in service["spec"]["ports"]}
    for rule in ingress["spec"]["rules"]:
        [path] = rule["http"]["paths"]
        assert path["backend"]["service"]["name"] == service["metadata"]["name"]
        assert path["backend"]["service"]["port"]["name"] in named
    assert ingress["spec"]["ingressClassName"] == "nginx"
    assert ingress["metadata"]["annotations"]["nginx.ingress.kubernetes.io/proxy-buffering"] == "off"


def test_an_ingress_without_hosts_takes_any() -> None:
    [rule] = the_only("Ingress", *INGRESS)["spec"]["rules"]
    assert "host" not in rule


def test_a_route_takes_off_its_prefix_and_ends_no_stream() -> None:
    header = ("router.httpRoute.headers[0].name=x-model", "router.httpRoute.headers[0].value=small")
    route = the_only(
        "HTTPRoute", *ROUTE, *header, "router.httpRoute.pathPrefix=/small", "router.service.port=80"
    )
    [rule] = route["spec"]["rules"]
    assert rule["timeouts"] == {"request": "0s"}
    assert rule["backendRefs"] == [{"name": "segue-router", "port": 80}]
    assert rule["matches"] == [
        {
            "path": {"type": "PathPrefix", "value": "/small"},
            "headers": [{"type": "Exact", "name": "x-model", "value": "small"}],
        }
    ]
    rewrite = rule["filters"][0]["urlRewrite"]["path"]
    assert rewrite == {"type": "ReplacePrefixMatch", "replacePrefixMatch": "/"}
    assert "filters" not in the_only("HTTPRoute", *ROUTE)["spec"]["rules"][0]


@pytest.mark.parametrize(
    ("sets", "sentence"),
    [
        (
            INGRESS[:1],
            r"router\.ingress\.enabled, but networkPolicy\.clientsFrom admits pods of this namespace alone",
        ),
        (
            ROUTE[:2],
            r"router\.httpRoute\.enabled, but networkPolicy\.clientsFrom admits pods of this namespace alone",
        ),
        ((ROUTE[0], ADMITTED), r"router\.httpRoute\.parentRefs is empty: name the Gateway"),
        ((*INGRESS, METRICS), r"router\.ingress\.enabled sends every path of the API's port outside"),
        ((*ROUTE, METRICS), r"router\.httpRoute\.enabled sends every path of the API's port outside"),
    ],
)
def test_an_edge_that_nobody_could_use_or_that_opens_metrics_is_refused(
    sets: tuple[str, ...], sentence: str
) -> None:
    with pytest.raises(RefusedError, match=sentence):
        manifest(None, *sets)
