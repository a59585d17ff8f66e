"""Presets: one word, and all that Kubernetes or a mesh needs to hear for it."""

from __future__ import annotations

import pytest

from router.config import RouterConfig
from shared.local.config import ROLE_CONFIGS
from tests.charts.kubernetes_schemas import complaints, versions
from tests.charts.rendering import EVERY_VALUE, RefusedError, environment, objects, of_kind, pods, selects

WORKERS = ("prefill", "decode")
WHOLE = ("qos=guaranteed", "prefill.resources.requests.cpu=2", "decode.resources.requests.cpu=3")
HUB = ("model=a/b", f"modelSource.hub.revision={'0' * 40}", "modelSource.cache.claimName=models")
MESHES = {
    "istio": (
        "traffic.sidecar.istio.io/excludeInboundPorts",
        "traffic.sidecar.istio.io/excludeOutboundPorts",
    ),
    "linkerd": ("config.linkerd.io/skip-inbound-ports", "config.linkerd.io/skip-outbound-ports"),
}


def ports(mesh: str, role: str, *sets: str) -> list[set[int]]:
    """What does not go through the proxy of a pod: what comes, and what leaves."""
    annotations = pods(objects(None, f"mesh={mesh}", *sets))[role]["metadata"]["annotations"]
    found: list[set[int]] = []
    for name in MESHES[mesh]:
        ranges = [[int(end) for end in part.split("-")] for part in annotations[name].split(",")]
        assert mesh == "linkerd" or all(len(part) == 1 for part in ranges), "Istio knows no ranges"
        found.append({port for part in ranges for port in range(part[0], part[-1] + 1)})
    return found


@pytest.mark.parametrize("mesh", MESHES)
def test_a_proxy_takes_clients_http_alone(mesh: str) -> None:
    pod = pods(objects(None))
    listening: dict[str, dict[str, int]] = {
        role: {port["name"]: port["containerPort"] for port in pod[role]["spec"]["containers"][0]["ports"]}
        for role in ROLE_CONFIGS
    }
    kv = set(range(20000, 20008))
    for role in WORKERS:
        assert ports(mesh, role) == [{listening[role]["admin"], listening[role]["links"]} | kv, {8002} | kv]
        assert environment(pod[role])["SEGUE_KV_PORTS"] == "20000-20007"
    inbound, outbound = ports(mesh, "router")
    assert inbound == set(listening["router"].values()) - {listening["router"]["http"]}
    assert outbound >= {listening["decode"]["links"], listening["router"]["admin"], 443, 6443}
    assert RouterConfig().port not in outbound | inbound


@pytest.mark.parametrize("mesh", MESHES)
def test_what_fetches_a_model_does_not_wait_for_the_proxy(mesh: str) -> None:
    for role in ROLE_CONFIGS:
        assert 443 in ports(mesh, role, *HUB)[1]
        assert 3128 in ports(mesh, role, *HUB, "networkPolicy.egress.modelPorts={3128}")[1]
    assert 443 not in ports(mesh, "decode")[1]


def test_without_a_mesh_nothing_is_said_of_one() -> None:
    for pod in pods(objects(None)).values():
        said = pod["metadata"].get("annotations", {})
        assert not {name for names in MESHES.values() for name in names} & said.keys()


@pytest.mark.parametrize("sets", [(), HUB, (*HUB, "modelSource.resources.limits.memory=20Gi")])
def test_a_guaranteed_pod_asks_in_each_container_for_what_it_is_limited_to(sets: tuple[str, ...]) -> None:
    """Kubernetes calls a pod so where that holds for CPU and memory of all containers, init containers too."""
    rendered = pods(objects(None, *WHOLE, *sets))
    for role, cpu in (("prefill", "2"), ("decode", "3")):
        spec = rendered[role]["spec"]
        for container in spec["initContainers"] + spec["containers"]:
            requests, limits = container["resources"]["requests"], container["resources"]["limits"]
            assert {side["cpu"] for side in (requests, limits)} == {cpu}
            assert requests["memory"] == limits["memory"]
    assert "cpu" not in rendered["router"]["spec"]["containers"][0]["resources"]["limits"]


def test_what_is_guaranteed_is_what_kubernetes_takes_and_devices_stay() -> None:
    rendered = objects("gpu", "qos=guaranteed")
    assert [line for thing in rendered for line in complaints(thing, versions()[-1])] == []
    limits = pods(rendered)["decode"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits == {"cpu": "4", "memory": "32Gi", "nvidia.com/gpu": 1}
    assert objects(EVERY_VALUE, "qos=")


def strategy(role: str, *sets: str) -> object:
    return of_kind(objects(None, *sets), "Deployment")[f"segue-{role}"]["spec"]["strategy"]


def test_in_place_replaces_workers_without_a_spare_gpu_and_routers_as_before() -> None:
    sets = ("roll=inPlace", "decode.replicas=2")
    surge = {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
    for role in WORKERS:
        assert strategy(role, *sets) == {"rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}
        assert strategy(role) == surge
    assert strategy("router", *sets) == surge


def test_one_decode_pod_is_replaced_in_place_where_streams_wait_for_its_return() -> None:
    assert strategy("decode", "roll=inPlace", "router.config.workerReturnSeconds=600")
    with pytest.raises(
        RefusedError, match=r"may take 600 s, and router.config.workerReturnSeconds ends them"
    ):
        strategy("decode", "roll=inPlace", "router.config.workerReturnSeconds=599")


NEAR = ("placement.pairTopologyKey=example.com/rack",)
TERMS = "preferredDuringSchedulingIgnoredDuringExecution"


def test_decode_prefers_to_be_near_prefill_of_its_release_beside_what_it_was_told() -> None:
    rendered = pods(objects(None, *NEAR))
    [term] = rendered["decode"]["spec"]["affinity"]["podAffinity"][TERMS]
    assert term["podAffinityTerm"]["topologyKey"] == "example.com/rack"
    selector = term["podAffinityTerm"]["labelSelector"]
    assert selects(selector, rendered["prefill"]["metadata"]["labels"])
    others = pods(objects(None, *NEAR, release="other"))
    for stranger in (rendered["decode"], rendered["router"], others["prefill"]):
        assert not selects(selector, stranger["metadata"]["labels"])
    assert "affinity" not in rendered["prefill"]["spec"]
    both = objects(EVERY_VALUE, *NEAR)
    affinity = pods(both)["decode"]["spec"]["affinity"]
    assert (
        affinity["podAntiAffinity"]
        == pods(objects(EVERY_VALUE))["decode"]["spec"]["affinity"]["podAntiAffinity"]
    )
    assert term in affinity["podAffinity"][TERMS]
    assert [found for each in both for found in complaints(each, versions()[0])] == []
