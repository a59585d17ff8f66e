"""Who may reach whom, as a table that the rendered policies are evaluated against."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from shared.local.isolation_test import ClosedPorts
from tests.charts.network_policies import PolicyEndpoint, may_reach
from tests.charts.rendering import CHART, NAMESPACE, objects, of_kind, pods, run_helm, selects

ADMIN, ROUTER, LINKS, KV, KV_LAST, BEYOND_KV = 8001, 8000, 8002, 20000, 20007, 20008
CLIENTS = "networkPolicy.clientsFrom[0].namespaceSelector.matchLabels.kubernetes\\.io/metadata\\.name=ingress"
METRICS = (
    "networkPolicy.metricsFrom[0].namespaceSelector.matchLabels.kubernetes\\.io/metadata\\.name=monitoring"
)

HUB = ("model=Qwen/Qwen3-0.6B", "modelSource.hub.allowMovingRevision=true", "modelSource.sizeLimit=4Gi")

# Source → destination, at port: whether it is allowed by default.
INGRESS = [
    ("stranger", "router", ROUTER, True),
    ("elsewhere", "router", ROUTER, False),
    ("outside", "router", ROUTER, False),
    ("test", "router", ROUTER, True),
    ("router", "router", ADMIN, True),
    ("decode", "router", ROUTER, False),
    ("stranger", "router", LINKS, False),
    ("router", "prefill", LINKS, True),
    ("router", "decode", LINKS, True),
    ("router", "decode", ADMIN, False),
    ("router", "decode", KV, False),
    ("prefill", "decode", KV, True),
    ("decode", "prefill", KV, True),
    ("decode", "prefill", KV_LAST, True),
    ("decode", "prefill", BEYOND_KV, False),
    ("decode", "decode", KV, True),
    ("decode", "prefill", LINKS, False),
    ("decode", "prefill", ADMIN, False),
    ("isolation-test", "decode", LINKS, False),
    ("isolation-test", "decode", KV, False),
    ("isolation-test", "prefill", KV_LAST, False),
    ("stranger", "decode", LINKS, False),
    ("stranger", "decode", KV, False),
    ("stranger", "decode", ADMIN, False),
    ("monitoring", "decode", ADMIN, False),
    ("their router", "decode", LINKS, False),
    ("their decode", "prefill", KV, False),
    ("router elsewhere", "decode", LINKS, False),
    ("decode elsewhere", "prefill", KV, False),
    ("outside", "decode", KV, False),
]


def cast() -> dict[str, PolicyEndpoint]:
    """Everybody who takes part: this release's pods, another's, the same labels in another namespace, strangers."""

    def endpoints(release: str) -> dict[str, PolicyEndpoint]:
        return {
            component: PolicyEndpoint(
                pod["metadata"]["labels"],
                {
                    port["name"]: port["containerPort"]
                    for port in pod["spec"]["containers"][0].get("ports", [])
                },
            )
            for component, pod in pods(objects(None, release=release)).items()
        }

    ours = endpoints("segue")
    others = {f"their {component}": endpoint for component, endpoint in endpoints("theirs").items()}
    moved = {
        f"{component} elsewhere": PolicyEndpoint(each.labels, each.ports, "other")
        for component, each in ours.items()
    }
    strangers = {
        "stranger": PolicyEndpoint({"app": "web"}),
        "elsewhere": PolicyEndpoint({"app": "web"}, namespace="other"),
        "monitoring": PolicyEndpoint({"app": "prometheus"}, namespace="monitoring"),
        "ingress": PolicyEndpoint({"app": "nginx"}, namespace="ingress"),
        "istiod": PolicyEndpoint({"app": "istiod"}, namespace="istio-system"),
        "destination": PolicyEndpoint(
            {"linkerd.io/control-plane-component": "destination"}, namespace="mesh"
        ),
        "identity": PolicyEndpoint({"linkerd.io/control-plane-component": "identity"}, namespace="mesh"),
        "outside": PolicyEndpoint(outside=True),
    }
    return ours | others | moved | strangers


def allowed(source: str, target: str, port: int, *sets: str) -> bool:
    policies = list(of_kind(objects(None, *sets), "NetworkPolicy").values())
    everybody = cast()
    return may_reach(policies, everybody[source], everybody[target], port)


@pytest.mark.parametrize(("source", "target", "port", "expected"), INGRESS)
def test_who_may_reach_whom(source: str, target: str, port: int, expected: bool) -> None:
    assert allowed(source, target, port) is expected


@pytest.mark.parametrize(("source", "target", "port"), [row[:3] for row in INGRESS])
def test_without_policies_everybody_may(source: str, target: str, port: int) -> None:
    assert allowed(source, target, port, "networkPolicy.enabled=false")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("ingress", True),
        ("test", True),
        ("router", False),
        ("decode", False),
        ("stranger", False),
        ("elsewhere", False),
        ("their test", False),
    ],
)
def test_named_clients_alone_may_reach_the_router(source: str, expected: bool) -> None:
    assert allowed(source, "router", ROUTER, CLIENTS) is expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("test", True),
        ("router", True),
        ("decode", False),
        ("stranger", False),
        ("monitoring", False),
        ("ingress", False),
        ("outside", False),
        ("their router", False),
        ("their test", False),
    ],
)
def test_the_routers_admin_port_is_for_routers_and_the_test_alone(source: str, expected: bool) -> None:
    assert allowed(source, "router", ADMIN) is expected
    assert allowed(source, "router", ADMIN, CLIENTS) is expected


@pytest.mark.parametrize("target", ["router", "prefill", "decode"])
def test_those_who_read_metrics_reach_the_admin_ports_and_no_other(target: str) -> None:
    assert allowed("monitoring", target, ADMIN, METRICS)
    assert not allowed("monitoring", target, ROUTER if target == "router" else LINKS, CLIENTS, METRICS)


@pytest.mark.parametrize(
    ("source", "port", "expected"),
    [("monitoring", ADMIN, True), ("monitoring", KV, False), ("stranger", ADMIN, False)],
)
def test_metrics_are_for_those_who_are_named(source: str, port: int, expected: bool) -> None:
    assert allowed(source, "decode", port, METRICS) is expected


@pytest.mark.parametrize(
    ("source", "target", "port", "expected"),
    [
        ("router", "decode", LINKS, True),
        ("router", "decode", KV, False),
        ("router", "router", ADMIN, True),
        ("router", "router", ROUTER, False),
        ("router", "their router", ADMIN, False),
        ("router", "outside", 443, True),  # the API server
        ("router", "outside", 6443, True),
        ("router", "outside", 80, False),
        ("decode", "prefill", KV, True),
        ("decode", "router", ROUTER, False),
        ("router", "outside", 8443, True),
        ("router", "outside", 16443, True),
        ("decode", "outside", 443, False),
        ("decode", "outside", 53, False),
        ("router", "outside", 53, False),
        ("decode", "stranger", 8080, False),
        ("keys-create", "outside", 443, True),  # the API server
        ("keys-create", "outside", 6443, True),
        ("keys-create", "outside", 80, False),
        ("keys-create", "decode", LINKS, False),
        ("keys-create", "router", ROUTER, False),
        ("keys-remove", "outside", 443, True),
        ("keys-remove", "their router", ADMIN, False),
        ("stranger", "keys-create", 8000, False),
    ],
)
def test_the_ways_out_are_those_that_the_processes_need(
    source: str, target: str, port: int, expected: bool
) -> None:
    assert allowed(source, target, port) is expected


def test_without_a_policy_for_it_every_way_out_is_open() -> None:
    assert allowed("decode", "outside", 443, "networkPolicy.egress.enabled=false")


def test_an_empty_list_of_clients_admits_the_test_alone() -> None:
    """`--set-json networkPolicy.clientsFrom=[]`, which --set writes as null."""
    for source in ("outside", "elsewhere"):
        assert not allowed(source, "router", ROUTER, "networkPolicy.clientsFrom=null")
    assert allowed("test", "router", ROUTER, "networkPolicy.clientsFrom=null")


def test_clients_from_every_address_are_named_as_such() -> None:
    assert allowed("outside", "router", ROUTER, "networkPolicy.clientsFrom[0].ipBlock.cidr=0.0.0.0/0")


def test_closed_egress_still_lets_a_model_be_fetched_from_the_hub() -> None:
    for source in ("decode", "router"):
        assert allowed(source, "outside", 443, *HUB)
        for port in (53, 5353):  # policies see the port of the pod that answers: OpenShift's is 5353
            assert allowed(source, "outside", port, *HUB)
            assert not allowed(source, "outside", port)
        assert not allowed(source, "outside", 5353, *HUB, "networkPolicy.egress.dnsPorts={53}")


def test_where_a_namespace_denies_all_the_documented_policy_lets_helm_test_out(tmp_path: Path) -> None:
    page = (CHART.parents[1] / "docs" / "operating.md").read_text(encoding="utf-8")
    [documented] = re.findall(r"(?s)```yaml\n(extraObjects:.*?segue-helm-test.*?)```", page)
    (tmp_path / "values.yaml").write_text(documented, encoding="utf-8")
    deny = {
        "metadata": {"namespace": NAMESPACE},
        "spec": {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]},
    }
    everybody = cast()
    for flags, out in (((), False), (("--values", str(tmp_path / "values.yaml")), True)):
        text = run_helm("template", "segue", str(CHART), "--namespace", NAMESPACE, *flags)
        rendered = [each for each in yaml.safe_load_all(text) if each]
        policies = [deny, *of_kind(rendered, "NetworkPolicy").values()]
        for source, target, port, expected in (
            ("test", "outside", 53, out),
            ("test", "router", ROUTER, out),
            ("test", "router", ADMIN, out),
            ("isolation-test", "outside", 53, out),
            ("isolation-test", "decode", LINKS, False),
            ("router", "decode", LINKS, True),
            ("decode", "outside", 53, False),
        ):
            assert may_reach(policies, everybody[source], everybody[target], port) is expected, (source, port)


@pytest.mark.parametrize(
    ("mesh", "control_plane", "port"),
    [
        ("istio", "istiod", 15012),
        ("linkerd", "identity", 8080),
        ("linkerd", "destination", 8086),
        ("linkerd", "destination", 8090),
    ],
)
def test_closed_egress_lets_the_proxy_of_a_mesh_reach_its_control_plane(
    mesh: str, control_plane: str, port: int
) -> None:
    for source in ("router", "prefill", "decode"):
        assert allowed(source, control_plane, port, f"mesh={mesh}")
        assert allowed(source, "outside", 53, f"mesh={mesh}")
        assert allowed(source, control_plane, port, f"mesh={mesh}", *HUB)
        assert not allowed(source, "stranger", port, f"mesh={mesh}")
        assert not allowed(source, control_plane, port)


@pytest.mark.parametrize(
    ("endpoint", "port"),
    [
        ("https://mirror", 443),
        ("http://mirror", 80),
        ("http://mirror:8080", 8080),
        ("https://[fd00::1]:444/x", 444),
    ],
)
def test_closed_egress_opens_the_port_of_a_mirror(endpoint: str, port: int) -> None:
    sets = (*HUB, f"modelSource.hub.endpoint={endpoint}")
    assert allowed("decode", "outside", port, *sets)
    assert not allowed("decode", "outside", port + 1, *sets)


def test_closed_egress_opens_the_port_of_a_proxy_and_of_a_bucket() -> None:
    assert allowed("decode", "outside", 3128, *HUB, "networkPolicy.egress.modelPorts={3128}")
    assert not allowed("decode", "outside", 443, *HUB, "networkPolicy.egress.modelPorts={3128}")
    fetch = ("modelSource.kind=fetch", "modelSource.fetch.image=a", "modelSource.fetch.command={a}")
    assert allowed("router", "outside", 443, *fetch, "modelSource.cache.claimName=models")


def test_the_isolation_test_asks_at_every_port_of_workers_that_policies_close_to_strangers() -> None:
    rendered = objects(None, "kv.ports=21000-21003")
    test = pods(rendered)["isolation-test"]
    closed = [ClosedPorts.parse(each) for each in test["spec"]["containers"][0]["args"]]
    assert {each.ports for each in closed} == {(LINKS, 21000, 21001, 21002, 21003)}
    services = of_kind(rendered, "Service")
    selectors = [services[each.host]["spec"]["selector"] for each in closed]
    assert [each["app.kubernetes.io/component"] for each in selectors] == ["prefill", "decode"]
    assert not any(selects({"matchLabels": each}, test["metadata"]["labels"]) for each in selectors)


@pytest.mark.parametrize("off", ["networkPolicy.enabled=false", "networkPolicy.verify=false"])
def test_isolation_is_not_tested_without_policies_or_where_verify_is_off(off: str) -> None:
    assert "isolation-test" not in pods(objects(None, off))


def test_every_policy_lies_in_the_namespace_of_its_pods() -> None:
    assert {each["metadata"]["namespace"] for each in of_kind(objects(None), "NetworkPolicy").values()} == {
        NAMESPACE
    }
