"""Containerfiles as stages of instructions, and what goes into the image of a target. Nothing is built or run.

An image holds its own stage, the stages that one starts FROM (its lineage), and what is copied out of others. Shell
lines are cut into commands at `&&`, `;` and the like, without being understood any further.
"""

from __future__ import annotations

import io
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from dockerfile_parse import DockerfileParser  # type: ignore[import-untyped]

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "images"
FILES = ("router", "worker", "model")
TARGETS = {"router": "router", "cpu": "worker", "cuda": "worker", "model": "model"}  # target → its file
CONTEXT = ""  # where a COPY without `--from` copies from

Command = list[str]


@dataclass(frozen=True, slots=True)
class Copy:
    """One COPY: from a stage or the build context, of which paths."""

    source: str
    paths: list[str]


@dataclass(slots=True)
class Stage:
    """FROM and what follows it; `base` is another stage, `scratch` or what an ARG names."""

    name: str
    base: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def values(self, instruction: str) -> list[str]:
        """What follows each `instruction`, in order."""
        return [value for name, value in self.instructions if name == instruction]

    def commands(self) -> Iterator[Command]:
        """Every command of its RUNs, as words."""
        for line in self.values("RUN"):
            lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|()")
            lexer.whitespace_split, lexer.commenters = True, ""
            command: Command = []
            for word in lexer:
                if set(word) <= set(";&|(){}"):
                    if command:
                        yield command
                    command = []
                else:
                    command.append(word)
            if command:
                yield command

    def apt_packages(self) -> set[str]:
        """What it installs from Debian."""
        return {
            word
            for command in self.commands()
            if command[:2] == ["apt-get", "install"]
            for word in command[2:]
            if not word.startswith("-")
        }

    def pip(self, action: str) -> list[Command]:
        """Its commands `pip install` or `pip uninstall`, by whatever path."""
        return [
            command
            for command in self.commands()
            if len(command) > 1 and command[0].rpartition("/")[2] == "pip" and command[1] == action
        ]

    def environments(self) -> list[str]:
        """Paths of the virtual environments it makes."""
        return [command[-1] for command in self.commands() if command[1:3] == ["-m", "venv"]]

    def copies(self) -> list[Copy]:
        """Its COPYs."""
        copies = []
        for value in self.values("COPY"):
            words = shlex.split(value)
            flags = [word for word in words if word.startswith("--")]
            sources = [flag.removeprefix("--from=") for flag in flags if flag.startswith("--from=")]
            copies.append(Copy(sources[0] if sources else CONTEXT, words[len(flags) : -1]))
        return copies

    def variables(self) -> dict[str, str]:
        """Its ENVs, as they are written."""
        words = [word for value in self.values("ENV") for word in shlex.split(value)]
        return dict(word.split("=", 1) for word in words)

    def labels(self) -> dict[str, str]:
        """Its LABELs, variables as they are written."""
        words = [word for value in self.values("LABEL") for word in shlex.split(value)]
        return dict(word.split("=", 1) for word in words)


@dataclass(frozen=True, slots=True)
class Containerfile:
    """The ARGs before the first FROM, with their defaults, and the stages in order."""

    arguments: dict[str, str]
    stages: dict[str, Stage]

    def lineage(self, target: str) -> list[Stage]:
        """The stage of `target`, the one that it starts from, and so on."""
        found = []
        while target in self.stages:
            found.append(self.stages[target])
            target = self.stages[target].base
        return found

    def involved(self, target: str) -> dict[str, Stage]:
        """All stages that have to be built for `target`, by name."""
        found: dict[str, Stage] = {}
        waiting = [target]
        while waiting:
            name = waiting.pop()
            if name in self.stages and name not in found:
                stage = found[name] = self.stages[name]
                waiting += [stage.base, *(copy.source for copy in stage.copies())]
        return found


@cache
def containerfile(name: str) -> Containerfile:
    """`images/NAME.Containerfile`."""
    return parse((IMAGES / f"{name}.Containerfile").read_bytes())


def parse(content: bytes) -> Containerfile:
    """The stages of a Containerfile. Raises ValueError for a stage without a name."""
    structure = DockerfileParser(fileobj=io.BytesIO(content)).structure
    read = Containerfile({}, {})
    stage: Stage | None = None
    for entry in structure:
        name, value = entry["instruction"], entry["value"]
        if name == "FROM":
            match value.split():
                case [base, "AS", label]:
                    stage = read.stages[label] = Stage(label, base)
                case _:
                    raise ValueError(f"expected FROM base AS name, got FROM {value}")
        elif name == "ARG" and stage is None:
            argument, _, default = value.partition("=")
            read.arguments[argument] = default
        elif name != "COMMENT" and stage is not None:
            stage.instructions.append((name, value))
    return read
