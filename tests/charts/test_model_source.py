"""Where the model comes from: what fetches it, what is mounted, and that processes read the folder that is filled."""

from __future__ import annotations

import pytest

from shared.local.config import ROLE_CONFIGS
from shared.model_cache.fetch_model import parse
from shared.model_cache.hub import DEFAULT_ENDPOINT
from tests.charts.rendering import Object, environment, objects, of_kind, pods

COMMIT = "b968826d9c46dd6066d109eabc6255188de91218"
HUB = ("model=Qwen/Qwen3-8B", f"modelSource.hub.revision={COMMIT}")
CLAIM = "modelSource.cache.claimName=models"
FOLDER = f"/models/Qwen/Qwen3-8B@{COMMIT}"


def fetching(pod: Object) -> dict[str, Object]:
    return {each["name"]: each for each in pod["spec"].get("initContainers", [])}


def volume(pod: Object) -> Object:
    return next(dict(each) for each in pod["spec"]["volumes"] if each["name"] == "model")


@pytest.mark.parametrize("values", ["gpu", "hub-behind-proxy", "openshift", "argo-cd", "gguf", "s3-by-fetch"])
@pytest.mark.parametrize("role", ROLE_CONFIGS)
def test_the_command_takes_what_the_chart_writes_and_fills_the_folder_that_is_read(
    role: str, values: str
) -> None:
    pod = pods(objects(values))[role]
    ours = [each for each in fetching(pod).values() if each["command"][0] == "python"]
    for container in ours:
        assert container["command"] == ["python", "-m", "shared.model_cache.fetch_model"]
        arguments = parse(container["args"])
        assert str(arguments.folder) == environment(pod)["SEGUE_MODEL"]
        assert arguments.tokenizer == ("+tokenizer" in str(arguments.folder) and arguments.step == "hub")
    main = {each["mountPath"]: each for each in pod["spec"]["containers"][0]["volumeMounts"]}["/models"]
    assert (main["name"], main["readOnly"]) == ("model", True)
    assert {
        mount["name"] for each in ours for mount in each["volumeMounts"] if mount["mountPath"] == "/models"
    } == {"model"}


def test_a_worker_fetches_all_and_a_router_its_tokenizer_from_beside_it() -> None:
    rendered = pods(objects(None, *HUB, CLAIM, "modelSource.hub.existingSecret=hub-token"))
    decode, router = (parse(fetching(rendered[role])["model"]["args"]) for role in ("decode", "router"))
    assert (str(decode.folder), decode.tokenizer, decode.copy_from) == (FOLDER, False, None)
    assert (str(router.folder), router.tokenizer, str(router.copy_from)) == (
        f"{FOLDER}+tokenizer",
        True,
        FOLDER,
    )
    for each in (decode, router):
        assert (each.step, each.model, each.revision) == ("hub", "Qwen/Qwen3-8B", COMMIT)
        assert (each.endpoint, each.token_source) == (DEFAULT_ENDPOINT, "Secret hub-token")
    secret = fetching(rendered["decode"])["model"]["env"][-1]["valueFrom"]["secretKeyRef"]
    assert secret == {"name": "hub-token", "key": "token"}


def test_of_a_gguf_file_all_pods_read_what_the_worker_image_converts() -> None:
    rendered = pods(objects("gguf"))
    arguments = {role: parse(fetching(rendered[role])["model"]["args"]) for role in ROLE_CONFIGS}
    assert len({str(each.folder) for each in arguments.values()}) == 1
    assert {role: (each.step, each.gguf) for role, each in arguments.items()} == {
        "router": ("wait", ""),
        "prefill": ("hub", "Qwen3-0.6B-Q8_0.gguf"),
        "decode": ("hub", "Qwen3-0.6B-Q8_0.gguf"),
    }
    for role in ("prefill", "decode"):
        assert "segue-worker" in fetching(rendered[role])["model"]["image"]
        assert fetching(rendered[role])["model"]["resources"]["limits"]["memory"] == "20Gi"


