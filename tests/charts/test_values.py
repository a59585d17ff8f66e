"""What values do: each reaches the process or the object that it names, and nothing else."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from router.discovery.slice_api import COMPONENT, PORTS
from shared.local.config import ROLE_CONFIGS
from shared.process.settings import load, unknown_variables
from shared.wire.messages import Role
from tests.charts.rendering import (
    CHART,
    CHART_VERSION,
    CUDA,
    EVERY_VALUE,
    SHARED_GPU,
    USER_SETS,
    VALUE_SETS,
    Object,
    environment,
    objects,
    of_kind,
    pods,
    run_helm,
    selects,
    values_file,
)

# Ends of the paths in the schema where an object of Kubernetes stands, which Kubernetes checks.
KUBERNETES = (
    "/global", "/podSecurityContext", "/securityContext", "Affinity", "/valueFrom", "Ref", "Selector",
    "/container", "/dnsConfig", "/topologySpreadConstraints[]", "/extraVolumes[]", "/extraVolumeMounts[]",
)  # fmt: skip


def deployment(role: str, values: str | None, *sets: str) -> Object:
    return of_kind(objects(values, *sets), "Deployment")[f"segue-{role}"]


def container(role: str, *sets: str) -> Any:
    return pods(objects(None, *sets))[role]["spec"]["containers"][0]


@pytest.mark.parametrize("values", [None, *VALUE_SETS, *USER_SETS])
@pytest.mark.parametrize("role", ROLE_CONFIGS)
def test_the_process_accepts_what_the_chart_tells_it(role: Role, values: str | None, tmp_path: Path) -> None:
    rendered = objects(values)
    pod = pods(rendered)[role]
    config = of_kind(rendered, "ConfigMap")[f"segue-{role}"]["data"]["config.yaml"]
    file = tmp_path / "config.yaml"
    file.write_text(config, encoding="utf-8")
    assert pod["spec"]["containers"][0]["command"] == ["python", "-m", role]
    assert pod["spec"]["containers"][0]["args"] == ["--config", "/etc/segue/config.yaml"]
    variables = environment(pod)
    assert load(ROLE_CONFIGS[role], ["--config", str(file)], variables).silence_seconds > 0
    assert not unknown_variables(ROLE_CONFIGS[role], variables)


def test_a_config_section_reaches_its_process_verbatim() -> None:
    sets = (
        "decode.config.maxRunningRequests=7",
        "decode.config.hostFraction=2",
        "decode.config.overlap=false",
    )
    config = of_kind(objects(None, *sets), "ConfigMap")["segue-decode"]["data"]["config.yaml"]
    assert config == "hostFraction: 2\nmaxRunningRequests: 7\noverlap: false\n"


def test_large_numbers_stay_whole() -> None:
    config = of_kind(objects(None, "router.config.maxBodyBytes=10485760"), "ConfigMap")["segue-router"]
    assert config["data"]["config.yaml"] == "maxBodyBytes: 10485760\n"


def test_a_changed_config_rolls_the_pods_that_read_it_and_no_others() -> None:
    def templates(*sets: str) -> dict[str, Object]:
        return {role: pods(objects(None, *sets))[role] for role in ROLE_CONFIGS}

    before, after = templates(), templates("decode.config.maxRunningRequests=7")
    assert [role for role in ROLE_CONFIGS if before[role] != after[role]] == ["decode"]


def test_replicas_null_leaves_the_field_out() -> None:
    assert deployment("decode", None, "decode.replicas=3")["spec"]["replicas"] == 3
    assert (
        deployment("decode", None, "decode.replicas=0", "router.config.waitingSecondsMax=600")["spec"][
            "replicas"
        ]
        == 0
    )
    assert "replicas" not in deployment("decode", None, "decode.replicas=null")["spec"]


def notes(*sets: str) -> str:
    flags = [flag for setting in sets for flag in ("--set", setting)]
    return run_helm("install", "segue", str(CHART), "--dry-run=client", *flags).partition("\nNOTES:\n")[2]


def test_a_release_may_be_parked_and_its_notes_say_how_it_starts() -> None:
    parked = [f"{role}.replicas=0" for role in ROLE_CONFIGS]
    assert {each["spec"]["replicas"] for each in of_kind(objects(None, *parked), "Deployment").values()} == {
        0
    }
    assert "Segue is parked in namespace" in notes(*parked)
    assert "scale deployment --selector=app.kubernetes.io/instance=segue --replicas=1" in notes(*parked)
    for running in ((), ("prefill.replicas=0",), ("router.replicas=0", "decode.replicas=0")):
        assert "Segue serves smollm2 in namespace" in notes(*running)


def test_the_request_of_the_notes_is_one_whatever_the_model_is_called() -> None:
    name = """Ann's "best" \\ one"""
    written = notes("servedModelName=" + name.replace("\\", "\\\\"))
    (curl,) = (line for line in written.splitlines() if line.startswith("  curl "))
    assert json.loads(shlex.split(curl)[-1])["model"] == name


