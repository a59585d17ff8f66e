"""`images/tag`: the version at its tagged commit alone, and else a tag for each content."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.release.trees import ROOT

FOLDERS = ("decode", "prefill", "router", "shared/primitives", "images")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small checkout of version 1.2.3, committed."""
    for folder in FOLDERS:
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(ROOT / "images/tag", tmp_path / "images")
    for name in ("LICENSE", "README.md", "pyproject.toml", "router/core.py"):
        (tmp_path / name).write_text(name)
    (tmp_path / "shared/primitives/version.py").write_text('VERSION = "1.2.3"\n')
    git(tmp_path, "init", "--quiet")
    commit(tmp_path)
    return tmp_path


def git(tree: Path, *arguments: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *who, *arguments], cwd=tree, check=True)


def commit(tree: Path) -> None:
    git(tree, "add", "--all")
    git(tree, "commit", "--quiet", "--message", "a", "--allow-empty")


def tag(tree: Path) -> str:
    return subprocess.run([tree / "images/tag"], capture_output=True, text=True, check=True).stdout.strip()


def test_only_the_tagged_commit_has_the_plain_version(tree: Path) -> None:
    assert tag(tree).startswith("1.2.3-dev.t")
    git(tree, "tag", "v1.2.3")
    assert tag(tree) == "1.2.3"
    (tree / "router/core.py").write_text("changed")
    assert tag(tree).startswith("1.2.3-dev.t")
    commit(tree)
    assert tag(tree).startswith("1.2.3-dev.t")


def test_what_goes_into_images_changes_the_tag_and_nothing_else_does(tree: Path) -> None:
    before = tag(tree)
    (tree / "docs").mkdir()
    (tree / "docs/page").write_text("a page")
    (tree / "router/__pycache__").mkdir()
    (tree / "router/__pycache__/core.pyc").write_text("bytecode")
    commit(tree)
    assert tag(tree) == before
    (tree / "router/core.py").write_text("changed")
    assert tag(tree) != before
    (tree / "router/core.py").write_text("router/core.py")
    assert tag(tree) == before


def test_a_version_that_is_developed_is_never_plain(tree: Path) -> None:
    (tree / "shared/primitives/version.py").write_text('VERSION = "1.3.0.dev0"\n')
    commit(tree)
    git(tree, "tag", "v1.3.0.dev0")
    assert tag(tree).startswith("1.3.0-dev.t")
