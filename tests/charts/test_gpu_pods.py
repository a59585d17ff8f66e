"""What a pod on a GPU node needs, as a list that the rendered pods of `device: cuda` are compared with."""

from __future__ import annotations

from typing import Any

import pytest

from tests.charts.pod_security import violations
from tests.charts.rendering import CUDA, Object, objects, of_kind, pods

GPU = "nvidia.com/gpu"
RDMA = ("rdma.enabled=true", "rdma.acknowledgeOpenFabric=true", "rdma.devices=mlx5_0:1")
GIB = 1 << 30
WORKERS = ("prefill", "decode")
# By the name of the need, whether a pod has it.
NEEDS: dict[str, Any] = {
    "one GPU": lambda spec: main(spec)["resources"]["limits"].get(GPU) == 1,
    "a toleration of the GPUs' taint": lambda spec: (
        {"key": GPU, "operator": "Exists", "effect": "NoSchedule"} in spec.get("tolerations", [])
    ),
    "8 GiB of memory at least": lambda spec: gib(main(spec)["resources"]["limits"]["memory"]) >= 8,
    "/dev/shm in memory": lambda spec: any(
        each.get("emptyDir", {}).get("medium") == "Memory" for each in spec["volumes"]
    ),
    "half an hour to start": lambda spec: main(spec)["startupProbe"]["failureThreshold"] >= 1800,
    "a root file system that CDI hooks write to": lambda spec: (
        main(spec)["securityContext"]["readOnlyRootFilesystem"] is False
    ),
    "the image for CUDA": lambda spec: main(spec)["image"].endswith("-cuda"),
    "no capability that does nothing": lambda spec: (
        "add" not in main(spec)["securityContext"]["capabilities"]
    ),
    "level restricted": lambda spec: violations(spec) == [],
}


def main(spec: Object) -> Any:
    return spec["containers"][0]


def gib(memory: str) -> float:
    assert memory.endswith("Gi")
    return float(memory.removesuffix("Gi"))


def specs(values: str | None, *sets: str) -> dict[str, Object]:
    rendered = pods(objects(values, *sets))
    return {role: rendered[role]["spec"] for role in WORKERS}


@pytest.mark.parametrize("role", WORKERS)
@pytest.mark.parametrize("sets", [(None,), (None, *RDMA), ("gpu",)])
def test_a_pod_on_cuda_has_what_gpu_nodes_ask_for(role: str, sets: tuple[Any, ...]) -> None:
    spec = specs(*sets, *CUDA)[role]
    assert [need for need, has in NEEDS.items() if not has(spec)] == []


def test_a_pod_on_cpu_lacks_what_gpus_need() -> None:
    """So the list can tell the two apart."""
    spec = specs(None)["decode"]
    assert {need for need, has in NEEDS.items() if not has(spec)} == set(NEEDS) - {
        "no capability that does nothing",
        "level restricted",
    }


def environment(spec: dict[str, Any]) -> dict[str, str]:
    """What the worker's container is given by value."""
    return {each["name"]: each["value"] for each in main(spec)["env"] if "value" in each}


def test_a_pod_of_several_gpus_computes_on_all_of_them_and_others_read_its_pages() -> None:
    """Pages of all workers lie by heads then, those of one GPU too."""
    ranks, layout = "SEGUE_TENSOR_PARALLEL_SIZE", "SEGUE_KV_LAYOUT"
    found = specs(None, *CUDA, "decode.gpus=4")
    assert main(found["decode"])["resources"]["limits"][GPU] == 4
    decode, prefill = environment(found["decode"]), environment(found["prefill"])
    assert (decode[ranks], decode[layout]) == ("4", "head-major-1")
    assert (prefill.get(ranks), prefill[layout]) == (None, "head-major-1")
    assert not {ranks, layout} & environment(specs(None, *CUDA)["decode"]).keys()
    assert layout not in environment(specs(None, "device=cpu")["decode"])


