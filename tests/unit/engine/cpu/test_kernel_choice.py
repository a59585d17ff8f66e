"""Which kernels compute is never a surprise: what cannot be compiled or loaded is said, and falls back only unasked."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from shared.engine.cpu.kernel_choice import choose_kernels
from shared.engine.native import kernels
from shared.engine.native.build import INSTRUCTION_SETS, SOURCES, BuildError, InstructionSet, build, choose
from shared.primitives.errors import ConfigError


def test_without_a_compiler_torch_computes_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with capture_logs() as lines:
        chosen = choose_kernels("auto", str(tmp_path))
    assert [line["event"] for line in lines] == ["engine.kernels_missing"]
    assert chosen.library is None
    assert "no C++ compiler found (no-such-compiler): install g++" in chosen.description
    with pytest.raises(ConfigError, match="plain kernels were asked for, and no C"):
        choose_kernels("plain", str(tmp_path))


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS, ids=lambda each: each.name)
def test_a_strict_compiler_has_nothing_to_say_of_the_kernels(instruction_set: InstructionSet) -> None:
    warnings = ["-Wall", "-Wextra", "-Wno-ignored-attributes"]  # the ignored ones are attributes of vectors
    strict = ["-std=c++20", "-fsyntax-only", *warnings]
    sources = [str(source) for source in sorted(SOURCES.glob("*.cpp"))]
    command = ["g++", *strict, *instruction_set.flags, *sources]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert said == ""


def test_a_compiler_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "g++ -include no-such-header.h")
    with pytest.raises(BuildError, match=r"g\+\+ failed: .*no-such-header.h"):
        build(choose("plain"), str(tmp_path))


def test_what_was_compiled_ahead_of_time_needs_no_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = build(choose("plain"))
    ahead = tmp_path / compiled.name
    ahead.write_bytes(compiled.read_bytes())
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build(choose("plain"), str(tmp_path), on_compile=pytest.fail) == ahead
    assert choose_kernels("plain", str(tmp_path)).library is not None


def test_a_damaged_library_is_said_and_not_loaded(tmp_path: Path) -> None:
    damaged = tmp_path / build(choose("plain")).name
    damaged.write_bytes(b"not a library")
    with pytest.raises(ConfigError, match=f"{damaged} cannot be loaded"):
        choose_kernels("plain", str(tmp_path))


def test_a_cache_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BuildError, match="cannot be compiled into the cache"):
        build(choose("plain"), str(tmp_path / "file" / "folder"))


def test_a_library_with_other_structs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class TwoRows(ctypes.Structure):
        _fields_ = (("rows", ctypes.c_int32),)

    monkeypatch.setattr(kernels, "NativeBatch", TwoRows)
    with pytest.raises(BuildError, match="has another TwoRows than this version"):
        kernels.Kernels(build(choose("plain")))


def test_two_builds_at_once_compile_once(tmp_path: Path) -> None:
    compilers = tmp_path / "compilers"
    script = tmp_path / "counting"  # writes the file that its last argument names, after a while
    script.write_text(
        f'#!/bin/sh\ncase "$*" in *--version*) exit;; esac\n'
        f'echo x >> {compilers}\nsleep 1\nfor last; do :; done\n: > "$last"\n'
    )
    script.chmod(0o755)
    program = "import sys; from shared.engine.native.build import *; build(choose('plain'), sys.argv[1])"
    command = [sys.executable, "-c", program, str(tmp_path / "kernels")]
    environment = {**os.environ, "CXX": str(script)}
    children = [subprocess.Popen(command, env=environment) for _ in range(2)]
    assert [child.wait() for child in children] == [0, 0]
    assert compilers.read_text().split() == ["x"]
