"""Ways to the routers from outside of the cluster: an Ingress, an HTTPRoute, an InferencePool; off by default."""

from __future__ import annotations

from typing import Any

import pytest
from jsonschema import Draft202012Validator

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
    # In lists nothing is left to the defaults of the CRD, or Argo CD, which compares lists whole, would never settle.
    assert rule["backendRefs"] == [
        {"group": "", "kind": "Service", "name": "segue-router", "port": 80, "weight": 1}
    ]
    [parent] = route["spec"]["parentRefs"]
    assert (parent["group"], parent["kind"]) == ("gateway.networking.k8s.io", "Gateway")
    assert rule["matches"] == [
        {
            "path": {"type": "PathPrefix", "value": "/small"},
            "headers": [{"type": "Exact", "name": "x-model", "value": "small"}],
        }
    ]
    rewrite = rule["filters"][0]["urlRewrite"]["path"]
    assert rewrite == {"type": "ReplacePrefixMatch", "replacePrefixMatch": "/"}
    assert "filters" not in the_only("HTTPRoute", *ROUTE)["spec"]["rules"][0]
    [parent] = the_only("HTTPRoute", *ROUTE, "router.httpRoute.parentRefs[0].kind=Service")["spec"][
        "parentRefs"
    ]
    assert parent["kind"] == "Service"


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


# What version v1 of the InferencePool's CRD admits below `spec` (Gateway API Inference Extension, 2026-08). Unknown
# fields are refused here: the API server would drop them without a word.
LABEL_VALUE = {"type": "string", "maxLength": 63, "pattern": "^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$"}
PORT = {
    "type": "object",
    "required": ["number"],
    "properties": {"number": {"type": "integer", "minimum": 1, "maximum": 65535}},
    "additionalProperties": False,
}
SELECTOR = {
    "type": "object",
    "required": ["matchLabels"],
    "properties": {
        "matchLabels": {"minProperties": 1, "maxProperties": 64, "additionalProperties": LABEL_VALUE}
    },
    "additionalProperties": False,
}
PICKER = {
    "type": "object",
    "required": ["name", "port"],  # the port, since it is a Service
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 253},
        "port": PORT,
        "failureMode": {"enum": ["FailOpen", "FailClose"]},
    },
    "additionalProperties": False,
}
POOL = {
    "type": "object",
    "required": ["selector", "targetPorts", "endpointPickerRef"],
    "properties": {
        "selector": SELECTOR,
        "targetPorts": {"type": "array", "minItems": 1, "maxItems": 8, "items": PORT},
        "endpointPickerRef": PICKER,
    },
    "additionalProperties": False,
}


@pytest.mark.parametrize("port", ["", "9999"])
def test_a_pool_is_what_its_crd_admits(port: str) -> None:
    sets = ["inferencePool.enabled=true", "inferencePool.endpointPicker.name=picker", METRICS, ADMITTED]
    sets += [f"inferencePool.endpointPicker.port={port}"] if port else []
    pool = the_only("InferencePool", *sets)
    assert pool["apiVersion"] == "inference.networking.k8s.io/v1"
    admitted = Draft202012Validator(POOL)
    assert [error.message for error in admitted.iter_errors(pool["spec"])] == []
    for wrong in (
        pool["spec"] | {"extensionRef": {"name": "picker"}},  # of the versions before
        pool["spec"] | {"targetPorts": [{"number": "8000"}]},
        pool["spec"] | {"endpointPickerRef": {"name": "picker"}},
    ):
        assert not admitted.is_valid(wrong)