def test_workers_differ_in_nothing_but_their_role() -> None:
    text = {
        role: str(deployment(role, None, "prefill.resources=null", "decode.resources=null", "device=cuda"))
        for role in ("prefill", "decode")
    }
    assert text["prefill"].replace("prefill", "decode") == text["decode"]


def test_termination_grace_follows_from_the_drain() -> None:
    sets = ("drainSeconds=100", "router.drainSeconds=1000", "router.endpointLagSeconds=10")
    grace = {
        role: pods(objects(None, *sets))[role]["spec"]["terminationGracePeriodSeconds"]
        for role in ROLE_CONFIGS
    }
    assert grace == {"router": 1025, "prefill": 115, "decode": 115}


def test_a_role_may_not_lose_pods_before_it_has_others() -> None:
    for role in ROLE_CONFIGS:
        rolling = deployment(role, None)["spec"]["strategy"]["rollingUpdate"]
        assert rolling == {"maxSurge": 1, "maxUnavailable": 0}


def test_decode_asks_for_more_cpu_than_prefill_and_neither_is_limited() -> None:
    def cpu(values: str | None, role: str) -> int:
        resources = pods(objects(values))[role]["spec"]["containers"][0]["resources"]
        assert "cpu" not in resources["limits"]
        return int(resources["requests"]["cpu"].removesuffix("m"))

    for values in (None, "cpu-demo"):
        assert cpu(values, "decode") > cpu(values, "prefill")


@pytest.mark.parametrize(
    ("sets", "router", "worker"),
    [
        ((), f"localhost/segue-router:{CHART_VERSION}", f"localhost/segue-worker:{CHART_VERSION}"),
        (("image.tag=v2",), "localhost/segue-router:v2", "localhost/segue-worker:v2"),
        (
            CUDA,
            f"localhost/segue-router:{CHART_VERSION}",
            f"localhost/segue-worker:{CHART_VERSION}-cuda",
        ),
        (("image.registry=",), f"segue-router:{CHART_VERSION}", f"segue-worker:{CHART_VERSION}"),
        (
            ("worker.image.tag=mine", "image.registry=example.com/a/"),
            f"example.com/a/segue-router:{CHART_VERSION}",
            "example.com/a/segue-worker:mine",
        ),
        (
            ("router.image.repository=one", "worker.image.repository=one", f"image.digest=sha256:{'0' * 64}"),
            f"localhost/one@sha256:{'0' * 64}",
            f"localhost/one@sha256:{'0' * 64}",
        ),
    ],
)
def test_which_image_is_run(sets: tuple[str, ...], router: str, worker: str) -> None:
    assert [container("router", *sets)["image"], container("decode", *sets)["image"]] == [router, worker]


