"""What the Jobs of keys make and remove in a namespace; `tests/cluster` runs them against a real API server."""

from __future__ import annotations

import base64
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shared.links.keys import LINK_ROLES, key_file, new_identity, parse_keys
from shared.local import release_keys
from shared.local.release_keys import ReleaseApi, run
from shared.primitives.errors import StartError
from shared.process.api_keys import digest_of
from shared.process.api_keys import parse_keys as parse_api_keys
from tests.unit.local.secret_server import DEPLOYMENTS, SECRETS, TOKEN, SecretServer, serving

METADATA = {"labels": {"team": "a", "app.kubernetes.io/managed-by": "Helm"}, "annotations": {"keep": "me"}}
LINKS = ("--links-router=links-router", "--links-worker=links-worker")
CREATE = (
    "create",
    "--unless-deployment=router",
    *LINKS,
    "--api-keys=api-keys",
    f"--metadata={json.dumps(METADATA)}",
)
NAMES = ("links-router", "links-worker", "api-keys")
REMOVE = ("remove", "--unless-deployment=router", *NAMES)
OURS = {"metadata": {"name": "x", "labels": {"app.kubernetes.io/managed-by": "segue-keys"}}}


@pytest.fixture
def cluster() -> Iterator[SecretServer]:
    with serving() as served:
        yield served


@pytest.fixture
def api(cluster: SecretServer) -> ReleaseApi:
    return ReleaseApi(cluster.url, "serving", TOKEN)


def files(secret: dict[str, Any]) -> dict[str, bytes]:
    return {name: base64.b64decode(content) for name, content in secret["data"].items()}


def test_what_is_missing_is_made_as_the_processes_read_it(cluster: SecretServer, api: ReleaseApi) -> None:
    told = run(CREATE, api)
    assert told == [
        "Secret links-router is made",
        "Secret links-worker is made",
        "Secret api-keys is made, with one key for clients",
    ]
    made = cluster.secrets()
    contents = {role: files(made[f"links-{role}"])["keys.pem"] for role in LINK_ROLES}
    router, worker = (parse_keys(contents[role], role) for role in LINK_ROLES)
    assert router.peers == worker.siblings == (worker.own.public,)
    assert worker.peers == router.siblings == (router.own.public,)
    assert [content.count(b"BEGIN PRIVATE KEY") for content in contents.values()] == [1, 1]
    clients = files(made["api-keys"])
    (key,) = parse_api_keys(clients["keys"]).values()
    assert (key.name, key.digest) == ("default", digest_of(clients["api-key"]))


def test_a_secret_has_the_metadata_that_the_chart_says_and_the_mark_of_its_maker(
    cluster: SecretServer, api: ReleaseApi
) -> None:
    run(CREATE, api)
    for name, made in cluster.secrets().items():
        assert made["metadata"]["annotations"] == {"keep": "me"}
        assert made["metadata"]["labels"] == {
            "team": "a",
            "app.kubernetes.io/managed-by": "segue-keys",
            "app.kubernetes.io/component": "router" if name == "api-keys" else "links",
        }


def test_a_second_run_changes_nothing(cluster: SecretServer, api: ReleaseApi) -> None:
    run(CREATE, api)
    before = json.dumps(cluster.live)
    told = [f"Secret {name} is there and stays as it is" for name in NAMES]
    assert [line.partition(":")[0] for line in run(CREATE, api)] == told
    assert json.dumps(cluster.live) == before


def test_a_secret_of_somebody_elses_stays_and_the_others_are_made(
    cluster: SecretServer, api: ReleaseApi
) -> None:
    mine: dict[str, Any] = {"metadata": {"name": "api-keys"}, "data": {"keys": ""}}
    cluster.live[f"{SECRETS}/api-keys"] = mine
    mine["metadata"] |= {
        "labels": {"app.kubernetes.io/managed-by": "Helm"},
        "creationTimestamp": "2026-11-28",
    }
    *_, told = run(CREATE, api)
    assert told == (
        "Secret api-keys is there and stays as it is: it names Helm as its maker, and was made at 2026-11-28"
    )
    assert set(cluster.secrets()) == set(NAMES)
    assert cluster.secrets()["api-keys"] == mine


@pytest.mark.parametrize("there", ["links-router", "links-worker"])
def test_half_of_a_pair_is_left_to_a_person(there: str, cluster: SecretServer, api: ReleaseApi) -> None:
    missing = ({*NAMES[:2]} - {there}).pop()
    theirs = {"metadata": {"name": there}}
    for half, release in ((OURS, True), (theirs, False)):  # pods may run with it, and who made it may want it
        cluster.live = {f"{SECRETS}/{there}": half}
        cluster.live |= {f"{DEPLOYMENTS}/router": {"metadata": {"name": "router"}}} if release else {}
        with pytest.raises(
            StartError, match=f"Secret {there} is there and Secret {missing} is not.*delete {there}"
        ):
            run(CREATE, api)
        assert cluster.secrets() == {there: half}


