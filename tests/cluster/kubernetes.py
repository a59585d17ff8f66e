"""A cluster as its administrator has it: kubectl and helm.

The cluster is the one beside the checkout (`../shared/cluster`), started for the tests and stopped after them; or the
one that `SEGUE_TEST_CONTEXT` names, and then only a namespace of it.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
COMMAND = ROOT.parent / "shared" / "cluster" / "cluster"
COMMAND_SECONDS_MAX = 600


@dataclass(frozen=True, slots=True)
class ClusterPod:
    """One pod of the release, as the API server tells."""

    name: str
    uid: str
    component: str
    ready: bool
    terminating: bool
    running: bool  # its container
    restarts: int

    @classmethod
    def of(cls, item: dict[str, Any]) -> ClusterPod:
        meta, status = item["metadata"], item.get("status", {})
        conditions = {each["type"]: each["status"] for each in status.get("conditions", [])}
        return cls(
            name=meta["name"],
            uid=meta["uid"],
            component=meta["labels"].get("app.kubernetes.io/component", ""),
            ready=conditions.get("Ready") == "True",
            terminating="deletionTimestamp" in meta,
            running=all("running" in each["state"] for each in status.get("containerStatuses", [])),
            restarts=sum(each["restartCount"] for each in status.get("containerStatuses", [])),
        )


@dataclass(slots=True)
class Cluster:
    """Commands against one namespace of a cluster."""

    namespace: str
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    context: str = ""

    def kubectl(self, *arguments: str, seconds: float = COMMAND_SECONDS_MAX) -> str:
        """kubectl's output; fails with its words."""
        flags = ["--namespace", self.namespace, *(["--context", self.context] if self.context else [])]
        return self._run("kubectl", *flags, *arguments, seconds=seconds)

    def try_kubectl(self, *arguments: str) -> str:
        """kubectl's output, or its words when it fails."""
        try:
            return self.kubectl(*arguments)
        except AssertionError as error:
            return str(error)

    def helm(self, *arguments: str) -> str:
        """helm's output; fails with its words."""
        flags = ["--namespace", self.namespace, *(["--kube-context", self.context] if self.context else [])]
        return self._run("helm", *arguments, *flags, seconds=COMMAND_SECONDS_MAX)

    def get(self, *arguments: str) -> dict[str, Any]:
        """Objects as JSON."""
        found: dict[str, Any] = json.loads(self.kubectl("get", *arguments, "-o", "json"))
        return found

    def pods(self, component: str = "") -> list[ClusterPod]:
        """Pods of the release, by name; of one component, or all."""
        items = self.get("pods", "-l", "app.kubernetes.io/name=segue")["items"]
        pods = [ClusterPod.of(item) for item in items]
        return sorted((pod for pod in pods if component in ("", pod.component)), key=lambda pod: pod.name)

    def page(self, pod: ClusterPod, port: int, path: str) -> str:
        """What a pod answers over HTTP, by way of the API server."""
        return self.kubectl(
            "get", "--raw", f"/api/v1/namespaces/{self.namespace}/pods/{pod.name}:{port}/proxy{path}"
        )

    def now(self, pod: ClusterPod) -> ClusterPod | None:
        """This very pod as it is now; None if it is gone."""
        return next((each for each in self.pods(pod.component) if each.uid == pod.uid), None)

    def evict(self, name: str) -> str:
        """Ask for a pod's eviction; empty where it is granted or the pod is gone, else why not."""
        core = json.loads(self.kubectl("get", "--raw", "/api/v1"))
        [kind] = [each for each in core["resources"] if each["name"] == "pods/eviction"]
        asked = {
            "apiVersion": f"{kind['group']}/{kind['version']}",
            "kind": kind["kind"],
            "metadata": {"name": name, "namespace": self.namespace},
        }
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(asked, file)
            file.flush()
            path = f"/api/v1/namespaces/{self.namespace}/pods/{name}/eviction"
            answer = self.try_kubectl("create", "--raw", path, "-f", file.name)
        return "" if '"status":"Success"' in answer.replace(" ", "") or "NotFound" in answer else answer

    def describe_to(self, folder: Path) -> None:
        """Leave what a reader of a failure wants to see: pods, events, descriptions, logs."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "pods.txt").write_text(self.try_kubectl("get", "pods", "-o", "wide"))
        (folder / "events.txt").write_text(self.try_kubectl("get", "events", "--sort-by=.lastTimestamp"))
        (folder / "descriptions.txt").write_text(self.try_kubectl("describe", "pods"))
        for pod in self.pods():
            for suffix, flags in (("log", []), ("previous.log", ["--previous"])):
                text = self.try_kubectl("logs", pod.name, "--all-containers", *flags)
                (folder / f"{pod.name}.{suffix}").write_text(text)

    def _run(self, *command: str, seconds: float) -> str:
        done = subprocess.run(
            command, env=self.environment, cwd=ROOT, capture_output=True, text=True, timeout=seconds
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}"
        return done.stdout


def start_own() -> dict[str, str]:
    """Start the cluster beside the checkout; the environment of commands for it."""
    subprocess.run([COMMAND, "up"], check=True, stdout=subprocess.DEVNULL)
    listed = subprocess.run([COMMAND, "exec", "env"], check=True, capture_output=True, text=True).stdout
    given = dict(line.split("=", 1) for line in listed.splitlines() if "=" in line)
    return {**os.environ, "KUBECONFIG": given["KUBECONFIG"], "PATH": given["PATH"]}


@functools.cache
def image_tag() -> str:
    """The tag of the images that this tree makes."""
    return subprocess.run(
        [ROOT / "images" / "tag"], check=True, capture_output=True, text=True
    ).stdout.strip()


def image_archive(name: str, folder: Path) -> Path:
    """An image that buildah has, as a file that is not there yet."""
    archive = folder / f"{name.replace('/', '-').replace(':', '-')}.tar"  # a colon would end the path
    subprocess.run(
        ["buildah", "push", "--quiet", name, f"docker-archive:{archive}:{name}"],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return archive


def load_image(archive: Path) -> None:
    """Give the own cluster an image, and remove the file."""
    subprocess.run([COMMAND, "load-image", archive], check=True, stdout=subprocess.DEVNULL)
    archive.unlink()


def stop_own() -> None:
    """Stop the cluster beside the checkout, and remove everything that it made."""
    subprocess.run([COMMAND, "down"], check=True, stdout=subprocess.DEVNULL)