def test_the_model_comes_out_of_its_image_and_a_router_gets_no_weights() -> None:
    rendered = pods(objects(None))
    init = {role: rendered[role]["spec"]["initContainers"][0] for role in ROLE_CONFIGS}
    assert {each["image"] for each in init.values()} == {f"localhost/segue-model-smollm2:{CHART_VERSION}"}
    asked = [init[role].pop("resources") for role in ("prefill", "decode")]
    assert init["decode"] == init["prefill"]
    main = [rendered[role]["spec"]["containers"][0]["resources"] for role in ("prefill", "decode")]
    for each in main:
        each["requests"]["ephemeral-storage"] = "1Gi"  # the emptyDir is requested whole
    assert asked == main
    assert "*.safetensors | *.packed) ;;" in init["router"]["args"][0]


@pytest.mark.parametrize("values", [*VALUE_SETS, *USER_SETS])
def test_every_container_has_what_a_quota_asks_for_and_only_the_main_one_devices(values: str) -> None:
    for pod in pods(objects(values)).values():
        for container in [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]:
            assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
            assert "memory" in container["resources"]["limits"]
        for container in pod["spec"].get("initContainers", []):
            assert "nvidia.com/gpu" not in container["resources"]["limits"]


def test_pods_of_hooks_name_what_a_quota_counts_and_go_to_nodes_that_take_routers() -> None:
    arch = "router.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[0]"
    sets = (
        "router.resources.limits.cpu=2",
        f"{arch}.matchExpressions[0].key=kubernetes.io/arch",
        f"{arch}.matchExpressions[0].operator=Exists",
    )
    rendered = pods(objects(None, *sets))
    router = rendered["router"]["spec"]
    for component in ("keys-create", "keys-remove", "test", "isolation-test"):
        pod = rendered[component]["spec"]
        assert pod["affinity"]["nodeAffinity"] == router["affinity"]["nodeAffinity"]
        for side, asked in router["containers"][0]["resources"].items():
            assert pod["containers"][0]["resources"][side].keys() == asked.keys(), (component, side)
        assert pod["containers"][0]["resources"]["limits"]["memory"] == "256Mi"


def test_a_model_on_a_volume_or_in_the_image_is_not_copied() -> None:
    on_volume = pods(objects("production"))["decode"]
    assert "initContainers" not in on_volume["spec"]
    mount = next(
        each for each in on_volume["spec"]["containers"][0]["volumeMounts"] if each["name"] == "model"
    )
    assert mount == {"name": "model", "mountPath": "/models", "readOnly": True, "subPath": "qwen3-8b"}
    in_image = pods(objects(None, "model=/opt/tiny"))["decode"]
    assert "initContainers" not in in_image["spec"]
    assert environment(in_image)["SEGUE_MODEL"] == "/opt/tiny"
    assert environment(in_image)["SEGUE_SERVED_MODEL_NAME"] == "tiny"


@pytest.mark.parametrize("role", ROLE_CONFIGS)
def test_every_value_for_a_pod_arrives(role: str) -> None:
    wanted = yaml.safe_load(
        values_file(EVERY_VALUE).read_text(encoding="utf-8").replace("{{ .Release.Name }}", "segue")
    )
    given, pod = wanted[role], pods(objects(EVERY_VALUE))[role]
    spec, main = pod["spec"], pod["spec"]["containers"][0]
    for field in (
        "nodeSelector",
        "tolerations",
        "affinity",
        "topologySpreadConstraints",
        "priorityClassName",
    ):
        assert spec[field] == given[field]
    assert spec["runtimeClassName"] == given["runtimeClassName"]
    assert spec["imagePullSecrets"] == wanted["image"]["pullSecrets"]
    assert main["resources"] == given["resources"]
    assert main["envFrom"] == given["extraEnvFrom"]
    assert main["env"][-2:] == given["extraEnv"]
    assert main["volumeMounts"][-1:] == given["extraVolumeMounts"]
    assert spec["volumes"][-1:] == given["extraVolumes"]
    assert pod["metadata"]["annotations"].items() >= given["podAnnotations"].items()
    assert pod["metadata"]["labels"].items() >= (given["podLabels"] | wanted["commonLabels"]).items()
    assert deployment(role, EVERY_VALUE)["spec"]["strategy"]["type"] == "Recreate"