@pytest.mark.parametrize("there", ["links-router", "links-worker"])
def test_half_that_a_job_left_before_there_was_a_release_is_drawn_anew(
    there: str, cluster: SecretServer, api: ReleaseApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release_keys, "HALF_SECONDS", 0.0)
    run(CREATE, api)
    before = cluster.secrets()
    cluster.live = {f"{SECRETS}/{there}": before[there]}
    run(CREATE, api)
    after = cluster.secrets()
    assert set(after) == set(NAMES)
    assert all(after[name]["data"] != before[name]["data"] for name in NAMES)


def test_a_pod_that_is_still_at_the_other_half_is_waited_for(
    cluster: SecretServer, api: ReleaseApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release_keys, "RETRY_SECONDS", 0.01)
    run(CREATE, api)
    whole = dict(cluster.live)
    del cluster.live[f"{SECRETS}/links-worker"]

    def other_half(_verb: str) -> None:
        if cluster.asked[-1] == ("GET", "router"):
            cluster.live = dict(whole)

    cluster.meanwhile = other_half
    run(CREATE, api)
    assert cluster.live == whole


@pytest.mark.parametrize("name", NAMES)
def test_a_secret_whose_answer_was_lost_is_ours(name: str, cluster: SecretServer, api: ReleaseApi) -> None:
    cluster.lost = {name}
    assert [line.split(",")[0] for line in run(CREATE, api)] == [f"Secret {each} is made" for each in NAMES]
    assert set(cluster.secrets()) == set(NAMES)


def test_keys_that_could_link_nothing_are_told_before_pods_have_them(
    cluster: SecretServer, api: ReleaseApi
) -> None:
    run(CREATE, api)
    other = dict(cluster.secrets())
    cluster.live.clear()
    run(CREATE, api)
    cluster.live[f"{SECRETS}/links-worker"] = other["links-worker"]
    with pytest.raises(StartError, match="links-router and links-worker do not admit each other"):
        run(CREATE, api)
    cluster.live[f"{SECRETS}/links-worker"] = other["links-router"]
    with pytest.raises(
        StartError, match=r"links-worker is there, but its keys\.pem holds a private key without"
    ):
        run(CREATE, api)
    cluster.live[f"{SECRETS}/links-worker"] = {"metadata": {"name": "links-worker"}}
    with pytest.raises(StartError, match=r"links-worker is there, but its keys\.pem holds 0 private keys"):
        run(CREATE, api)


def test_keys_that_are_being_replaced_pass_at_every_step(cluster: SecretServer, api: ReleaseApi) -> None:
    """docs/operating.md patches one Secret after the other."""
    old, new = ({role: new_identity(role) for role in LINK_ROLES} for _ in range(2))
    listed = [*old.values()]
    steps = [(old, [*listed, *new.values()]), (new, [*listed, *new.values()]), (new, [*new.values()])]
    now = {role: key_file(old[role], *listed) for role in LINK_ROLES}
    for own, certificates in steps:
        for role in LINK_ROLES:
            now[role] = key_file(own[role], *certificates)
            for each, content in now.items():
                made = release_keys.secret(f"links-{each}", "links", {"keys.pem": content}, {})
                cluster.live[f"{SECRETS}/links-{each}"] = made
            run(CREATE, api)


def test_half_of_a_pair_that_was_just_made_is_taken_back(cluster: SecretServer, api: ReleaseApi) -> None:
    cluster.refused = {("POST", "links-worker")}
    with pytest.raises(
        StartError, match=r"POST /api/v1/namespaces/serving/secrets with 403: .*exceeded quota"
    ):
        run(CREATE, api)
    assert cluster.secrets() == {}
    cluster.refused = set()
    run(CREATE, api)
    assert set(cluster.secrets()) == set(NAMES)


def test_who_comes_second_takes_nothing_back_that_the_first_has_made(
    cluster: SecretServer, api: ReleaseApi
) -> None:
    run(CREATE, api)
    others = dict(cluster.live)
    cluster.live.clear()
    cluster.asked.clear()

    def others_pair(verb: str) -> None:
        if verb == "POST":
            cluster.live |= others

    cluster.meanwhile = others_pair
    with pytest.raises(StartError, match="links-router was made by somebody else meanwhile: try again"):
        run(CREATE, api)
    assert set(cluster.secrets()) == set(NAMES)
    assert not [verb for verb, _ in cluster.asked if verb == "DELETE"]
    assert len(run(CREATE, api)) == 3


