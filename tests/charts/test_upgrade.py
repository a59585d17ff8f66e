"""What an upgrade does not change, because others may have set it since: replicas, and keys."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
import yaml

from shared.links.keys import LINK_ROLES, parse_keys
from shared.local.release_keys import MADE_HERE, MAKER
from shared.process.api_keys import digest_of
from shared.process.api_keys import parse_keys as parse_api_keys
from tests.charts.live_objects import cluster_of
from tests.charts.rendering import CHART, NAMESPACE, Object, RefusedError, objects, of_kind, run_helm

LINK_SECRETS = ("segue-links-router", "segue-links-worker")
RENDER = "keys.from=render"


def upgraded(live: list[Object], folder: Path, *sets: str) -> list[Object]:
    """What an upgrade would send to a cluster where these objects live."""
    flags = [flag for setting in sets for flag in ("--set", setting)]
    with cluster_of(live, folder) as kubeconfig:
        text = run_helm(
            "template", "segue", str(CHART), "--is-upgrade", "--dry-run=server", "--disable-openapi-validation",
            "--namespace", NAMESPACE, "--kubeconfig", kubeconfig, *flags,
            environment={"KUBECACHEDIR": str(folder)},
        )  # fmt: skip
    return [document for document in yaml.safe_load_all(text) if document]


def scaled(role: str, replicas: int) -> Object:
    """The Deployment that the chart makes, after `kubectl scale`."""
    deployment = of_kind(objects(None), "Deployment")[f"segue-{role}"]
    return {**deployment, "spec": {**deployment["spec"], "replicas": replicas}}


def replicas(rendered: list[Object]) -> dict[str, int]:
    return {name: each["spec"].get("replicas", -1) for name, each in of_kind(rendered, "Deployment").items()}


@pytest.mark.parametrize("live", [0, 7])
def test_an_upgrade_keeps_the_replicas_that_were_scaled(live: int, tmp_path: Path) -> None:
    kept = upgraded([scaled("decode", live)], tmp_path, "decode.replicas=3", "prefill.replicas=2")
    assert replicas(kept) == {"segue-router": 2, "segue-prefill": 2, "segue-decode": live}


def test_an_upgrade_says_nothing_of_replicas_that_are_null(tmp_path: Path) -> None:
    kept = upgraded([scaled("decode", 7)], tmp_path, "decode.replicas=null")
    assert replicas(kept)["segue-decode"] == -1


def link_secrets(rendered: list[Object]) -> dict[str, dict[str, str]]:
    return {name: each["data"] for name, each in of_kind(rendered, "Secret").items() if name in LINK_SECRETS}


def live_secret(name: str, data: dict[str, str], release: str = "segue") -> Object:
    """A Secret that the chart has rendered, as Helm leaves it in the cluster."""
    rendered = of_kind(objects(None, RENDER), "Secret")[name]
    said = {"meta.helm.sh/release-name": release, "meta.helm.sh/release-namespace": NAMESPACE}
    return {**rendered, "metadata": {**rendered["metadata"], "annotations": said}, "data": data}


def with_keys(name: str, keys: str) -> Object:
    return live_secret(name, {"keys.pem": keys})


LINKS = {"segue-links-router": "bGl2ZQ==", "segue-links-worker": "a2VwdA=="}


@pytest.mark.parametrize("sets", [(), (RENDER,)])
def test_an_upgrade_keeps_link_keys_that_were_rendered(sets: tuple[str, ...], tmp_path: Path) -> None:
    """With a Job, too: they stay in the manifest, or Helm would remove them, and a rollback would not find them."""
    live = [with_keys(name, keys) for name, keys in LINKS.items()]
    assert link_secrets(upgraded(live, tmp_path, *sets)) == {
        name: {"keys.pem": keys} for name, keys in LINKS.items()
    }


@pytest.mark.parametrize("left", [[], ["segue-links-worker"]])
def test_a_secret_that_is_missing_is_left_to_the_job(left: list[str], tmp_path: Path) -> None:
    live = [with_keys(name, "b2xk") for name in left]
    assert list(link_secrets(upgraded(live, tmp_path))) == left


def test_what_another_release_or_a_person_has_made_does_not_come_into_the_manifest(tmp_path: Path) -> None:
    theirs = live_secret("segue-links-router", {"keys.pem": "b2xk"}, release="other")
    mine = with_keys("segue-links-worker", "b2xk")
    del mine["metadata"]["annotations"]
    keys = live_secret("segue-api-keys", {"keys": ""}, release="other")
    assert of_kind(upgraded([theirs, mine, keys], tmp_path), "Secret") == {}


@pytest.mark.parametrize("name", [*LINKS, "segue-api-keys"])
def test_a_job_made_it_so_helm_does_not_take_it_over(name: str, tmp_path: Path) -> None:
    made = live_secret(name, {"keys.pem": "b2xk"})
    made["metadata"] = {**made["metadata"], "labels": {MAKER: MADE_HERE}, "annotations": {}}
    with pytest.raises(RefusedError, match=f"keys.from is render, but Secret {name} was made by the Job"):
        upgraded([made], tmp_path, RENDER)
    assert of_kind(upgraded([made], tmp_path), "Secret") == {}


@pytest.mark.parametrize("left", [[], ["segue-links-worker"]])
def test_link_keys_are_drawn_together_where_one_of_them_is_missing(left: list[str], tmp_path: Path) -> None:
    live = [with_keys(name, "b2xk") for name in left]
    first, second = (link_secrets(upgraded(live, tmp_path, RENDER)) for _ in range(2))
    for name in LINK_SECRETS:
        assert first[name] != second[name] != {"keys.pem": "b2xk"}


def api_keys(rendered: list[Object]) -> dict[str, str]:
    data = of_kind(rendered, "Secret")["segue-api-keys"]["data"]
    return {name: base64.b64decode(value).decode() for name, value in data.items()}


def test_the_drawn_api_key_is_what_routers_read_and_each_release_has_its_own() -> None:
    first, second = (api_keys(objects(None, RENDER, f"router.replicas={count}")) for count in (1, 2))
    assert first["api-key"] != second["api-key"]
    assert set(first) == {"api-key", "keys"}
    (key,) = parse_api_keys(first["keys"].encode()).values()
    assert key.digest == digest_of(first["api-key"].encode())
    assert len(first["api-key"]) == len("sk-segue-") + 43  # of 62 characters each: 256 bits


@pytest.mark.parametrize("sets", [(), (RENDER,)])
@pytest.mark.parametrize("names", [("keys",), ("keys", "api-key"), ("keys", "api-key", "mine")])
def test_an_upgrade_keeps_all_api_keys_that_were_rendered(
    names: tuple[str, ...], sets: tuple[str, ...], tmp_path: Path
) -> None:
    data = {name: base64.b64encode(name.encode()).decode() for name in names}
    live = live_secret("segue-api-keys", data)
    assert of_kind(upgraded([live], tmp_path, *sets), "Secret")["segue-api-keys"]["data"] == data


@pytest.mark.parametrize("sets", [(), (RENDER,)])
def test_an_upgrade_keeps_a_file_of_keys_that_is_empty_because_all_are_revoked(
    sets: tuple[str, ...], tmp_path: Path
) -> None:
    live = live_secret("segue-api-keys", {"keys": ""})
    assert of_kind(upgraded([live], tmp_path, *sets), "Secret")["segue-api-keys"]["data"] == {"keys": ""}


def test_the_drawn_keys_are_what_the_processes_read_and_none_holds_the_others_secret() -> None:
    drawn = link_secrets(objects(None, RENDER))
    files = {role: base64.b64decode(drawn[f"segue-links-{role}"]["keys.pem"]) for role in LINK_ROLES}
    router, worker = (parse_keys(files[role], role) for role in LINK_ROLES)
    assert router.peers == worker.siblings == (worker.own.public,)
    assert worker.peers == router.siblings == (router.own.public,)
    assert [content.count(b"BEGIN PRIVATE KEY") for content in files.values()] == [1, 1]
