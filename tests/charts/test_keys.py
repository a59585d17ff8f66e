"""The Jobs that make and remove the Secrets of keys: when they run, what they may do, and what they are told to do."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from shared.local import release_keys
from tests.charts.rendering import CHART, NAMESPACE, Object, objects, of_kind, pods, run_helm

EVENTS = {"create": "pre-install,pre-upgrade", "remove": "post-delete"}
KINDS = {"ServiceAccount", "Role", "RoleBinding", "NetworkPolicy", "Job"}
OWN = ("links.routerSecret=a", "links.workerSecret=b")
LINKS, CLIENTS = ["segue-links-router", "segue-links-worker"], "segue-api-keys"


def hooks(verb: str, *sets: str) -> dict[str, Object]:
    """The objects of one Job, by kind."""
    return {
        each["kind"]: each
        for each in objects(None, *sets)
        if each["metadata"]["name"] == f"segue-keys-{verb}"
    }


def command(verb: str, *sets: str) -> list[str]:
    """What the container of one Job is told."""
    container = hooks(verb, *sets)["Job"]["spec"]["template"]["spec"]["containers"][0]
    assert container["command"] == ["python", "-m", release_keys.__name__]
    arguments: list[str] = container["args"]
    return arguments


class WrittenDown(release_keys.ReleaseApi):
    """An empty namespace, and what is made there."""

    made: list[dict[str, Any]]

    def secret(self, name: str) -> dict[str, Any] | None:
        """What was made."""
        return next((each for each in self.made if each["metadata"]["name"] == name), None)

    def create(self, secret: Any) -> bool:
        """Keep it."""
        self.made.append(secret)
        return True


@pytest.mark.parametrize("verb", EVENTS)
def test_each_object_lives_as_long_as_its_job(verb: str) -> None:
    found = hooks(verb)
    assert found.keys() == KINDS
    for kind, thing in found.items():
        said = thing["metadata"]["annotations"]
        assert said["helm.sh/hook"] == EVENTS[verb]
        # A failed Job is kept for its log, what it was allowed to do is not.
        ends = {"before-hook-creation", "hook-succeeded"} | ({"hook-failed"} if kind != "Job" else set())
        assert set(said["helm.sh/hook-delete-policy"].split(",")) == ends
        assert (int(said["helm.sh/hook-weight"]) < 0) == (kind != "Job"), (
            "what a Job needs is there before it"
        )


@pytest.mark.parametrize("verb", EVENTS)
def test_a_job_may_touch_three_secrets_by_name_and_make_others_only_before_it_is_gone(verb: str) -> None:
    found = hooks(verb)
    names = [*LINKS, CLIENTS]
    rules = {
        (tuple(rule["resources"]), tuple(rule.get("resourceNames", ()))): rule["verbs"]
        for rule in found["Role"]["rules"]
    }
    expected = {(("secrets",), tuple(names)): ["get", "delete"]}
    expected |= {(("deployments",), ("segue-router",)): ["get"]}
    expected |= {(("secrets",), ()): ["create"]} if verb == "create" else {}
    assert rules == expected
    account = found["ServiceAccount"]["metadata"]["name"]
    assert found["RoleBinding"]["subjects"] == [
        {"kind": "ServiceAccount", "name": account, "namespace": NAMESPACE}
    ]
    assert found["RoleBinding"]["roleRef"]["name"] == found["Role"]["metadata"]["name"]
    assert found["Job"]["spec"]["template"]["spec"]["serviceAccountName"] == account


def test_the_job_is_told_which_secrets_the_pods_read() -> None:
    text = command("create")
    mounted = {
        volume["secret"]["secretName"]
        for pod in pods(objects(None)).values()
        for volume in pod["spec"].get("volumes", [])
        if "secret" in volume
    }
    told = {each.partition("=")[2] for each in text if each.startswith(("--links", "--api"))}
    assert told == mounted == {*LINKS, CLIENTS}
    assert command("remove") == ["remove", "--unless-deployment=segue-router", *LINKS, CLIENTS]
    assert "--unless-deployment=segue-router" in text
    assert "segue-router" in of_kind(objects(None), "Deployment")


@pytest.mark.parametrize(
    ("sets", "made"),
    [
        ((), [*LINKS, CLIENTS]),
        (OWN, [CLIENTS]),
        (("auth.existingSecret=c",), LINKS),
        (("auth.enabled=false",), LINKS),
        ((*OWN, "auth.existingSecret=c"), []),
        ((*OWN, "auth.enabled=false"), []),
        (("keys.from=render",), []),
    ],
)
def test_only_what_is_nobodys_is_made(sets: tuple[str, ...], made: list[str]) -> None:
    assert [hooks(verb, *sets).keys() for verb in EVENTS] == [KINDS if made else set()] * 2
    if made:
        assert command("remove", *sets)[2:] == made
        assert [
            name for name in (*LINKS, CLIENTS) if any(name in each for each in command("create", *sets))
        ] == made
    rendered = of_kind(objects(None, *sets), "Secret")
    assert set(rendered) == ({*LINKS, CLIENTS} if "keys.from=render" in sets else set())


def test_a_secret_that_is_made_has_the_labels_of_the_release_and_is_pruned_by_nobody() -> None:
    api = WrittenDown("", NAMESPACE, "")
    object.__setattr__(api, "made", [])
    release_keys.run(command("create", "commonLabels.team=a", "commonAnnotations.example\\.com/of=us"), api)
    assert [each["metadata"]["name"] for each in api.made] == [*LINKS, CLIENTS]
    for each in api.made:
        assert each["metadata"]["annotations"] == {
            "example.com/of": "us",
            "helm.sh/resource-policy": "keep",
            "argocd.argoproj.io/sync-options": "Prune=false",
            "argocd.argoproj.io/compare-options": "IgnoreExtraneous",
        }
        assert (
            each["metadata"]["labels"].items()
            >= {
                "team": "a",
                "app.kubernetes.io/instance": "segue",
                "app.kubernetes.io/managed-by": release_keys.MADE_HERE,
            }.items()
        )


@pytest.mark.parametrize(("release", "removed"), [("segue", True), ("other", False)])
def test_who_removes_keys_by_hand_removes_those_of_one_release(release: str, removed: bool) -> None:
    page = (CHART.parents[1] / "docs" / "gitops.md").read_text(encoding="utf-8")
    [selector] = re.findall(r"kubectl delete secret -l (\S+)`", page)
    wanted = dict(each.split("=") for each in selector.split(","))
    api = WrittenDown("", NAMESPACE, "")
    object.__setattr__(api, "made", [])
    job = pods(objects(None, release=release))["keys-create"]["spec"]["containers"][0]
    release_keys.run(job["args"], api)
    for each in api.made:
        assert (wanted.items() <= each["metadata"]["labels"].items()) is removed
    assert api.made


OPERATING = (CHART.parents[1] / "docs" / "operating.md").read_text(encoding="utf-8")
# As on macOS: no option but that of decoding.
BASE64 = 'case "$*" in "" | --decode) exec {base64} "$@" ;; *) exit 64 ;; esac'
KUBECTL = """
echo "$*" >>asked
case "$1 $2" in
  "get secret") openssl genpkey -algorithm ed25519 | base64 ;;
  "rollout status") [ "$ROLL_FAILS" != yes ] ;;
