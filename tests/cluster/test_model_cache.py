"""A model of the Hub on a cache that all pods share, and what a pod's status says where it cannot be fetched.

The Hub is a server of this process, so the pods have to reach this machine: the own cluster's do.
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import NOTES
from tests.cluster.kubernetes import Cluster, image_tag
from tests.cluster.load import Plan, ask
from tests.cluster.release import CHART, DEMO_VALUES
from tests.hub_server import COMMIT, HubServer, Repository
from tests.integration.deployments.cut_model import cut_model
from tests.waiting import until

MACHINE = "10.243.255.1"  # as pods of the own cluster reach it
NAME = "cached"
MODEL = "owner/smollm2"
USER = 10001
FETCHED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
VALUES = (
    "router.replicas=1,networkPolicy.verify=false,router.config.localPrefill=fallback,"
    f"model={MODEL},servedModelName=smollm2,modelSource.hub.revision={COMMIT}"
)
Pod = dict[str, Any]
pytestmark = pytest.mark.skipif(
    "SEGUE_TEST_CONTEXT" in os.environ, reason="pods of that cluster need not reach this machine"
)


@pytest.fixture
def hub() -> Iterator[HubServer]:
    folder = cut_model()
    files: dict[str, bytes | Path] = {name: folder / name for name in (*FETCHED, "model.safetensors")}
    files["consolidated.safetensors"] = b"the weights once more"
    repositories = {
        MODEL: Repository(files),
        "owner/gated": Repository(files, token="hf_right", gated_for=frozenset({""})),
        "owner/private": Repository(files, token="hf_right"),
        "owner/huge": Repository(files, sizes={"model.safetensors": 10**15}),
    }
    with HubServer(repositories, host=MACHINE) as hub:
        yield hub


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A folder of the node, which is this machine; the user of the pods may write there."""
    for parent in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        parent.chmod(0o755)
    os.chown(tmp_path, USER, USER)
    return tmp_path


def helm(cluster: Cluster, verb: str, name: str, hub: HubServer, *sets: str, as_json: str = "") -> None:
    values = (VALUES, f"image.tag={image_tag()}", f"modelSource.hub.endpoint={hub.url}", *sets)
    flags = [flag for each in values for flag in ("--set", each)] + (
        ["--set-json", as_json] if as_json else []
    )
    cluster.helm(verb, name, CHART, "-f", f"{CHART}/{DEMO_VALUES}", *flags)


def uninstall(cluster: Cluster, *names: str) -> None:
    """Remove releases, and wait for their pods, which would hold up the deletion of their namespace for minutes."""
    cluster.helm("uninstall", *names, "--wait", "--ignore-not-found")
    selector = f"app.kubernetes.io/instance in ({','.join(names)})"
    until(lambda: not cluster.get("pods", "-l", selector)["items"], 90, "the end of their pods")


def pods(cluster: Cluster, name: str, *components: str) -> list[Pod]:
    found = cluster.get("pods", "-l", f"app.kubernetes.io/instance={name}")["items"]
    return [each for each in found if each["metadata"]["labels"]["app.kubernetes.io/component"] in components]


def ready(cluster: Cluster, count: int, name: str = NAME) -> bool:
    found = pods(cluster, name, "prefill", "decode", "router")
    conditions = [each["status"].get("conditions", []) for each in found]
    is_ready = [
        any(one["type"] == "Ready" and one["status"] == "True" for one in each) for each in conditions
    ]
    return len(found) == count and all(is_ready)