def test_a_gpu_is_asked_for_where_the_device_is_cuda() -> None:
    asked = container("decode", *CUDA, "gpu.resourceName=nvidia.com/gpu.shared")["resources"]["limits"]
    assert asked["nvidia.com/gpu.shared"] == 1
    assert "nvidia.com/gpu" not in container("decode")["resources"]["limits"]


ALONE, ON_CPU = "prefill.replicas=0", "device=cuda-on-cpu"


def test_the_path_of_a_gpu_is_tried_out_in_the_pods_of_a_cpu() -> None:
    """All that tells them apart is what the process is told."""
    of_cpu, tried = container("decode", ALONE), container("decode", ALONE, ON_CPU, "decode.gpus=2")
    told = {each["name"]: each.get("value") for each in tried["env"]}
    assert (told.pop("SEGUE_DEVICE"), told.pop("SEGUE_TENSOR_PARALLEL_SIZE")) == ("cuda-on-cpu", "2")
    assert told.pop("SEGUE_KV_LAYOUT") == "head-major-1"
    expected = {each["name"]: each.get("value") for each in of_cpu["env"]}
    assert expected.pop("SEGUE_DEVICE") == "cpu"
    assert told == expected
    assert {**tried, "env": []} == {**of_cpu, "env": []}
    assert "SEGUE_TENSOR_PARALLEL_SIZE" not in str(container("decode", ON_CPU))


def shared_memory(role: str, *sets: str) -> tuple[list[str], list[Object]]:
    """Where the container of a role has shared memory of its pod, and what that is."""
    spec = pods(objects("gpu", *sets))[role]["spec"]
    mounts = [
        each["mountPath"] for each in spec["containers"][0]["volumeMounts"] if each["name"] == "shared-memory"
    ]
    return mounts, [each["emptyDir"] for each in spec["volumes"] if each["name"] == "shared-memory"]


def test_workers_on_gpus_have_shared_memory_unless_they_share_the_hosts() -> None:
    sizes = [{"medium": "Memory", "sizeLimit": "2Gi"}]
    for role in ("prefill", "decode"):
        assert shared_memory(role, "gpu.sharedMemorySize=2Gi") == (["/dev/shm"], sizes)
        assert shared_memory(role, *SHARED_GPU) == ([], [])
        assert shared_memory(role, "device=cpu") == ([], [])
    assert shared_memory("router") == ([], [])


def links_volume(pod: Object) -> Object:
    volume: Object = next(each for each in pod["spec"]["volumes"] if each["name"] == "links")["secret"]
    return volume


def test_secrets_of_ones_own_take_the_place_of_the_charts() -> None:
    rendered = objects(
        None, "links.routerSecret=mine", "links.workerSecret=other", "auth.existingSecret=keys"
    )
    assert of_kind(rendered, "Secret") == {}
    names = {
        role: links_volume(pod)["secretName"] for role, pod in pods(rendered).items() if role in ROLE_CONFIGS
    }
    assert names == {"router": "mine", "prefill": "other", "decode": "other"}


def test_each_role_is_given_its_own_link_keys_closed_to_others_and_no_pod_carries_their_checksum() -> None:
    rendered = objects(None)
    for role in ROLE_CONFIGS:
        pod = pods(rendered)[role]
        assert links_volume(pod) == {
            "secretName": "segue-links-router" if role == "router" else "segue-links-worker",
            "defaultMode": 0o440,
            "items": [{"key": "keys.pem", "path": "keys.pem"}],
        }
        assert [key for key in pod["metadata"]["annotations"] if "checksum" in key] == ["checksum/config"]


