"""What an upgrade does not change, because others may have set it since: replicas, and the keys of the links."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
import yaml

from shared.links.keys import LINK_ROLES, parse_keys
from shared.process.api_keys import digest_of
from shared.process.api_keys import parse_keys as parse_api_keys
from tests.charts.live_objects import cluster_of
from tests.charts.rendering import CHART, NAMESPACE, Object, objects, of_kind, run_helm

LINK_SECRETS = ("segue-links-router", "segue-links-worker")


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


def with_keys(name: str, keys: str) -> Object:
    return {**of_kind(objects(None), "Secret")[name], "data": {"keys.pem": keys}}


def test_an_upgrade_keeps_the_link_keys(tmp_path: Path) -> None:
    live = [with_keys("segue-links-router", "bGl2ZQ=="), with_keys("segue-links-worker", "a2VwdA==")]
    assert link_secrets(upgraded(live, tmp_path)) == {each["metadata"]["name"]: each["data"] for each in live}


@pytest.mark.parametrize("left", [[], ["segue-links-worker"]])
def test_link_keys_are_drawn_together_where_one_of_them_is_missing(left: list[str], tmp_path: Path) -> None:
    live = [with_keys(name, "b2xk") for name in left]
    first, second = (link_secrets(upgraded(live, tmp_path)) for _ in range(2))
    for name in LINK_SECRETS:
        assert first[name] != second[name] != {"keys.pem": "b2xk"}


def api_keys(rendered: list[Object]) -> dict[str, str]:
    data = of_kind(rendered, "Secret")["segue-api-keys"]["data"]
    return {name: base64.b64decode(value).decode() for name, value in data.items()}


def test_the_drawn_api_key_is_what_routers_read_and_each_release_has_its_own() -> None:
    first, second = (api_keys(objects(None, f"router.replicas={count}")) for count in (1, 2))
    assert first["api-key"] != second["api-key"]
    assert set(first) == {"api-key", "keys"}
    (key,) = parse_api_keys(first["keys"].encode()).values()
    assert key.digest == digest_of(first["api-key"].encode())
    assert len(first["api-key"]) == len("sk-segue-") + 43  # of 62 characters each: 256 bits


@pytest.mark.parametrize("names", [("keys",), ("keys", "api-key"), ("keys", "api-key", "mine")])
def test_an_upgrade_keeps_all_api_keys_that_are_there(names: tuple[str, ...], tmp_path: Path) -> None:
    data = {name: base64.b64encode(name.encode()).decode() for name in names}
    live = {**of_kind(objects(None), "Secret")["segue-api-keys"], "data": data}
    assert of_kind(upgraded([live], tmp_path), "Secret")["segue-api-keys"]["data"] == data


def test_an_upgrade_keeps_a_file_of_keys_that_is_empty_because_all_are_revoked(tmp_path: Path) -> None:
    live = {**of_kind(objects(None), "Secret")["segue-api-keys"], "data": {"keys": ""}}
    assert of_kind(upgraded([live], tmp_path), "Secret")["segue-api-keys"]["data"] == {"keys": ""}


def test_the_drawn_keys_are_what_the_processes_read_and_none_holds_the_others_secret() -> None:
    drawn = link_secrets(objects(None))
    files = {role: base64.b64decode(drawn[f"segue-links-{role}"]["keys.pem"]) for role in LINK_ROLES}
    router, worker = (parse_keys(files[role], role) for role in LINK_ROLES)
    assert router.peers == worker.siblings == (worker.own.public,)
    assert worker.peers == router.siblings == (router.own.public,)
    assert [content.count(b"BEGIN PRIVATE KEY") for content in files.values()] == [1, 1]