def test_only_what_is_asked_for_is_made(cluster: SecretServer, api: ReleaseApi) -> None:
    assert run(("create", "--unless-deployment=router", "--api-keys=api-keys"), api) == [
        "Secret api-keys is made, with one key for clients"
    ]
    assert set(cluster.secrets()) == {"api-keys"}


def test_what_was_made_here_is_removed_and_nothing_else(cluster: SecretServer, api: ReleaseApi) -> None:
    run(("create", "--unless-deployment=router", *LINKS), api)
    cluster.live[f"{SECRETS}/api-keys"] = {"metadata": {"name": "api-keys"}}
    assert run(REMOVE, api) == [
        "Secret links-router is removed",
        "Secret links-worker is removed",
        "Secret api-keys is not of this Job and stays",
    ]
    assert set(cluster.secrets()) == {"api-keys"}
    assert "Secret links-router is not there" in run(REMOVE, api)


def test_nothing_is_removed_while_the_release_lives(cluster: SecretServer, api: ReleaseApi) -> None:
    run(CREATE, api)
    cluster.live[f"{DEPLOYMENTS}/router"] = {"metadata": {"name": "router"}}
    assert run(REMOVE, api) == ["Deployment router is there, and so is the release: its keys stay"]
    assert set(cluster.secrets()) == set(NAMES)
    cluster.live[f"{DEPLOYMENTS}/router"]["metadata"]["deletionTimestamp"] = "2026-11-28T00:00:00Z"
    run(REMOVE, api)
    assert cluster.secrets() == {}


def test_a_refusal_while_one_looks_is_not_taken_for_a_missing_secret(
    cluster: SecretServer, api: ReleaseApi
) -> None:
    cluster.refused = {("GET", "links-router")}
    with pytest.raises(StartError, match="with 403"):
        run(CREATE, api)
    cluster.refused = {("GET", "router")}
    with pytest.raises(StartError, match="with 403"):
        run(REMOVE, api)
    assert cluster.secrets() == {}


def test_a_network_that_lets_a_pod_out_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    monkeypatch.setattr(release_keys, "RETRY_SECONDS", 0.01)
    refused = threading.Event()
    told: list[str] = []

    class CountedApi(ReleaseApi):
        def _asked(self, *asked: Any, **more: Any) -> Any:
            try:
                return super()._asked(*asked, **more)
            except release_keys.ApiUnreachableError:
                refused.set()
                raise

    api = CountedApi(f"http://127.0.0.1:{port}", "serving", TOKEN)
    job = threading.Thread(target=lambda: told.extend(run(CREATE, api)))
    job.start()
    assert refused.wait(10)
    with serving(port) as late:
        job.join(10)
        assert len(told) == 3
        assert set(late.secrets()) == set(NAMES)


def test_a_server_that_is_not_reached_is_named_with_what_may_be_in_the_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(release_keys, "REACH_SECONDS_MAX", 0.0)
    with pytest.raises(StartError, match=r"gave no answer to GET .*networkPolicy\.egress\.apiServerPorts"):
        run(CREATE, ReleaseApi("http://127.0.0.1:9", "serving", TOKEN))


def test_the_token_goes_nowhere_but_to_the_api_server(
    cluster: SecretServer, api: ReleaseApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving() as other:
        for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY"):
            monkeypatch.setenv(name, other.url)
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        run(CREATE, api)
        assert set(cluster.secrets()) == set(NAMES)
        cluster.moved_to = other.url
        with pytest.raises(StartError, match=r"GET .* with 307: look elsewhere"):
            run(CREATE, api)
        assert other.asked == []


def test_a_pod_finds_the_server_its_namespace_and_its_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("secret\n")
    (tmp_path / "namespace").write_text("serving")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    for host, url in (("10.0.0.1", "https://10.0.0.1:443"), ("fd00::1", "https://[fd00::1]:443")):
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
        found = ReleaseApi.of_this_pod(tmp_path)
        assert (found.url, found.namespace, found.token) == (url, "serving", "secret")
        assert found.authority == tmp_path / "ca.crt"
        assert "secret" not in repr(found)


def test_outside_a_pod_it_says_so_in_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "shared.local.release_keys", *CREATE],
        capture_output=True,
        text=True,
        env={},
        check=False,
    )
    assert (done.returncode, done.stderr) == (
        1,
        "segue keys: expected to run in a pod with the token of a service account, and met none\n",
    )
