"""Escape hatches: what the chart has no opinion about arrives where Kubernetes takes it, and strings stay strings."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from shared.local.config import ROLE_CONFIGS
from tests.charts.kubernetes_schemas import complaints, versions
from tests.charts.rendering import (
    CHART,
    EVERY_GPU_VALUE,
    EVERY_VALUE,
    NAMESPACE,
    Object,
    objects,
    of_kind,
    pods,
    run_helm,
    values_file,
)

NEWEST = versions()[-1]
GIVEN = yaml.safe_load(values_file(EVERY_VALUE).read_text(encoding="utf-8"))
POD_FIELDS = ("dnsPolicy", "dnsConfig", "hostAliases", "schedulerName")
# Strings that must not be any word, or that mean nothing by themselves: SETS has what they go with.
NOT_FREE = (
    "modelSource",
    "fullnameOverride",
    "nameOverride",
    "links",
    "auth",
    "rdma",
    "kv",
    "global",
    "config",
)


@pytest.mark.parametrize("role", ROLE_CONFIGS)
def test_every_hatch_of_a_role_arrives(role: str) -> None:
    given, rendered = GIVEN[role], objects(EVERY_VALUE)
    spec = pods(rendered)[role]["spec"]
    assert {field: spec[field] for field in POD_FIELDS} == {field: given[field] for field in POD_FIELDS}
    assert spec["initContainers"][-1:] == given["extraInitContainers"]
    assert [each["name"] for each in spec["containers"]] == [role, "side"]
    assert spec["containers"][1]["args"] == ["of segue"]  # templates may stand there
    assert spec["securityContext"].items() >= given["podSecurityContext"].items()
    assert spec["securityContext"]["runAsUser"] == 10001  # what is not said again stays
    own = spec["containers"][0]["securityContext"]
    assert own.items() >= given["securityContext"].items()
    assert own["allowPrivilegeEscalation"] is False
    metadata = of_kind(rendered, "Deployment")[f"segue-{role}"]["metadata"]
    assert metadata["annotations"] == given["annotations"] | GIVEN["commonAnnotations"]


def test_with_the_nodes_network_names_are_still_looked_up_in_the_cluster() -> None:
    for role in ROLE_CONFIGS:
        spec = pods(objects(EVERY_GPU_VALUE))[role]["spec"]
        assert (spec["hostNetwork"], spec["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
        assert not {"hostNetwork", "dnsPolicy"} & pods(objects(None))[role]["spec"].keys()


def test_annotations_of_all_are_on_every_object_but_pods_of_tests() -> None:
    for thing in objects(EVERY_VALUE):
        if thing["kind"] != "Pod" and thing["metadata"]["name"] not in ("mine", "segue-text"):
            found = thing["metadata"]["annotations"]
            assert found.items() >= GIVEN["commonAnnotations"].items(), thing["metadata"]["name"]
    [claim] = of_kind(
        objects("hub-behind-proxy", "commonAnnotations.team=a"), "PersistentVolumeClaim"
    ).values()
    assert claim["metadata"]["annotations"] == {"team": "a"}


def test_objects_of_ones_own_are_rendered_with_templates_in_them() -> None:
    maps = of_kind(objects(EVERY_VALUE), "ConfigMap")
    assert maps["mine"]["data"] == {"namespace": NAMESPACE}
    assert maps["segue-text"]["data"] == {"replicas": "4"}


def test_each_role_may_have_an_image_of_its_own() -> None:
    sets = ("worker.image.tag=a", "decode.image.tag=b", "prefill.image.repository=other")
    images = {
        role: pods(objects(None, *sets))[role]["spec"]["containers"][0]["image"] for role in ROLE_CONFIGS
    }
    assert images["prefill"] == "localhost/other:a"
    assert images["decode"] == "localhost/segue-worker:b"
    assert images["router"].startswith("localhost/segue-router:")
    digest = f"decode.image.digest=sha256:{'1' * 64}"
    assert "@sha256:1" in pods(objects(None, digest))["decode"]["spec"]["containers"][0]["image"]
    assert "@" not in pods(objects(None, digest))["prefill"]["spec"]["containers"][0]["image"]


def test_what_helm_says_for_all_charts_goes_before_what_this_one_says() -> None:
    sets = (
        "global.imageRegistry=harbor.corp/",
        "global.imagePullSecrets[0]=a",
        "image.pullSecrets[0].name=b",
    )
    for pod in pods(objects(None, *sets)).values():
        spec = pod["spec"]
        for container in spec["containers"] + spec.get("initContainers", []):
            assert container["image"].startswith("harbor.corp/segue-")
        assert spec["imagePullSecrets"] == [{"name": "b"}, {"name": "a"}]


@pytest.mark.parametrize("enabled", [True, False])
def test_an_umbrella_may_switch_it_on_and_off(enabled: bool, tmp_path: Path) -> None:
    needed = [
        {"name": "segue", "version": ">=0.0.0-0", "alias": alias, "condition": f"{alias}.enabled"}
        for alias in ("small", "large")
    ]
    chart = {"apiVersion": "v2", "name": "umbrella", "version": "1.0.0", "dependencies": needed}
    (tmp_path / "Chart.yaml").write_text(yaml.safe_dump(chart), encoding="utf-8")
    shutil.copytree(CHART, tmp_path / "charts" / "segue")
    flags = ("--set", "small.enabled=true", "--set", f"large.enabled={json.dumps(enabled)}")
    rendered = [
        each for each in yaml.safe_load_all(run_helm("template", "llm", str(tmp_path), *flags)) if each
    ]
    deployments = {f"llm-small-{role}" for role in ROLE_CONFIGS}
    deployments |= {f"llm-large-{role}" for role in ROLE_CONFIGS} if enabled else set()
    assert of_kind(rendered, "Deployment").keys() == deployments


def test_recreate_is_rendered_without_what_kubernetes_refuses_beside_it() -> None:
    strategy = of_kind(objects(None, "decode.strategy.type=Recreate"), "Deployment")["segue-decode"]["spec"]
    assert strategy["strategy"] == {"type": "Recreate"}


def test_labels_and_annotations_that_are_said_twice_are_rendered_once() -> None:
    sets = ("commonLabels.team=a", "decode.podLabels.team=b", "decode.podAnnotations.checksum/config=mine")
    pod = pods(objects(None, *sets))["decode"]["metadata"]
    assert (pod["labels"]["team"], pod["annotations"]["checksum/config"]) == ("b", "mine")


def keys_given_twice(node: yaml.Node | None) -> Iterator[str]:
    """Keys that a mapping has more than once: YAML forbids them, and kustomize and Flux refuse them."""
    if isinstance(node, yaml.MappingNode):
        names = [key.value for key, _ in node.value]
        yield from {name for name in names if names.count(name) > 1}
        for _, value in node.value:
            yield from keys_given_twice(value)
    elif isinstance(node, yaml.SequenceNode):
        for each in node.value:
            yield from keys_given_twice(each)


def test_a_label_of_ones_own_takes_the_place_of_the_charts(tmp_path: Path) -> None:
    own = {f"app.kubernetes.io/{key}": f"my-{key}" for key in ("part-of", "managed-by", "version")}
    given = tmp_path / "values.yaml"
    given.write_text(yaml.safe_dump({"commonLabels": {**own, "helm.sh/chart": "mine"}}), encoding="utf-8")
    text = run_helm("template", "segue", str(CHART), "--values", str(given))
    for document in yaml.compose_all(text, Loader=yaml.CSafeLoader):
        assert not list(keys_given_twice(document))
    decode = of_kind(list(yaml.safe_load_all(text)), "Deployment")["segue-decode"]
    for labels in (decode["metadata"]["labels"], decode["spec"]["template"]["metadata"]["labels"]):
        assert own.items() <= labels.items()


@pytest.mark.parametrize("kind", ["hub", "fetch"])
def test_a_variable_of_ones_own_takes_the_place_of_the_charts(kind: str) -> None:
    """Server-side apply, which Helm 4 does, refuses a container that has a name twice."""
    given = {"HOME": "/home", "HF_HUB_OFFLINE": "no", "HF_HOME": "/home/hub"}
    fetch = ["modelSource.fetch.image=a", "modelSource.fetch.command={a}"] if kind == "fetch" else []
    sets = ["model=a/b", f"modelSource.kind={kind}", "modelSource.cache.claimName=models", *fetch]
    sets += [f"modelSource.hub.revision={'a' * 40}"]
    sets += [
        f"{of}.extraEnv[{at}].{key}"
        for of in ("modelSource", *ROLE_CONFIGS)
        for at, each in enumerate(given.items())
        for key in (f"name={each[0]}", f"value={each[1]}")
    ]
    for role in ROLE_CONFIGS:
        spec = pods(objects(None, *sets))[role]["spec"]
        for container in (*spec["initContainers"], *spec["containers"]):
            names = [each["name"] for each in container["env"]]
            assert len(names) == len(set(names)), container["name"]
            assert given.items() <= {each["name"]: each.get("value") for each in container["env"]}.items()


def test_routers_are_spread_over_nodes_where_that_is_possible() -> None:
    pod = pods(objects(None, release="other"))["router"]
    (spread,) = pod["spec"]["topologySpreadConstraints"]
    assert (spread["topologyKey"], spread["whenUnsatisfiable"]) == (
        "kubernetes.io/hostname",
        "ScheduleAnyway",
    )
    assert spread["labelSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()


def test_pods_that_are_not_ready_do_not_hold_up_the_drain_of_a_node() -> None:
    budgets = of_kind(objects(None), "PodDisruptionBudget").values()
    assert {each["spec"]["unhealthyPodEvictionPolicy"] for each in budgets} == {"AlwaysAllow"}
    old = of_kind(objects(None, "podDisruptionBudget.unhealthyPodEvictionPolicy="), "PodDisruptionBudget")
    assert not any("unhealthyPodEvictionPolicy" in each["spec"] for each in old.values())


@pytest.mark.parametrize(
    "other", ["router", "worker"]
)  # whose account has another name: both may not have one
@pytest.mark.parametrize("word", ["2025", "true"])
def test_a_string_that_looks_like_something_else_stays_a_string(word: str, other: str) -> None:
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    paths = [
        path
        for path in strings(schema, "", schema["definitions"])
        if not any(part in path.split(".") for part in NOT_FREE)
    ]
    paths.remove(f"{other}.serviceAccount.name")
    assert len(paths) > 30
    paths.append("modelSource.image.tag")  # which another model than the demo's has to have
    flags = [flag for path in paths for flag in ("--set-string", f"{path}={word}")]
    text = run_helm("template", "segue", str(CHART), "--namespace", NAMESPACE, *flags)
    rendered: list[Object] = [each for each in yaml.safe_load_all(text) if each]
    assert [line for thing in rendered for line in complaints(thing, NEWEST) if "sizeLimit" not in line] == []


COMMIT = {"model": "a/b", "modelSource": {"hub": {"revision": "0" * 40}}}
HUB = {"modelSource": {"hub": {"allowMovingRevision": True}, "sizeLimit": "1Gi"}, "model": "a/b"}
RDMA = {"rdma": {"enabled": True, "acknowledgeOpenFabric": True, "devices": "mlx5_0:1"}}
WORD = "WORD"  # stands for the word that is tried
FETCH = {"image": WORD, "command": [WORD, "a"], "routerCommand": [WORD]}
# Strings that mean something beside others alone, and these; several of one object are tried together.
SETS: dict[str, list[dict[str, Any]]] = {
    "model, servedModelName": [
        {"model": WORD, "servedModelName": WORD, "modelSource": {"image": {"tag": WORD, "repository": WORD}}}
    ],
    "modelSource.cache": [
        COMMIT,
        {"modelSource": {"cache": {"claimName": WORD}}},
    ],
    "modelSource.cache.create": [
        COMMIT,
        {"modelSource": {"cache": {"create": {"size": "1Gi", "storageClass": WORD}}}},
    ],
    "modelSource.hub": [
        HUB,
        {"modelSource": {"hub": {"revision": WORD, "existingSecret": WORD, "secretKey": WORD}}},
    ],
    "modelSource.fetch": [
        {"model": WORD, "modelSource": {"kind": "fetch", "fetch": FETCH, "sizeLimit": "1Gi"}}
    ],
    "modelSource.image": [{"modelSource": {"kind": "imageVolume", "image": {"tag": WORD, "folder": WORD}}}],
    "modelSource.pvc": [{"modelSource": {"kind": "pvc", "pvc": {"claimName": WORD, "subPath": WORD}}}],
    "modelSource.extraEnv": [{"modelSource": {"extraEnv": [{"name": WORD, "value": WORD}]}}],
    "links, auth": [
        {"links": {"routerSecret": WORD, "workerSecret": WORD}, "auth": {"existingSecret": WORD}},
    ],
    "nameOverride": [{"nameOverride": WORD}],
    "kv, placement": [{"kv": {"interface": WORD}, "placement": {"pairTopologyKey": WORD}}],
    "rdma": [RDMA, {"rdma": {"resourceName": WORD}}],
    "global": [{"global": {"imageRegistry": WORD, "imagePullSecrets": [WORD]}}],
}


@pytest.mark.parametrize("word", ["2025", "true"])
@pytest.mark.parametrize("given", SETS)
def test_a_string_stays_a_string_where_it_means_something_beside_others(
    given: str, word: str, tmp_path: Path
) -> None:
    flags = []
    for number, values in enumerate(SETS[given]):
        file = tmp_path / f"{number}.yaml"
        file.write_text(json.dumps(values).replace(WORD, word), encoding="utf-8")
        flags += ["--values", str(file)]
    text = run_helm("template", "segue", str(CHART), "--namespace", NAMESPACE, *flags)
    rendered: list[Object] = [each for each in yaml.safe_load_all(text) if each]
    assert [line for thing in rendered for line in complaints(thing, NEWEST)] == []
    assert word in text


def test_no_string_of_the_models_source_is_forgotten() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    source = schema["properties"]["modelSource"]
    tried = json.dumps(list(SETS.values()))
    free = [path.rpartition(".")[2] for path in strings(source, "", schema["definitions"])]
    assert [name for name in free if f'"{name}": "{WORD}"' not in tried and name != "key"] == []


def strings(schema: dict[str, Any], path: str, definitions: dict[str, Any]) -> Iterator[str]:
    """Paths of the values that may be any text."""
    named = definitions[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    if named.get("type") == "string" and not {"pattern", "enum"} & named.keys():
        yield path
    if named.get("additionalProperties") == {"type": "string"}:
        yield f"{path}.key"
    for name, value in named.get("properties", {}).items():
        yield from strings(value, f"{path}.{name}".lstrip("."), definitions)
