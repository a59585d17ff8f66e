"""The chart as Helm renders it: objects out of values, or Helm's sentence why not.

Helm is the one on PATH, else the one that the test cluster beside the checkout carries in its archive. On a machine
with neither the tests of the chart are skipped, and say so; in CI (the variable CI is set) they fail.
"""

from __future__ import annotations

import functools
import os
import runpy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "segue"
CHART_VERSION: str = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))["version"]
CLUSTER = ROOT.parent / "shared" / "cluster" / "cluster"
VALUE_SETS = ("cpu-demo", "gpu", "production")
# Where people have their models, and where their clusters differ.
USER_SETS = (
    "argo-cd", "gguf", "hub-behind-proxy", "image-volume", "node-folder", "openshift", "rdma", "s3-by-fetch",
)  # fmt: skip
EVERY_VALUE, EVERY_GPU_VALUE = "every_value", "every_gpu_value"
RELEASE, NAMESPACE = "segue", "serving"
HELM_SECONDS_MAX = 60.0
# What `device=cuda` takes beside it.
CUDA = ("device=cuda", "prefill.resources.limits.memory=32Gi", "decode.resources.limits.memory=32Gi")
SHARED_GPU = (  # with CUDA
    "sameNodeGpuIpc.enabled=true",
    "sameNodeGpuIpc.runAsUser=10007",
    "kv.transport=nixl",
    "kv.allowUnauthenticatedTcp=true",
)

Object = dict[str, Any]


def values_file(values: str) -> Path:
    """A ready-made value set of the chart, or one of the two that are made for tests."""
    return (
        Path(__file__).with_name(f"{values}.yaml")
        if values in (EVERY_VALUE, EVERY_GPU_VALUE)
        else CHART / "ci" / f"{values}.yaml"
    )


class RefusedError(Exception):
    """Helm refused the values; the message is what a person reads."""


@functools.cache
def helm() -> str:
    """Path of the program; without one the test is skipped, and fails in CI."""
    if found := shutil.which("helm"):
        return found
    if not CLUSTER.exists():
        missing = "helm is not on PATH, and ../shared/cluster is not beside this checkout: install Helm 4.1 or newer"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(missing)
    archived = Path(runpy.run_path(str(CLUSTER), run_name="binaries")["BIN"]) / "helm"
    assert archived.exists(), f"the test cluster's archive has no helm: {archived} does not exist"
    return str(archived)


def run_helm(*arguments: str, environment: dict[str, str] | None = None) -> str:
    """What Helm prints. Raises RefusedError with its complaint."""
    result = subprocess.run(
        [helm(), *arguments],
        capture_output=True,
        text=True,
        timeout=HELM_SECONDS_MAX,
        check=False,
        env={**os.environ, **(environment or {})},
    )
    if result.returncode != 0:
        raise RefusedError(result.stderr + result.stdout)
    return result.stdout


@functools.cache
def manifest(values: str | None, *sets: str, release: str = RELEASE) -> str:
    """All manifests for a value set (None: the defaults), and `--set` over it."""
    files = ["--values", str(values_file(values))] if values else []
    flags = [flag for setting in sets for flag in ("--set", setting)]
    return run_helm("template", release, str(CHART), "--namespace", NAMESPACE, *files, *flags)


def objects(values: str | None, *sets: str, release: str = RELEASE) -> list[Object]:
    """The rendered objects, in Helm's order."""
    text = manifest(values, *sets, release=release)
    return [document for document in yaml.load_all(text, Loader=yaml.CSafeLoader) if document]


def of_kind(rendered: list[Object], kind: str) -> dict[str, Object]:
    """The objects of one kind, by name."""
    return {each["metadata"]["name"]: each for each in rendered if each["kind"] == kind}


def pods(rendered: list[Object]) -> dict[str, Object]:
    """Metadata and spec of every pod that would run, by component."""
    templates = [each["spec"]["template"] for each in rendered if each["kind"] in ("Deployment", "Job")]
    templates += [each for each in rendered if each["kind"] == "Pod"]
    return {each["metadata"]["labels"]["app.kubernetes.io/component"]: each for each in templates}


def environment(pod: Object) -> dict[str, str]:
    """The main container's variables with a literal value."""
    return {each["name"]: each["value"] for each in pod["spec"]["containers"][0]["env"] if "value" in each}


def selects(selector: Object, labels: dict[str, str]) -> bool:
    """Whether a LabelSelector selects these labels. The empty one selects everything."""
    for requirement in selector.get("matchExpressions", []):
        assert requirement["operator"] == "In", "only In is used by the chart"
        if labels.get(requirement["key"]) not in requirement["values"]:
            return False
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())
