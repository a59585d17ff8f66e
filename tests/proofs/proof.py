"""What a proof shows: figures, each with what was promised, and whether it was kept."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Promise:
    """One line of a table: a figure, what it has to be, what others have published."""

    name: str
    value: float
    least: float | None = None
    most: float | None = None
    others: str = ""

    @property
    def kept(self) -> bool:
        above = self.least is None or self.value >= self.least
        return above and (self.most is None or self.value <= self.most)

    @property
    def bound(self) -> str:
        """What was promised."""
        if self.least is not None and self.least == self.most:
            return f"{self.least:g}"
        return f">= {self.least:g}" if self.least is not None else f"<= {self.most:g}"


@dataclass(frozen=True, slots=True)
class ProofResult:
    """All that a run has shown."""

    promises: tuple[Promise, ...]
    seen: Mapping[str, object] = field(default_factory=dict)  # what happened besides

    @property
    def broken(self) -> list[str]:
        """The promises that were not kept."""
        return [each.name for each in self.promises if not each.kept]

    def show(self) -> int:
        """Print everything; the exit status says whether all was kept."""
        for name, value in self.seen.items():
            sys.stdout.write(f"{name:44} {value}\n")
        sys.stdout.write(f"\n{'':44} {'measured':>12} {'promised':>12}  kept  published by others\n")
        for each in self.promises:
            kept = "yes" if each.kept else "NO"
            sys.stdout.write(f"{each.name:44} {each.value:12g} {each.bound:>12}  {kept:4}  {each.others}\n")
        return len(self.broken)