def test_a_router_asks_for_no_memory_of_a_conversion_that_it_waits_for() -> None:
    sets = ("modelSource.kind=fetch", "modelSource.fetch.image=s5cmd", "modelSource.fetch.command={s5cmd}")
    for rendered in (pods(objects("gguf")), pods(objects("gguf", *sets))):
        [waiting] = rendered["router"]["spec"]["initContainers"]
        [own] = rendered["router"]["spec"]["containers"]
        assert waiting["image"] == own["image"]
        assert waiting["resources"] == own["resources"]


def test_in_a_folder_of_the_node_a_router_may_be_alone_and_converts_itself() -> None:
    sets = ("modelSource.cache.claimName=", "modelSource.cache.hostPath=/srv/models")
    [converting] = pods(objects("gguf", *sets))["router"]["spec"]["initContainers"]
    assert parse(converting["args"]).step == "hub"
    assert "segue-worker" in converting["image"]
    assert converting["resources"]["limits"]["memory"] == "20Gi"


def test_a_container_of_the_users_runs_between_two_of_ours() -> None:
    rendered = pods(objects("s3-by-fetch"))
    for role in ROLE_CONFIGS:
        claim, users, finish = (
            fetching(rendered[role])[name] for name in ("model-claim", "model", "model-finish")
        )
        assert [parse(each["args"]).step for each in (claim, finish)] == ["claim", "finish"]
        assert users["command"] == ["sh", str(parse(claim["args"]).script)]
        assert users["image"] == "docker.io/peakcom/s5cmd:v2.3.0"
        assert ("--exclude" in users["args"]) == (role == "router")
        assert users["envFrom"] == [{"secretRef": {"name": "bucket-credentials"}}]


def test_another_command_fills_another_folder() -> None:
    sets = ("modelSource.kind=fetch", "modelSource.fetch.image=a", CLAIM)
    folders = {
        environment(pods(objects(None, *sets, f"modelSource.fetch.command={{{command}}}"))["decode"])[
            "SEGUE_MODEL"
        ]
        for command in ("one", "two", "one")
    }
    assert len(folders) == 2


def test_another_command_of_routers_fills_another_folder_of_theirs_alone() -> None:
    rendered = [pods(objects("s3-by-fetch", f"modelSource.fetch.routerCommand={{{each}}}")) for each in "ab"]
    router, decode = (
        [environment(each[role])["SEGUE_MODEL"] for each in rendered] for role in ("router", "decode")
    )
    assert router[0] != router[1]
    assert decode[0] == decode[1]
    assert all(folder.startswith(f"{decode[0]}+tokenizer@") for folder in router)


def test_what_fetches_as_root_is_started_by_a_kubelet_whose_pods_are_not_root() -> None:
    sets = (*HUB, "modelSource.cache.hostPath=/srv", "modelSource.securityContext.runAsUser=0")
    for role in ROLE_CONFIGS:
        pod = pods(objects(None, *sets))[role]
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
        own = fetching(pod)["model"]["securityContext"]
        assert (own["runAsUser"], own["runAsNonRoot"]) == (0, False)
    other = fetching(pods(objects(None, *sets[:-1], "modelSource.securityContext.runAsUser=7"))["decode"])
    assert "runAsNonRoot" not in other["model"]["securityContext"]


def test_a_proxy_a_ca_and_resources_reach_what_fetches_and_nothing_else() -> None:
    sets = (
        "modelSource.resources.limits.memory=3Gi",
        "modelSource.securityContext.runAsUser=7",
        "modelSource.extraEnvFrom[0].secretRef.name=more",
    )
    for role in ROLE_CONFIGS:
        pod = pods(objects("hub-behind-proxy", *sets))[role]
        container, main = fetching(pod)["model"], pod["spec"]["containers"][0]
        assert container["env"][-2:] == [
            {"name": "HTTPS_PROXY", "value": "http://proxy.example.com:3128"},
            {"name": "SSL_CERT_FILE", "value": "/etc/company-ca/ca.crt"},
        ]
        assert container["volumeMounts"][-1]["name"] == "company-ca"
        assert container["envFrom"] == [{"secretRef": {"name": "more"}}]
        assert container["resources"]["limits"]["memory"] == "3Gi"
        assert container["securityContext"]["runAsUser"] == 7
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert "company-ca" in {each["name"] for each in pod["spec"]["volumes"]}
        assert "HTTPS_PROXY" not in environment(pod)
        assert "runAsUser" not in main["securityContext"]


