"""`python -m tests.gpu` on a bare machine: nothing is compiled, installed or waited for in the middle of a part."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shared.engine.checkpoint.dtypes import dtypes_on_cuda
from shared.engine.checkpoint.model_config import ModelConfig, read_model_config
from tests.benchmarks.gpu import attention
from tests.benchmarks.gpu.offline import model_named
from tests.gpu import __main__ as parts
from tests.gpu.small_device import FAMILY
from tests.tidy.source_files import ROOT
from tests.unit.engine.tiny_models import GPU_FAMILIES, tiny_model

COMPILER = "shared.engine.cuda.aot"
DEPLOYMENT = "tests.gpu.deployment"
BESIDE_THE_LOCK = {  # what runs tests, and what they need
    "pytest",
    "pytest-timeout",
    "hypothesis",
    "pluggy",
    "iniconfig",
    "sortedcontainers",
    "attrs",
}
CLIENT = {"openai", "jiter", "distro", "sniffio"}
Needs = set[tuple[str, int]]  # dtype and head_dim


def dtype_of(config: ModelConfig) -> tuple[str, int]:
    chosen = dtypes_on_cuda("auto", "auto", stored=torch.bfloat16, capability=(9, 0))
    return str(chosen.weights).removeprefix("torch."), config.head_dim


def heads_of(families: list[str], folder: Path) -> set[int]:
    found = set()
    for number, family in enumerate(families):
        (folder / str(number)).mkdir()
        tiny_model(family, folder / str(number))
        found.add(read_model_config(folder / str(number)).head_dim)
    return found


def needs_of(part: parts.Part, folder: Path) -> Needs:
    """The attention that a part runs FlashInfer's kernels for. A new part wants a line here."""
    match part.name.split():
        case ["families", "in", dtype]:
            return {(dtype, head_dim) for head_dim in heads_of(list(GPU_FAMILIES), folder)}
        case ["experts"]:
            return {("bfloat16", head_dim) for head_dim in (64, 128)}
        case ["device"]:
            return {("bfloat16", head_dim) for head_dim in heads_of([FAMILY], folder)}
        case ["offline", model, _]:
            return {dtype_of(model_named(model))}
        case ["deployment"]:
            return {dtype_of(model_named("0.6B"))}
        case ["attention", "by", "layout"]:
            return {dtype_of(model_named(model)) for model, _, _ in attention.CASES}
        case (
            ["compile", *_]
            | ["kernels"]
            | ["filters"]
            | ["fp8"]
            | ["int4"]
            | ["VRAM", "between", "processes"]
        ):
            return set()
    raise AssertionError(f"{part.name}: say what it needs")


def compiled_by(part: parts.Part) -> Needs:
    """What a part compiles ahead; windows and all that is not attention are always among it."""
    if part.module != COMPILER:
        return set()
    dtypes, heads = (re.search(rf"--{flag} ([^-]*)", " ".join(part.flags)) for flag in ("dtype", "head-dim"))
    assert dtypes
    assert heads
    return {(dtype, int(head_dim)) for dtype in dtypes[1].split() for head_dim in heads[1].split()}


def test_what_a_part_needs_of_flashinfer_was_compiled_before(tmp_path: Path) -> None:
    """The modules of a dtype and a head_dim are those of `aot.modules` (`test_ahead_of_time`)."""
    there: Needs = set()
    for number, part in enumerate(parts.PARTS):
        (tmp_path / str(number)).mkdir()
        assert needs_of(part, tmp_path / str(number)) <= there | compiled_by(part), part.name
        there |= compiled_by(part)
    assert parts.PARTS[0].module == COMPILER


def test_a_part_fits_a_command_and_no_test_ends_or_hangs_the_others() -> None:
    assert len({part.name for part in parts.PARTS}) == len(parts.PARTS)
    for part in parts.PARTS:
        assert part.minutes <= parts.PART_MINUTES_MAX
        if part.module == "pytest":
            assert "-x" not in part.flags
            assert "--timeout=120" in part.flags
            assert part.flags[-2] == "-k"
            assert part.flags[-1].endswith("not cpu")  # there it costs minutes of a GPU
    names = [part.name for part in parts.PARTS]
    assert names.index("kernels") < names.index("filters") < names.index("families in bfloat16")


REFUSING = """
import importlib.abc, importlib.metadata, re, sys
allowed = set(sys.argv[1].split(","))
plain = lambda name: re.sub("[-_.]+", "-", name).lower()
refused = {
    name
    for name, owners in importlib.metadata.packages_distributions().items()
    if not {plain(owner) for owner in owners} & (allowed | {"segue", "segue-llm"})
}

class Refusing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in refused:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refusing())
assert "jsonschema" in refused
for name in sys.argv[2:]:
    __import__(name)
"""


def locked(name: str) -> set[str]:
    lock = (ROOT / "images" / f"{name}.lock").read_text(encoding="utf-8")
    return set(re.findall(r"^([A-Za-z0-9._-]+)==", lock, re.MULTILINE))


def test_every_part_imports_with_the_workers_packages_and_those_of_tests_alone() -> None:
    modules = [f"tests.gpu.{path.stem}" for path in sorted((ROOT / "tests" / "gpu").glob("test_*.py"))]
    modules += sorted({part.module for part in parts.PARTS} - {DEPLOYMENT})
    assert_importable(locked("worker-cuda") | BESIDE_THE_LOCK, modules)


def test_the_deployment_imports_with_the_routers_packages_and_a_client_as_well() -> None:
    assert_importable(locked("worker-cuda") | locked("router") | BESIDE_THE_LOCK | CLIENT, [DEPLOYMENT])


def assert_importable(packages: set[str], modules: list[str]) -> None:
    names = ",".join(sorted(name.lower() for name in packages))
    child = subprocess.run(
        [sys.executable, "-c", REFUSING, names, *modules],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr


@pytest.mark.timeout(300)
@pytest.mark.long
def test_figures_are_in_the_report_while_a_part_runs_and_parts_can_be_had_one_by_one(tmp_path: Path) -> None:
    report = tmp_path / "report"
    command = [sys.executable, "-m", "tests.gpu", "--rehearse", "--report", str(report)]
    for part in ("attention by layout", "compile"):
        subprocess.run([*command, "--part", part], cwd=ROOT, check=True, capture_output=True)
    text = report.read_text(encoding="utf-8")
    assert [line for line in text.splitlines() if line.startswith("== ")] == [
        "== attention by layout",
        "== compile",
    ]
    assert "ratio" in text
    assert "-- exit 0" in text

    late = parts.Part("late", 0.1, "tests.unit.benchmarks.one_figure_then_none")
    with report.open("w", encoding="utf-8") as written:
        parts.run(late, written, rehearse=False)
    assert "1.0 ms" in report.read_text(encoding="utf-8")
    assert "ended after 0.1 minutes" in report.read_text(encoding="utf-8")