esac
"""


def asked_by(commands: str, folder: Path, **variables: str) -> list[str]:
    """What kubectl is asked by these commands of docs/operating.md."""
    for name, text in (("base64", BASE64.format(base64=shutil.which("base64"))), ("kubectl", KUBECTL)):
        (folder / name).write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        (folder / name).chmod(0o755)
    (folder / "asked").touch()
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", **variables}
    subprocess.run(["bash", "-c", commands], cwd=folder, env=environment, capture_output=True, check=False)
    return (folder / "asked").read_text(encoding="utf-8").splitlines()


def patched(asked: list[str]) -> list[str]:
    """The texts that Secrets were patched with."""
    patches = [json.loads(each.partition("--patch ")[2]) for each in asked if each.startswith("patch secret")]
    return [base64.b64decode(text).decode() for each in patches for text in each["data"].values()]


[REPLACEMENT] = [each for each in re.findall(r"(?s)```sh\n(.*?)```", OPERATING) if "use new new.crt" in each]
[NEW_API_KEYS] = re.findall(r"(?m)^.*kubectl patch secret segue-api-keys .*$", OPERATING)


def test_the_documented_replacement_of_link_keys_gives_each_step_its_keys(tmp_path: Path) -> None:
    texts = patched(asked_by(REPLACEMENT, tmp_path))
    for at, step in enumerate(("old", "new", "new")):
        for role, text in zip(("router", "worker"), texts[2 * at : 2 * at + 2], strict=True):
            assert text.startswith((tmp_path / f"{step}-{role}.key").read_text(encoding="utf-8"))
            assert (
                text.count("BEGIN CERTIFICATE") == 2
            )  # the new ones: the old Secrets of this test hold none
    assert len(texts) == 6


def test_the_documented_replacement_of_link_keys_ends_where_a_roll_fails(tmp_path: Path) -> None:
    asked = asked_by(REPLACEMENT, tmp_path, ROLL_FAILS="yes")
    assert len(patched(asked)) == 2
    assert sum(each.startswith("rollout restart") for each in asked) == 1


@pytest.mark.parametrize("held", ["default 5f0c\n" * 9, ""])
def test_the_documented_edit_of_api_keys_never_empties_them(held: str, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(held, encoding="utf-8")
    assert patched(asked_by(NEW_API_KEYS, tmp_path)) == ([held] if held else [])


def test_no_mesh_holds_a_job_open() -> None:
    for verb in EVENTS:
        pod = pods(objects(None, "commonLabels.sidecar\\.istio\\.io/inject=yes"))[f"keys-{verb}"]["metadata"]
        assert pod["labels"]["sidecar.istio.io/inject"] == "false"
        assert pod["annotations"]["linkerd.io/inject"] == "disabled"


def test_a_job_ends_before_helm_gives_it_up() -> None:
    for verb in EVENTS:
        assert hooks(verb)["Job"]["spec"]["activeDeadlineSeconds"] < 300


def test_who_applies_manifests_takes_the_jobs_object_by_itself() -> None:
    """docs/gitops.md: without hooks, and this file once."""
    whole = run_helm("template", "segue", str(CHART), "--no-hooks")
    assert "segue-keys-" not in whole
    shown = run_helm("template", "segue", str(CHART), "--show-only", "templates/keys-create.yaml")
    assert {each["kind"] for each in yaml.safe_load_all(shown) if each} == KINDS


def test_the_notes_name_the_secrets_and_who_made_them() -> None:
    def notes(*sets: str) -> str:
        flags = [flag for setting in sets for flag in ("--set", setting)]
        return run_helm("install", "segue", str(CHART), "--dry-run=client", *flags).partition("\nNOTES:\n")[2]

    assert (
        "Secrets segue-links-router, segue-links-worker, segue-api-keys, made in the cluster by a Job"
        in notes()
    )
    assert "Secret segue-api-keys, made in the cluster by a Job" in notes(*OWN)
    assert "are rendered (keys.from)" in notes("keys.from=render")
    assert "Job" not in notes(*OWN, "auth.enabled=false")