def test_the_router_may_look_at_endpointslices_and_nothing_else() -> None:
    rendered = objects(None)
    assert of_kind(rendered, "Role")["segue-router"]["rules"] == [
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]}
    ]
    subjects = of_kind(rendered, "RoleBinding")["segue-router"]["subjects"]
    assert [subject["name"] for subject in subjects] == [
        pods(rendered)["router"]["spec"]["serviceAccountName"]
    ]
    assert pods(rendered)["decode"]["spec"]["serviceAccountName"] != subjects[0]["name"]


def test_the_router_selects_the_slices_of_its_own_release() -> None:
    rendered = objects(None, release="other")
    selector = environment(pods(rendered)["router"])["SEGUE_SLICE_SELECTOR"]
    named = re.fullmatch(r"kubernetes\.io/service-name in \((.*)\)", selector)
    assert named
    headless = [each for each in of_kind(rendered, "Service").values() if each["spec"].get("clusterIP")]
    assert {each["metadata"]["name"] for each in headless} == set(named[1].split(","))


@pytest.mark.parametrize("role", ROLE_CONFIGS)
def test_slices_name_the_pods_of_each_role_and_the_port_that_discovery_looks_for(role: str) -> None:
    """A slice has its Service's labels; the Service's port name is the slice's."""
    rendered = objects(None)
    services = of_kind(rendered, "Service").values()
    [service] = [
        each
        for each in services
        if each["spec"].get("clusterIP") == "None" and each["metadata"]["labels"][COMPONENT] == role
    ]
    pod = pods(rendered)[role]
    assert selects({"matchLabels": service["spec"]["selector"]}, pod["metadata"]["labels"])
    [port] = service["spec"]["ports"]
    ports = {each["name"]: each["containerPort"] for each in pod["spec"]["containers"][0]["ports"]}
    assert port["name"] == PORTS[role][1]
    assert ports[port["targetPort"]] == port["port"]
    assert "publishNotReadyAddresses" not in service["spec"]


def test_the_schema_is_closed_but_for_objects_of_kubernetes() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    open_objects = sorted(path for path in walk(schema, "") if path)
    assert [path for path in open_objects if not path.endswith(KUBERNETES)] == []


def walk(schema: Any, path: str) -> list[str]:
    """Paths of the object schemas that allow any key."""
    if not isinstance(schema, dict):
        return []
    mine = [path] if schema.get("type") == "object" and "additionalProperties" not in schema else []
    for section in ("properties", "definitions"):
        for key, value in schema.get(section, {}).items():
            mine += walk(value, f"{path}/{key}")
    return mine + walk(schema.get("items"), f"{path}[]")


def test_the_common_case_takes_at_most_ten_lines() -> None:
    lines = (CHART / "ci" / "gpu.yaml").read_text(encoding="utf-8").splitlines()
    assert len([line for line in lines if line.strip() and not line.startswith("#")]) <= 10


def test_the_notes_name_the_service_that_is_there() -> None:
    text = run_helm("install", "other", str(CHART), "--namespace", "serving", "--dry-run=client")
    assert "port-forward service/other-segue-router 8000:8000" in text
    assert "other-segue-router" in of_kind(objects(None, release="other"), "Service")


def test_the_smoke_test_is_told_that_no_kv_will_move() -> None:
    for sets, told in ((), False), (("prefill.replicas=null",), False), (("prefill.replicas=0",), True):
        command = pods(objects(None, *sets))["test"]["spec"]["containers"][0]["args"]
        assert (len(command), command[2:] == ["aggregated"]) == (2 + told, told)


