"""The pods fit into a namespace of level `restricted`, unless a value says otherwise, and then NOTES says so."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.charts.pod_security import violations
from tests.charts.rendering import CHART, CUDA, SHARED_GPU, USER_SETS, VALUE_SETS, objects, pods, run_helm

OURS = {"router", "prefill", "decode", "test", "isolation-test", "keys-create", "keys-remove"}
RDMA = ("rdma.enabled=true", "rdma.acknowledgeOpenFabric=true", "rdma.devices=mlx5_0:1")
SPOILT: dict[str, tuple[tuple[str, ...], Any]] = {
    "hostNetwork": (("hostNetwork",), True),
    "volume hostPath": (("volumes", "0"), {"name": "config", "hostPath": {"path": "/"}}),
    "sysctl kernel.msgmax": (("securityContext", "sysctls"), [{"name": "kernel.msgmax", "value": "1"}]),
    "runAsUser 0": (("securityContext", "runAsUser"), 0),
    "decode: runAsNonRoot": (("securityContext", "runAsNonRoot"), None),
    "decode: seccompProfile": (("securityContext", "seccompProfile"), {"type": "Unconfined"}),
    "decode: privileged": (("containers", "0", "securityContext", "privileged"), True),
    "decode: allowPrivilegeEscalation": (("containers", "0", "securityContext"), {}),
    "decode: capabilities are not dropped": (("containers", "0", "securityContext", "capabilities"), {}),
    "model: capabilities are not dropped": (("initContainers", "0", "securityContext", "capabilities"), {}),
    "decode: capability SYS_ADMIN": (
        ("containers", "0", "securityContext", "capabilities"),
        {"drop": ["ALL"], "add": ["SYS_ADMIN"]},
    ),
    "decode: hostPort 80": (("containers", "0", "ports"), [{"containerPort": 80, "hostPort": 80}]),
    "decode: procMount": (("containers", "0", "securityContext", "procMount"), "Unmasked"),
    "seLinuxOptions": (("securityContext", "seLinuxOptions"), {"type": "spc_t"}),
    "appArmorProfile": (("securityContext", "appArmorProfile"), {"type": "Unconfined"}),
}


def level_and_findings(*sets: str) -> dict[str, list[str]]:
    return {component: violations(pod["spec"]) for component, pod in pods(objects("gpu", *sets)).items()}


def notes(*sets: str) -> str:
    """What `helm install` says in the end, without a cluster."""
    flags = [flag for setting in sets for flag in ("--set", setting)]
    text = run_helm("install", "segue", str(CHART), "--namespace", "serving", "--dry-run=client", *flags)
    return text.partition("\nNOTES:\n")[2]


@pytest.mark.parametrize(
    "values", [None, *VALUE_SETS, *sorted(set(USER_SETS) - {"node-folder", "rdma", "s3-by-fetch"})]
)
def test_every_pod_is_restricted(values: str | None) -> None:
    found = {component: violations(pod["spec"]) for component, pod in pods(objects(values)).items()}
    assert found.keys() >= OURS - {"keys-create", "keys-remove"}
    assert [component for component in found if found[component]] == []


@pytest.mark.parametrize("expected", SPOILT)
def test_a_spoilt_pod_is_found_out(expected: str) -> None:
    spec = copy.deepcopy(pods(objects(None))["decode"]["spec"])
    (*path, last), value = SPOILT[expected]
    place: Any = spec
    for key in path:
        place = place[int(key)] if isinstance(place, list) else place[key]
    place[int(last) if isinstance(place, list) else last] = value
    assert expected in violations(spec)


def test_rdma_and_shared_gpus_leave_the_level_in_workers_alone() -> None:
    assert level_and_findings(*RDMA)["decode"] == []
    as_root = level_and_findings(*RDMA, "rdma.runAsRoot=true")
    assert as_root["decode"] == ["decode: runAsUser 0", "decode: runAsNonRoot", "decode: capability IPC_LOCK"]
    assert as_root["router"] == []
    found = level_and_findings(*SHARED_GPU)
    assert found["prefill"] == found["decode"] == ["hostPID", "hostIPC"]
    assert found["router"] == found["test"] == []


def test_a_folder_of_the_node_leaves_the_level_in_every_pod_that_reads_it() -> None:
    cached = ("modelSource.cache.hostPath=/srv", "modelSource.sizeLimit=")
    for name in (
        ("node-folder",),
        ("s3-by-fetch",),
        ("gpu", *cached),
    ):
        found = {component: violations(pod["spec"]) for component, pod in pods(objects(*name)).items()}
        assert {found[role][0] for role in ("router", "prefill", "decode")} == {"volume hostPath"}
    hub = ("model=a/b", f"modelSource.hub.revision={'0' * 40}", "modelSource.cache.hostPath=/srv")
    assert "all pods need a namespace of level `privileged`, because of modelSource.cache.hostPath" in notes(
        *hub
    )


def test_the_notes_say_where_the_model_goes_and_that_one_node_may_be_too_few() -> None:
    hub = ("model=a/b", f"modelSource.hub.revision={'0' * 40}")
    assert "a/b is fetched by each pod anew (modelSource.cache shares it)" in notes(
        *hub, "modelSource.sizeLimit=9Gi"
    )
    many = notes(*hub, "modelSource.cache.create.size=9Gi")
    assert "fetched once into claim segue-model-cache" in many
    assert "admit the pods of one node" not in many
    one = notes(
        *hub, "modelSource.cache.create.size=9Gi", "modelSource.cache.create.accessModes={ReadWriteOnce}"
    )
    assert "(ReadWriteOnce) admit the pods of one node" in one


def test_the_notes_say_which_level_is_left() -> None:
    assert "level `restricted`" in notes()
    both = notes(*RDMA, "rdma.runAsRoot=true", *SHARED_GPU, *CUDA)
    assert (
        "level `privileged`, because of rdma.runAsRoot (IPC_LOCK) and sameNodeGpuIpc (host IPC and PID)"
        in both
    )


def test_workers_that_share_the_hosts_processes_have_a_user_id_of_their_own() -> None:
    rendered = pods(objects("gpu", *SHARED_GPU))
    users = {name: pod["spec"]["securityContext"]["runAsUser"] for name, pod in rendered.items()}
    assert {users[role] for role in ("prefill", "decode")} == {10007}
    assert {users[role] for role in ("router", "test", "isolation-test")} == {10001}
    assert "A process of the same user id on their nodes" in notes(*SHARED_GPU, *CUDA)


def test_user_namespaces_are_asked_for_where_a_value_says_so() -> None:
    asked = pods(objects(None, "hostUsers=false"))
    assert {asked[role]["spec"]["hostUsers"] for role in ("router", "prefill", "decode")} == {False}
    assert not any("hostUsers" in pod["spec"] for pod in pods(objects(None)).values())


@pytest.mark.parametrize("values", [*VALUE_SETS, *USER_SETS])
def test_every_volume_that_a_pod_writes_has_a_limit(values: str) -> None:
    for pod in pods(objects(values)).values():
        for volume in pod["spec"].get("volumes", []):
            assert "emptyDir" not in volume or "sizeLimit" in volume["emptyDir"]


def test_a_routers_memory_is_requested_whole() -> None:
    for values in (None, *VALUE_SETS):
        resources = pods(objects(values))["router"]["spec"]["containers"][0]["resources"]
        assert resources["requests"]["memory"] == resources["limits"]["memory"]


@pytest.mark.parametrize("values", VALUE_SETS)
def test_the_root_file_system_is_read_only_but_on_gpus_and_no_service_is_injected(values: str) -> None:
    for pod in pods(objects(values)).values():
        assert pod["spec"]["enableServiceLinks"] is False
        for container in pod["spec"]["containers"] + pod["spec"].get("initContainers", []):
            on_gpu = "nvidia.com/gpu" in container["resources"]["limits"]
            assert container["securityContext"]["readOnlyRootFilesystem"] is not on_gpu


def test_only_routers_and_the_jobs_of_keys_hold_a_token() -> None:
    tokens = {name: pod["spec"]["automountServiceAccountToken"] for name, pod in pods(objects(None)).items()}
    assert tokens == {name: name in ("router", "keys-create", "keys-remove") for name in OURS}
