"""The project's Python files, as text and as trees, for tests that read them. Only what git would track counts."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROLES = ("router", "prefill", "decode")


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file; `path` is relative to the repository."""

    path: str
    text: str
    tree: ast.Module
    nodes: tuple[ast.AST, ...]  # all of the tree: to walk every tree takes a second

    @property
    def shipped(self) -> bool:
        """Whether it runs in production: not a test."""
        return not self.path.startswith("tests/")

    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        """Every function and method, nested ones too."""
        for node in self.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node

    def classes(self) -> Iterator[ast.ClassDef]:
        """Every class."""
        return (node for node in self.nodes if isinstance(node, ast.ClassDef))

    def imports(self) -> Iterator[str]:
        """The dotted name of every imported module."""
        for node in self.nodes:
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                yield node.module


@cache
def tracked(pattern: str) -> tuple[str, ...]:
    """Paths that git tracks, or would if they were added, that match `pattern` and exist."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", pattern],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    return tuple(sorted({path for path in listed if (ROOT / path).is_file()}))


@cache
def source_files() -> tuple[SourceFile, ...]:
    """All Python files of the project."""
    return tuple(
        SourceFile(path, text, tree, tuple(ast.walk(tree)))
        for path in tracked("*.py")
        for text in [(ROOT / path).read_text(encoding="utf-8")]
        for tree in [ast.parse(text)]
    )
