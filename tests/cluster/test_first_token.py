"""Seconds from `helm install` to the first token, for each of charts/segue/ci that a cluster without a GPU can run.

Not a part of `make cluster-test`: docs/first-token.md has what it measured, by

    SEGUE_FIRST_TOKEN=1 make cluster-test ARGS="-k first_token"

Values are those files. What this cluster lacks (GPUs, a Hub, a bucket, a volume's claim) is set beside them.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import pytest

from shared.local.demo_model import demo_gguf
from shared.local.model_store import resolve
from tests.cluster.conftest import NOTES
from tests.cluster.kubernetes import Cluster, image_tag
from tests.cluster.load import Plan, ask
from tests.cluster.release import CHART, DEMO_VALUES, NAME, HelmRelease
from tests.cluster.test_model_cache import FETCHED, MACHINE, USER
from tests.hub_server import COMMIT, HubServer, Repository
from tests.integration.deployments.cut_model import cut_model
from tests.waiting import until

pytestmark = [
    pytest.mark.skipif("SEGUE_FIRST_TOKEN" not in os.environ, reason="SEGUE_FIRST_TOKEN asks for no seconds"),
    pytest.mark.timeout(900, func_only=True),
]
TOKEN = "hf_right"
HERE = "image.tag={tag},device=cpu,startupSeconds=null,servedModelName=smollm2,networkPolicy.verify=false"
VOLUME = """
apiVersion: v1
kind: PersistentVolume
metadata: {{name: models}}
spec:
  capacity: {{storage: 10Gi}}
  accessModes: [ReadWriteMany]
  storageClassName: ""
  persistentVolumeReclaimPolicy: Retain
  hostPath: {{path: {folder}}}
  claimRef: {{namespace: {namespace}, name: models}}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {{name: models, namespace: {namespace}}}
spec:
  accessModes: [ReadWriteMany]
  storageClassName: ""
  resources: {{requests: {{storage: 10Gi}}}}
  volumeName: models
"""


@dataclass(frozen=True, slots=True)
class Place:
    """What stands in for a user's surroundings."""

    hub: HubServer
    models: Path  # the demo's model, converted, in a folder `smollm2`
    cache: Path  # empty, and writable for the pods


@dataclass(frozen=True, slots=True)
class Way:
    """A file of charts/segue/ci, and what is set for this cluster."""

    values: str
    sets: Callable[[Place], list[str]]


def copy_command(place: Place, *names: str) -> str:
    """As JSON: a command that copies files from a store which is no Hub."""
    copy = "import sys, urllib.request as web; web.urlretrieve(sys.argv[1] + sys.argv[2], sys.argv[2])"
    each = f"python -c '{copy}' {place.hub.url}/store/owner/gated/ $name || exit 1"
    return json.dumps(["sh", "-c", f"for name in {' '.join(names)}; do {each}; done"])


