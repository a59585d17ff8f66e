"""An OCI registry of Debian's `docker-registry`, without TLS, at 127.0.0.1 of this machine and of a cluster's node.

One folder is behind both: what is pushed here is what the node pulls, at the same address. An address of 127.0.0.1 is
the only one from which containerd pulls without TLS unless it is told otherwise.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx2
import pytest

from images.release.publish import Registry
from tests.charts.rendering import helm
from tests.cluster.kubernetes import COMMAND
from tests.waiting import until

CONFIG = """version: 0.1
storage: {{filesystem: {{rootdirectory: {folder}}}}}
http: {{addr: '127.0.0.1:{port}'}}
log: {{level: error}}
"""


def require(tool: str) -> str:
    """Path of a program; without it the test is skipped, and fails in CI."""
    if (found := shutil.which(tool)) is None:
        missing = f"{tool} is not on PATH (Debian: apt-get install {tool})"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(missing)
    return found


@contextlib.contextmanager
def running_registry(folder: Path) -> Iterator[Registry]:
    """An empty registry on this machine, at a free port."""
    require("skopeo")
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
    (folder / "config.yml").write_text(CONFIG.format(folder=folder / "data", port=port), encoding="utf-8")
    with _serving(folder):
        until(lambda: answers(port), 30, "the registry listens")
        yield Registry(f"127.0.0.1:{port}/ai", plain_http=True, helm=helm())


@contextlib.contextmanager
def registry_on_the_node(folder: Path) -> Iterator[None]:
    """The same registry at 127.0.0.1 of the own cluster's node, whose network is a namespace of its own."""
    status = subprocess.run([COMMAND, "status"], check=True, capture_output=True, text=True).stdout
    node = re.search(r"^containerd\s+pid (\d+)", status, re.MULTILINE)
    assert node, f"the cluster was to name its containerd's process, and said {status}"
    with _serving(folder, ("nsenter", "--target", node[1], "--net", "--")):
        yield


@contextlib.contextmanager
def _serving(folder: Path, inside: Sequence[str] = ()) -> Iterator[None]:
    command = [*inside, require("docker-registry"), "serve", str(folder / "config.yml")]
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield
    finally:
        process.terminate()
        process.wait(10)


def answers(port: int) -> bool:
    """Whether a registry's API is there."""
    try:
        return httpx2.get(f"http://127.0.0.1:{port}/v2/").status_code == 200
    except httpx2.TransportError:
        return False
