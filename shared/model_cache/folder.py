"""A model's folder, which is whole or absent: it is filled under another name, and gets its own in one step.

    NAME.partial      what has been fetched so far; kept when a download breaks
    NAME              whole: `.complete` lists every file with its size, so that a second pod only looks at the sizes

Knows nothing of where the files come from, or of who may write them.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

COMPLETE = ".complete"
PLAN = ".plan"


@dataclass(frozen=True, slots=True)
class Plan:
    """What a partial folder is to become: of which commit, and how large."""

    commit: str
    size_bytes: int


def read_plan(partial: Path) -> Plan | None:
    """None: nobody has said."""
    try:
        noted = json.loads((partial / PLAN).read_text(encoding="utf-8"))
        return Plan(noted["commit"], noted["size_bytes"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_plan(partial: Path, plan: Plan) -> None:
    """For whoever goes on, and for those who wait."""
    (partial / PLAN).write_text(
        json.dumps({"commit": plan.commit, "size_bytes": plan.size_bytes}), encoding="utf-8"
    )


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """The folder at `path`, and the one beside it in which it is made."""

    path: Path

    @property
    def partial(self) -> Path:
        """Where the files go first."""
        return self.path.with_name(f"{self.path.name}.partial")

    def is_complete(self) -> bool:
        """Whether every file that was there when it was sealed is there, as large as it was then."""
        try:
            sizes: dict[str, int] = json.loads((self.path / COMPLETE).read_text(encoding="utf-8"))
            return all((self.path / name).stat().st_size == size for name, size in sizes.items())
        except (OSError, ValueError):
            return False

    def begin(self) -> None:
        """Have a partial folder; a damaged whole one becomes that, so that what is left of it is not fetched again."""
        if self.path.exists() and not self.partial.exists():
            self.path.rename(self.partial)
            (self.partial / COMPLETE).unlink(missing_ok=True)
        self.partial.mkdir(parents=True, exist_ok=True)

    def seal(self, made: Path | None = None) -> None:
        """Give what was made (by default the partial folder) its name, when all of it is on the disk."""
        source = made or self.partial
        (source / PLAN).unlink(missing_ok=True)
        files = sorted(path for path in source.rglob("*") if path.is_file() and path.name != COMPLETE)
        for path in files:
            _sync(path)
        sizes = {str(path.relative_to(source)): path.stat().st_size for path in files}
        (source / COMPLETE).write_text(json.dumps(sizes, indent=0), encoding="utf-8")
        _sync(source / COMPLETE)
        if self.path.exists():
            shutil.rmtree(self.path)
        source.rename(self.path)
        if made is not None:
            shutil.rmtree(self.partial, ignore_errors=True)

    def bytes_so_far(self) -> int:
        """How large the partial folder is. Files and folders may vanish while they are looked at, and so may it."""
        walk = os.walk(self.partial)
        return sum(_size(Path(folder, name)) for folder, _, names in walk for name in names)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:
        return 0


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