def test_all_pods_of_a_cache_take_one_copy_and_a_killed_one_is_gone_on_with(
    cluster: Cluster, hub: HubServer, cache: Path, pytestconfig: pytest.Config
) -> None:
    copy_bytes = sum((cut_model() / name).stat().st_size for name in (*FETCHED, "model.safetensors"))
    two = ("prefill.replicas=2", "decode.replicas=2", f"modelSource.cache.hostPath={cache}")
    hub.bytes_per_second = 12e6
    helm(cluster, "install", NAME, hub, *two)
    try:
        until(lambda: hub.sent_bytes > copy_bytes / 3, 120, "a third of the model")
        lock = next((cache / "owner").glob(f"smollm2@{COMMIT}.lock.?"))
        holder = lock.read_text().splitlines()[0]
        (victim,) = (
            each for each in pods(cluster, NAME, "prefill", "decode") if each["metadata"]["uid"] == holder
        )
        cluster.kubectl("delete", "pod", victim["metadata"]["name"], "--grace-period=0", "--force")
        until(lambda: not lock.exists(), 60, "another pod that goes on")
        assert copy_bytes / 3 < hub.sent_bytes < copy_bytes
        hub.bytes_per_second = float("inf")
        until(lambda: ready(cluster, 5), 180, "five ready pods")
        assert hub.sent_bytes <= 1.05 * copy_bytes

        sent, asked = hub.sent_bytes, len(hub.asked)
        cluster.kubectl("scale", f"deployment/{NAME}-segue-decode", "--replicas=3")
        until(lambda: ready(cluster, 6), 120, "a fifth worker")
        assert (hub.sent_bytes, len(hub.asked)) == (sent, asked)
        seconds = [
            float(found[1])
            for pod in pods(cluster, NAME, "decode")
            if (found := re.search(r"is complete \(([\d.]+) s of CPU", logs(cluster, pod)))
        ]
        assert seconds
        assert max(seconds) < 2
        pytestconfig.stash.setdefault(NOTES, []).append(
            f"2 prefill and 2 decode pods took {sent / copy_bytes:.3f} copies of a model of {copy_bytes / 1e6:.0f} MB, "
            f"one was killed at a third; a fifth took none and looked at it for {max(seconds):.2f} s of CPU time"
        )

        service = cluster.get("service", f"{NAME}-segue-router")["spec"]
        key = cluster.get("secret", f"{NAME}-segue-api-keys")["data"]["api-key"]
        url = f"http://{service['clusterIP']}:{service['ports'][0]['port']}"
        (tokens,) = ask(url, base64.b64decode(key).decode(), [Plan("The expedition left", 8)])
        assert len(tokens) == 8
    finally:
        uninstall(cluster, NAME)


def test_a_container_of_the_users_runs_once_for_all_pods(
    cluster: Cluster, hub: HubServer, cache: Path
) -> None:
    """What it knows of is a store without the Hub's API."""
    copy = "import sys, urllib.request as web; web.urlretrieve(sys.argv[1] + sys.argv[2], sys.argv[2])"
    names = " ".join((*FETCHED, "model.safetensors"))
    every = f"for name in {names}; do python -c '{copy}' {hub.url}/store/{MODEL}/ $name || exit 1; done"
    helm(
        cluster, "install", "fetched", hub,
        "prefill.replicas=0", "modelSource.kind=fetch", f"modelSource.cache.hostPath={cache}",
        f"modelSource.fetch.image=localhost/segue-router:{image_tag()}",
        as_json=f"modelSource.fetch.command={json.dumps(['sh', '-c', f'echo copying; {every}'])}",
    )  # fmt: skip
    try:
        until(lambda: ready(cluster, 2, "fetched"), 120, "two ready pods")
        said = [logs(cluster, pod) for pod in pods(cluster, "fetched", "prefill", "decode", "router")]
        assert sorted(said) == ["", "copying\n"]
        assert len(hub.asked) == len(FETCHED) + 1
    finally:
        uninstall(cluster, "fetched")


def logs(cluster: Cluster, pod: Pod) -> str:
    return cluster.kubectl("logs", pod["metadata"]["name"], "-c", "model")


def is_described(cluster: Cluster, name: str, sentence: str) -> bool:
    (pod,) = pods(cluster, name, "decode")
    return sentence in cluster.kubectl("describe", "pod", pod["metadata"]["name"])


FAILURES = {
    "token": (
        ("model=owner/private", "modelSource.sizeLimit=4Gi", "modelSource.hub.existingSecret=wrong-token"),
        "the Hub refuses the token in Secret wrong-token for owner/private (401): put a valid token",
    ),
    "gated": (("model=owner/gated", "modelSource.sizeLimit=4Gi"), "owner/gated is gated, and no token is given"),
    "revision": (
        (f"modelSource.hub.revision={'f' * 40}", "modelSource.sizeLimit=4Gi"),
        f"{MODEL} has no revision {'f' * 40}: give the hash of a commit from http",
    ),
    "disk": (
        ("model=owner/huge", "modelSource.cache.hostPath=CACHE"),
        "the disk is too small: 1000000.0 GB of owner/huge are still to come",
    ),
}  # fmt: skip


def test_what_keeps_a_model_from_a_pod_stands_in_its_status(
    cluster: Cluster, hub: HubServer, cache: Path
) -> None:
    cluster.kubectl("create", "secret", "generic", "wrong-token", "--from-literal=token=hf_wrong")
    try:
        for name, (sets, _) in FAILURES.items():
            helm(
                cluster,
                "install",
                name,
                hub,
                "prefill.replicas=0",
                *(each.replace("CACHE", str(cache)) for each in sets),
            )
        for name, (_, sentence) in FAILURES.items():
            until(partial(is_described, cluster, name, sentence), 60, sentence)
    finally:
        uninstall(cluster, *FAILURES)
        cluster.try_kubectl("delete", "secret", "wrong-token")