def test_api_keys_reach_the_routers_as_hashes_and_the_smoke_test_in_plain() -> None:
    for sets, name in ((), "segue-api-keys"), (("auth.existingSecret=mine",), "mine"):
        rendered = pods(objects(None, *sets))
        volumes = {each["name"]: each for each in rendered["router"]["spec"]["volumes"]}
        secret = volumes["api-keys"]["secret"]
        assert (secret["secretName"], secret["items"]) == (name, [{"key": "keys", "path": "keys"}])
        (mount,) = (each for each in container("router", *sets)["volumeMounts"] if each["name"] == "api-keys")
        assert "subPath" not in mount  # a file mounted by itself is never updated
        assert environment(rendered["router"])["SEGUE_API_KEYS_FILE"] == f"{mount['mountPath']}/keys"
        (variable,) = rendered["test"]["spec"]["containers"][0]["env"]
        assert variable["valueFrom"]["secretKeyRef"] == {"name": name, "key": "api-key", "optional": True}
        for component in ("prefill", "decode"):
            assert name not in str(rendered[component])
        made = rendered["keys-create"]["spec"]["containers"][0]["args"]
        assert ("--api-keys=segue-api-keys" in made) == (not sets)


def test_without_api_keys_nothing_of_them_is_rendered() -> None:
    text = json.dumps(objects(None, "auth.enabled=false"))
    assert not re.search("api.?key", text, re.IGNORECASE)


def test_a_certificate_reaches_the_routers_alone_and_clients_are_told_of_https() -> None:
    sets = ("router.tls.existingSecret=certificate",)
    rendered = pods(objects(None, *sets))
    volumes = {each["name"]: each for each in rendered["router"]["spec"]["volumes"]}
    assert volumes["tls"]["secret"]["secretName"] == "certificate"
    (mount,) = (each for each in container("router", *sets)["volumeMounts"] if each["name"] == "tls")
    assert "subPath" not in mount  # a file mounted by itself is never updated
    variables = environment(rendered["router"])
    files = {f"{mount['mountPath']}/{item['path']}" for item in volumes["tls"]["secret"]["items"]}
    assert {variables["SEGUE_TLS_CERT"], variables["SEGUE_TLS_KEY"]} == files
    assert rendered["test"]["spec"]["containers"][0]["args"][0].startswith("https://")
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container("router", *sets)[probe]["httpGet"].get("scheme", "HTTP") == "HTTP"
    assert "SEGUE_TLS" not in str(rendered["prefill"]) + str(rendered["decode"])


def test_without_a_certificate_nothing_of_tls_is_rendered() -> None:
    rendered = pods(objects(None))
    assert "SEGUE_TLS" not in str(rendered["router"])
    assert rendered["test"]["spec"]["containers"][0]["args"][0].startswith("http://")


def test_an_inference_gateway_gets_a_pool_over_the_routers_and_reaches_their_metrics() -> None:
    """The object has what version v1 of the CRD requires: a selector, one target port, and the picker with its port."""
    sets = (
        "inferencePool.enabled=true",
        "inferencePool.endpointPicker.name=picker",
        "router.config.metricsOnApiPort=true",
    )
    rendered = objects(
        None, *sets, "networkPolicy.metricsFrom[0].namespaceSelector.matchLabels.name=gateways"
    )
    (pool,) = of_kind(rendered, "InferencePool").values()
    assert pool["apiVersion"] == "inference.networking.k8s.io/v1"
    labels = pods(rendered)["router"]["metadata"]["labels"]
    assert pool["spec"]["selector"]["matchLabels"].items() <= labels.items()
    (http,) = (each for each in container("router", *sets)["ports"] if each["name"] == "http")
    assert pool["spec"]["targetPorts"] == [{"number": http["containerPort"]}]
    picker = {"name": "picker", "port": {"number": 9002}, "failureMode": "FailOpen"}
    assert pool["spec"]["endpointPickerRef"] == picker
    (policy,) = (each for name, each in of_kind(rendered, "NetworkPolicy").items() if name.endswith("router"))
    api = next(rule for rule in policy["spec"]["ingress"] if rule["ports"] == [{"port": "http"}])
    assert {"namespaceSelector": {"matchLabels": {"name": "gateways"}}} in api["from"]
    assert not of_kind(objects(None), "InferencePool")
