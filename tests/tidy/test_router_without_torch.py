"""The router runs in an image without torch: shown by refusing the import, and by an environment that has none."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.tidy.source_files import ROOT

REFUSING = """
import importlib.abc, pkgutil, sys

class Refusing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "nixl", "safetensors", "gguf", "accelerate"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refusing())
import router
names = ["router"] + [found.name for found in pkgutil.walk_packages(router.__path__, "router.")]
for name in names:
    if not name.endswith("__main__"):
        __import__(name)
sys.stdout.write(" ".join(names))
"""


def test_every_module_of_the_router_imports_where_torch_is_missing() -> None:
    child = subprocess.run(
        [sys.executable, "-c", REFUSING], capture_output=True, text=True, cwd=ROOT, timeout=120, check=False
    )
    assert child.returncode == 0, child.stderr
    assert {"router.core.dispatch", "router.openai.app", "router.process"} <= set(child.stdout.split())


def router_requirements() -> list[str]:
    """What the router's image has of the project's dependencies."""
    made = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    of = made["tool"]["segue"]["images"]
    lines = made["project"]["dependencies"]
    return [line for line in lines if Requirement(line).name in {*of["both"], *of["router"]}]


@pytest.mark.timeout(600)
def test_what_the_routers_image_has_is_all_a_router_needs(tmp_path: Path) -> None:
    venv.create(tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SEGUE_"))}

    def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=clean, check=False)

    pip = sys.executable, "-m", "pip", "--python", python
    for what in (router_requirements(), ["--no-deps", str(ROOT)]):
        installed = run(*pip, "install", "--quiet", "--no-compile", *what)
        assert installed.returncode == 0, installed.stderr
    listed = run(*pip, "list", "--format", "freeze").stdout.lower()
    assert "transformers==" in listed
    assert not [
        line for line in listed.splitlines() if line.startswith(("torch==", "nixl", "safetensors-torch"))
    ]
    asked = run(python, "-m", "router", "--help")
    assert asked.returncode == 0, asked.stderr
    assert "--decode-policy" in asked.stdout
    loaded = run(python, "-c", "import router.process, sys; sys.stdout.write(str('torch' in sys.modules))")
    assert (loaded.returncode, loaded.stdout) == (0, "False"), loaded.stderr