WAYS = {
    "the demo's data image": Way("cpu-demo.yaml", lambda _: []),
    "PVC": Way(
        "cpu-demo.yaml",
        lambda _: [
            "model=smollm2",
            "modelSource.kind=pvc,modelSource.pvc.claimName=models,modelSource.pvc.subPath=smollm2",
        ],
    ),
    "node folder": Way(
        "node-folder.yaml", lambda place: [f"modelSource.hostPath={place.models / 'smollm2'}"]
    ),
    "Hub with a token": Way(
        "gpu.yaml",
        lambda place: [
            "model=owner/gated,modelSource.sizeLimit=1Gi",
            f"modelSource.hub.revision={COMMIT},modelSource.hub.endpoint={place.hub.url}",
        ],
    ),
    "a fetch of yours": Way(
        "s3-by-fetch.yaml",
        lambda place: [
            f"modelSource.cache.hostPath={place.cache}",
            f"modelSource.fetch.image=localhost/segue-router:{image_tag()}",
            f"json:modelSource.fetch.command={copy_command(place, *FETCHED, 'model.safetensors')}",
            f"json:modelSource.fetch.routerCommand={copy_command(place, *FETCHED)}",
        ],
    ),
    "GGUF": Way(
        "gguf.yaml",
        lambda place: [
            "model=owner/gguf,modelSource.gguf=SmolLM2.gguf",
            f"modelSource.hub.revision={COMMIT},modelSource.hub.endpoint={place.hub.url}",
            f"modelSource.cache.claimName=,modelSource.cache.hostPath={place.cache}",
            "modelSource.resources.requests.memory=6Gi,modelSource.resources.limits.memory=6Gi",
            "router.replicas=1",  # each pod asks for that memory
        ],
    ),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model as pods see it who are another user."""
    folder = tmp_path_factory.mktemp("models")
    shutil.copytree(resolve("smollm2", lambda _line: None), folder / "smollm2")
    for parent in (folder, *folder.parents[:2]):
        parent.chmod(0o755)
    return folder


@pytest.fixture
def place(models: Path, tmp_path: Path) -> Iterator[Place]:
    folder = cut_model()
    files: dict[str, bytes | Path] = {name: folder / name for name in (*FETCHED, "model.safetensors")}
    repositories = {
        "owner/gated": Repository(files, token=TOKEN),
        "owner/gguf": Repository({"SmolLM2.gguf": demo_gguf(tmp_path / "downloads", lambda _line: None)}),
    }
    cache = tmp_path / "cache"
    cache.mkdir()
    os.chown(cache, USER, USER)
    for parent in (tmp_path, *tmp_path.parents[:2]):
        parent.chmod(0o755)
    with HubServer(repositories, host=MACHINE) as hub:
        yield Place(hub, models, cache)


@pytest.fixture(scope="module")
def namespace(cluster: Cluster, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A namespace with what the values name: Secrets and a claim."""
    other = Cluster("segue-first-token", cluster.environment, cluster.context)
    other.kubectl("create", "namespace", other.namespace)
    other.kubectl("create", "secret", "generic", "hub-token", f"--from-literal=token={TOKEN}")
    other.kubectl("create", "secret", "generic", "bucket-credentials", "--from-literal=KEY=none")
    volume = tmp_path_factory.mktemp("volume") / "volume.yaml"
    volume.write_text(VOLUME.format(folder=models, namespace=other.namespace), encoding="utf-8")
    other.kubectl("apply", "-f", str(volume))
    yield other
    other.kubectl("delete", "namespace", other.namespace, "--wait=true")
    other.kubectl("delete", "pv", "models")


@pytest.mark.parametrize("name", WAYS)
def test_first_token_after_an_installation(
    name: str, namespace: Cluster, place: Place, pytestconfig: pytest.Config
) -> None:
    way = WAYS[name]
    files = [flag for each in (way.values, DEMO_VALUES) for flag in ("-f", f"{CHART}/ci/{Path(each).name}")]
    sets = [HERE.format(tag=image_tag()), *way.sets(place)]
    flags = [
        flag
        for each in sets
        for flag in (
            ("--set-json", each.removeprefix("json:")) if each.startswith("json:") else ("--set", each)
        )
    ]
    release = HelmRelease(namespace)
    began = monotonic()
    try:
        namespace.helm("install", NAME, CHART, *files, *flags, "--wait", "--timeout", "10m")
        ready = monotonic() - began
        release.connect()
        (tokens,) = ask(release.url, release.api_key, [Plan("The expedition left", 1)])
        seconds = monotonic() - began
        assert len(tokens) == 1
    finally:
        namespace.helm("uninstall", NAME, "--wait", "--ignore-not-found")
        until(lambda: not namespace.pods(), 120, "the end of its pods")
    pytestconfig.stash.setdefault(NOTES, []).append(
        f"| {name} | `{way.values}` | {ready:.0f} s | {seconds:.0f} s |"
    )
