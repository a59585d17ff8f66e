"""The project's Python files, as text and as trees, for tests that read them. Only what git would track counts."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROLES = ("router", "prefill", "decode")


@dataclass(frozen=True)
class SourceFile:
    """One file; `path` is relative to the repository. It is parsed when first asked: all files take seconds."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """The file, parsed."""
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All nodes of the tree."""
        return tuple(ast.walk(self.tree))

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
    return tuple(SourceFile(path, (ROOT / path).read_text(encoding="utf-8")) for path in tracked("*.py"))
