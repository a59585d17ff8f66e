"""What a stranger does: `pip install` of the wheel into an environment of its own, and `segue up`, in any folder."""

from __future__ import annotations

import json
import os
import subprocess
import venv
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from images.release.packages import build_packages
from shared.local.model_store import cache_folder
from shared.primitives.version import VERSION
from tests.integration.deployments.deployment import free_port
from tests.release.trees import copy_tree
from tests.waiting import until

INSTALL_SECONDS_MAX = 600
READY_SECONDS_MAX = 240
ANOTHERS_CODE = 'raise RuntimeError("this is a package of somebody else")\n'
pytestmark = pytest.mark.timeout(INSTALL_SECONDS_MAX + READY_SECONDS_MAX)


def clean_environment(folder: Path) -> dict[str, str]:
    """As after a login: nothing of this process, and a cache without the model's package.

    What takes long and depends on sources alone is taken from this machine's cache: compiled kernels and the converted
    model are known by hashes of what they were made of.
    """
    cache = folder / "cache" / "segue"
    cache.mkdir(parents=True, exist_ok=True)
    for name in ("kernels", "models"):
        (cache_folder() / name).mkdir(parents=True, exist_ok=True)
        (cache / name).symlink_to(cache_folder() / name)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SEGUE_"))}
    return kept | {"XDG_CACHE_HOME": str(folder / "cache"), "PIP_CACHE_DIR": str(folder / "pip")}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The folder `bin` of a fresh environment with the wheel and what it asks for, and the variables to use there."""
    folder = tmp_path_factory.mktemp("fresh")
    [wheel] = [
        path for path in build_packages(copy_tree(folder / "tree"), folder, 1) if path.suffix == ".whl"
    ]
    venv.create(folder / "venv", with_pip=True)
    variables = clean_environment(folder)
    command = [str(folder / "venv/bin/pip"), "install", "--quiet", "--no-compile", str(wheel)]
    installed = subprocess.run(
        command, env=variables, capture_output=True, text=True, check=False, timeout=INSTALL_SECONDS_MAX
    )
    assert installed.returncode == 0, installed.stderr
    return folder / "venv" / "bin", variables


@pytest.fixture(scope="module")
def address(
    environment: tuple[Path, dict[str, str]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """`segue up`, in a folder that has packages of our packages' names."""
    binaries, variables = environment
    folder = tmp_path_factory.mktemp("project")
    for name in ("shared", "router", "prefill", "decode"):
        (folder / f"{name}.py").write_text(ANOTHERS_CODE)
    url = f"http://127.0.0.1:{free_port()}"
    log = folder / "log"
    with log.open("wb") as output:
        command = [str(binaries / "segue"), "up", "--port", url.rpartition(":")[2]]
        process = subprocess.Popen(command, cwd=folder, env=variables, stdout=output, stderr=output)
    try:
        until(lambda: process.poll() is not None or is_ready(url), READY_SECONDS_MAX, "segue up is ready")
        assert process.poll() is None, log.read_text()
        yield url
    finally:
        process.terminate()
        process.wait(30)


def is_ready(url: str) -> bool:
    """Whether requests are taken."""
    try:
        return httpx2.get(f"{url}/health").status_code == 200
    except httpx2.TransportError:
        return False


def test_a_plain_install_brings_no_build_of_torch_for_another_device(
    environment: tuple[Path, dict[str, str]],
) -> None:
    binaries, variables = environment
    command = [str(binaries / "pip"), "list", "--format", "json"]
    listed = subprocess.run(command, env=variables, capture_output=True, text=True, check=True).stdout
    versions = {each["name"]: each["version"] for each in json.loads(listed)}
    assert versions["segue-llm"] == VERSION
    assert not {name for name in versions if "flashinfer" in name or name.startswith("llama")}
    checked = subprocess.run(
        [binaries / "pip", "check"], env=variables, capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout


def test_the_command_says_its_version(environment: tuple[Path, dict[str, str]]) -> None:
    binaries, variables = environment
    said = subprocess.run(
        [binaries / "segue", "--version"], env=variables, capture_output=True, text=True, check=True
    )
    assert said.stdout == f"segue {VERSION}\n"


def test_segue_up_serves_the_model_of_the_demo_beside_anothers_packages(address: str) -> None:
    asked = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "Why is the sky blue?"}],
        "max_tokens": 8,
    }
    answer = httpx2.post(f"{address}/v1/chat/completions", json=asked, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 8
    assert answer.json()["choices"][0]["message"]["content"]