def test_routers_beside_gpus_are_as_they_are_on_cpu() -> None:
    on_cpu, on_gpu = (pods(objects(None, *sets))["router"] for sets in ((), CUDA))
    assert on_cpu == on_gpu


def test_the_runtime_class_of_gpus_is_said_once_and_a_role_may_have_another() -> None:
    sets = (*CUDA, "gpu.runtimeClassName=nvidia", "decode.runtimeClassName=nvidia-cdi")
    assert [spec["runtimeClassName"] for spec in specs(None, *sets).values()] == ["nvidia", "nvidia-cdi"]
    assert "runtimeClassName" not in pods(objects(None, *sets))["router"]["spec"]
    assert "runtimeClassName" not in specs(None, "gpu.runtimeClassName=nvidia")["decode"]


def test_the_taint_is_named_as_the_resource_is_and_ones_own_tolerations_stay() -> None:
    sets = (*CUDA, "gpu.resourceName=amd.com/gpu", "decode.tolerations[0].key=spot")
    keys = {role: [each["key"] for each in spec["tolerations"]] for role, spec in specs(None, *sets).items()}
    assert keys == {"prefill": ["amd.com/gpu"], "decode": ["spot", "amd.com/gpu"]}
    assert "tolerations" not in specs(None)["decode"]


def test_a_claim_brings_the_gpu_in_place_of_the_device_plugin() -> None:
    claim = {"name": "gpu", "resourceClaimTemplateName": "one-h100"}
    sets = (
        *CUDA,
        "decode.gpus=0",
        *(f"decode.resourceClaims[0].{key}={value}" for key, value in claim.items()),
    )
    spec = specs(None, *sets)["decode"]
    assert spec["resourceClaims"] == [claim]
    assert main(spec)["resources"]["claims"] == [{"name": "gpu"}]
    assert GPU not in main(spec)["resources"]["limits"]
    assert main(specs(None, *sets)["prefill"])["resources"]["limits"][GPU] == 1


def test_rdma_devices_are_said_for_all_or_by_role() -> None:
    sets = (*RDMA, "decode.rdma.devices=mlx5_2:1", "decode.rdma.perPod=2")
    found = {
        role: (
            next(each["value"] for each in main(spec)["env"] if each["name"] == "SEGUE_KV_DEVICES"),
            main(spec)["resources"]["limits"]["rdma/hca_shared_devices_a"],
        )
        for role, spec in specs(None, *sets).items()
    }
    assert found == {"prefill": ("mlx5_0:1", 1), "decode": ("mlx5_2:1", 2)}


def test_ipc_lock_is_given_to_root_alone_and_nothing_else_with_it() -> None:
    assert "IPC_LOCK" not in str(objects(None, *RDMA))
    context = main(specs(None, *RDMA, "rdma.runAsRoot=true")["decode"])["securityContext"]
    assert context["runAsUser"] == 0
    assert context["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert context["allowPrivilegeEscalation"] is False
    assert "IPC_LOCK" not in str(pods(objects(None, *RDMA, "rdma.runAsRoot=true"))["router"])


def test_start_and_drain_are_said_for_all_or_by_role() -> None:
    sets = ("drainSeconds=100", "decode.drainSeconds=200", "startupSeconds=900", "decode.startupSeconds=1200")
    rendered = objects(None, *sets)
    found = {
        role: (
            spec["terminationGracePeriodSeconds"],
            main(spec)["startupProbe"]["failureThreshold"],
            of_kind(rendered, "Deployment")[f"segue-{role}"]["spec"]["progressDeadlineSeconds"],
        )
        for role, spec in specs(None, *sets).items()
    }
    assert found == {"prefill": (115, 900, 1500), "decode": (215, 1200, 1800)}
    drain = {each["name"]: each.get("value") for each in main(specs(None, *sets)["decode"])["env"]}
    assert drain["SEGUE_DRAIN_SECONDS"] == "200"