@pytest.mark.parametrize(("limit", "requested"), [("20Gi", "20Gi"), ("9Gi", "9Gi")])
def test_what_a_pod_writes_to_its_nodes_disk_is_requested(limit: str, requested: str) -> None:
    sets = (*HUB, f"modelSource.sizeLimit={limit}", "decode.resources.limits.ephemeral-storage=2Gi")
    rendered = pods(objects(None, *sets))
    assert volume(rendered["decode"])["emptyDir"] == {"sizeLimit": limit}
    resources = fetching(rendered["decode"])["model"]["resources"]
    assert resources["requests"]["ephemeral-storage"] == resources["limits"]["ephemeral-storage"] == requested
    assert parse(fetching(rendered["decode"])["model"]["args"]).size_limit == limit
    assert fetching(rendered["router"])["model"]["resources"]["requests"]["ephemeral-storage"] == "256Mi"
    cached = fetching(pods(objects(None, *HUB, CLAIM))["decode"])["model"]["resources"]
    assert cached["requests"]["ephemeral-storage"] == "512Mi"


def test_a_volume_that_a_role_and_what_fetches_both_name_is_one() -> None:
    twice = [
        f"{of}.extraVolumes[0].{key}"
        for of in ("modelSource", *ROLE_CONFIGS)
        for key in ("name=company-ca", "configMap.name=company-ca")
    ]
    for role in ROLE_CONFIGS:
        names = [each["name"] for each in pods(objects("hub-behind-proxy", *twice))[role]["spec"]["volumes"]]
        assert names.count("company-ca") == 1


def test_a_long_download_is_no_failed_rollout() -> None:
    """Kubernetes counts init containers, too; Flux uninstalls or rolls back what is past this."""
    for values, fetch_seconds in (("gpu", 7200), ("gguf", 7200), ("s3-by-fetch", 7200), ("production", 0)):
        for name, deployment in of_kind(objects(values), "Deployment").items():
            probe = deployment["spec"]["template"]["spec"]["containers"][0]["startupProbe"]
            load_seconds = probe["failureThreshold"] * probe["periodSeconds"]
            assert deployment["spec"]["progressDeadlineSeconds"] == 600 + fetch_seconds + load_seconds, name


def test_a_cache_is_a_claim_of_yours_or_the_charts_or_a_folder_of_the_node() -> None:
    def kept(*sets: str) -> tuple[Object, list[str]]:
        rendered = objects(None, *HUB, *sets)
        return volume(pods(rendered)["decode"]), list(of_kind(rendered, "PersistentVolumeClaim"))

    assert kept(CLAIM) == ({"name": "model", "persistentVolumeClaim": {"claimName": "models"}}, [])
    made, claims = kept("modelSource.cache.create.size=40Gi")
    assert (made["persistentVolumeClaim"]["claimName"], claims) == (
        "segue-model-cache",
        ["segue-model-cache"],
    )
    folder, claims = kept("modelSource.cache.hostPath=/srv")
    assert (folder["hostPath"], claims) == ({"path": "/srv", "type": "DirectoryOrCreate"}, [])
    claim = of_kind(objects("hub-behind-proxy"), "PersistentVolumeClaim")["segue-model-cache"]["spec"]
    assert claim == {
        "accessModes": ["ReadWriteMany"],
        "storageClassName": "nfs",
        "resources": {"requests": {"storage": "40Gi"}},
    }


def test_an_image_volume_and_a_folder_of_the_node_are_mounted_as_they_are() -> None:
    for values, mounted in (
        (
            "image-volume",
            {
                "image": {
                    "reference": f"registry.example.com/ai/qwen3-8b@sha256:{'3' * 64}",
                    "pullPolicy": "IfNotPresent",
                }
            },
        ),
        ("node-folder", {"hostPath": {"path": "/srv/models/qwen3-8b", "type": "Directory"}}),
    ):
        pod = pods(objects(values))["decode"]
        assert volume(pod) == {"name": "model"} | mounted
        assert fetching(pod) == {}
        assert environment(pod)["SEGUE_MODEL"] == "/models"
    inside = pods(objects("image-volume", "modelSource.image.folder=model"))["decode"]
    assert environment(inside)["SEGUE_MODEL"] == "/models/model"
