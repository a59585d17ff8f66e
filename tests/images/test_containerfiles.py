"""What every image promises: a plain user, nothing to build with, and only locked packages."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

import pytest

from tests.images.containerfiles import (
    CONTEXT,
    FILES,
    IMAGES,
    ROOT,
    TARGETS,
    Containerfile,
    containerfile,
)

INSTRUCTIONS = {"ARG", "CMD", "COPY", "ENV", "LABEL", "RUN", "USER", "WORKDIR"}
LABELS = {f"org.opencontainers.image.{name}" for name in ("title", "description", "version", "licenses")}
LOCKS = {"router": "router.lock", "cpu": "worker-cpu.lock", "cuda": "worker-cuda.lock"}
COMPILERS = {"cuda": "cuda-kernels.lock"}  # what is installed to compile with, and left behind
TO_COMPILE_WITH = {"g++", "gcc", "make", "build-essential", "python3-dev"}
PUBLIC_HOSTS = {"deb.debian.org", "security.debian.org", "download.pytorch.org", "api.osv.dev"}
PUBLIC_HOSTS |= {"google.github.io", "ossf.github.io"}  # of documents
every_file = pytest.mark.parametrize("file", FILES)
every_target = pytest.mark.parametrize("target", TARGETS)


def file_of(target: str) -> Containerfile:
    """The file that makes a target."""
    return containerfile(TARGETS[target])


@every_file
def test_there_are_only_stages_of_known_instructions(file: str) -> None:
    stages = containerfile(file).stages
    assert stages
    assert {name for stage in stages.values() for name, _ in stage.instructions} <= INSTRUCTIONS


@every_file
def test_the_last_stage_is_an_image(file: str) -> None:
    last = list(containerfile(file).stages)[-1]
    assert TARGETS.get(last) == file  # what is built without --target


@every_target
def test_the_user_is_a_number_other_than_root(target: str) -> None:
    assert file_of(target).stages[target].values("USER") == ["10001:10001"]


@every_target
def test_the_labels_say_what_it_is(target: str) -> None:
    stage = file_of(target).stages[target]
    labels = stage.labels()
    assert labels.keys() >= LABELS
    assert all(labels.values())
    assert labels["org.opencontainers.image.version"] == "${VERSION}"
    order = [name if name != "ARG" else value.partition("=")[0] for name, value in stage.instructions]
    assert "VERSION" in order[: order.index("LABEL")]


@every_file
def test_every_base_is_an_argument_with_a_pinned_public_default(file: str) -> None:
    read = containerfile(file)
    known = {"scratch"}
    for stage in read.stages.values():
        if stage.base not in known:
            argument = re.fullmatch(r"\$\{(\w+)\}", stage.base)
            assert argument, f"{stage.name} is FROM {stage.base}"
            default = read.arguments[argument[1]]
            assert re.fullmatch(r"docker\.io/[\w/-]+:(?!latest)[\w.-]+@sha256:[0-9a-f]{64}", default), default
        known.add(stage.name)


@every_file
def test_what_is_copied_comes_from_an_earlier_stage(file: str) -> None:
    earlier = {CONTEXT}
    for stage in containerfile(file).stages.values():
        assert {copy.source for copy in stage.copies()} <= earlier, stage.name
        earlier.add(stage.name)


@pytest.mark.parametrize("file", ["router", "worker"])
def test_what_is_copied_from_the_checkout_is_there_and_not_ignored(file: str) -> None:
    lines = (IMAGES / f"{file}.Containerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    seen = [line.removeprefix("!") for line in lines if line.startswith("!")]
    paths = [
        path
        for stage in containerfile(file).stages.values()
        for copy in stage.copies()
        if copy.source == CONTEXT
        for path in copy.paths
    ]
    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == []
    unseen = [
        path for path in paths if not any(fnmatch(path, rule) or path.startswith(f"{rule}/") for rule in seen)
    ]
    assert unseen == []


@every_target
def test_apt_brings_python_into_an_image_and_nothing_else(target: str) -> None:
    file = file_of(target)
    installed = {name for stage in file.lineage(target) for name in stage.apt_packages()}
    assert installed == (set() if target == "model" else {"python3"})


@every_target
def test_apt_leaves_no_lists_in_an_image(target: str) -> None:
    file = file_of(target)
    for stage in file.lineage(target):
        for line in stage.values("RUN"):
            assert ("apt-get" in line) == ("rm -rf /var/lib/apt/lists/* /var/cache/apt/*" in line), line


@pytest.mark.parametrize("target", LOCKS)
def test_pip_is_taken_out_of_what_an_image_copies(target: str) -> None:
    file = file_of(target)
    copied = 0
    for copy in (copy for part in file.lineage(target) for copy in part.copies()):
        source = file.lineage(copy.source)
        for environment in (path for stage in source for path in stage.environments()):
            if any(PurePosixPath(environment).is_relative_to(path) for path in copy.paths):
                copied += 1
                commands = [command for stage in source for command in stage.pip("uninstall")]
                removals = [command for command in commands if command[0] == f"{environment}/bin/pip"]
                assert any("pip" in command[2:] for command in removals), copy.source
    assert copied == 1
    assert [command for part in file.lineage(target) for command in part.pip("install")] == []


@pytest.mark.parametrize("target", LOCKS)
def test_an_image_installs_its_own_lock(target: str) -> None:
    file = file_of(target)
    commands = [command for stage in file.involved(target).values() for command in stage.pip("install")]
    locks = {command[command.index("-r") + 1] for command in commands if "-r" in command}
    compilers = {f"/build/{COMPILERS[target]}"} if target in COMPILERS else set()
    assert locks == {"/build/build.lock", f"/build/{LOCKS[target]}"} | compilers


@pytest.mark.parametrize("target", LOCKS)
def test_compilers_are_left_behind_with_all_that_they_lie_in(target: str) -> None:
    file = file_of(target)
    for copy in (copy for part in file.lineage(target) for copy in part.copies()):
        source = file.lineage(copy.source)
        locks = {command[-1] for stage in source for command in stage.pip("install")}
        debian = {name for stage in source for name in stage.apt_packages()}
        if debian & TO_COMPILE_WITH or f"/build/{COMPILERS.get(target)}" in locks:
            [made] = [words for words in file.stages[copy.source].commands() if "-m" in words]
            assert copy.paths == [made[made.index("-m") + 2]], copy.source


def test_the_cuda_image_compiles_nothing_and_finds_what_was_compiled() -> None:
    file = containerfile("worker")
    variables = file.stages["cuda"].variables()
    assert variables["FLASHINFER_DISABLE_JIT"] == variables["FLASHINFER_USE_CUDA_NORM"] == "1"
    [compiled] = [
        path for copy in file.stages["cuda"].copies() if copy.source == "cuda-kernels" for path in copy.paths
    ]
    links = [command for command in file.stages["cuda-packages"].commands() if command[0] == "ln"]
    assert links == [["ln", "-s", compiled, "flashinfer/data/aot"]]


@every_file
def test_pip_installs_what_is_locked_by_hash_or_our_own_code(file: str) -> None:
    commands = [command for stage in containerfile(file).stages.values() for command in stage.pip("install")]
    assert bool(commands) == (file != "model")
    for command in commands:
        options = set(command)
        if "-r" in command:
            assert options >= {"--require-hashes", "--no-cache-dir", "--no-deps", "--only-binary"}, command
        else:
            assert options >= {"--no-index", "--no-deps", "--no-build-isolation"}, command
            assert command[-1] == "/build/segue"


@pytest.mark.parametrize("path", sorted(filter(Path.is_file, IMAGES.iterdir())), ids=lambda path: path.name)
def test_only_public_addresses_are_named(path: PurePosixPath) -> None:
    text = (IMAGES / path.name).read_text(encoding="utf-8")
    loopback = {"{}:{}"}  # filled in
    assert set(re.findall(r"\w+://([^/\s\"']+)", text)) - loopback <= PUBLIC_HOSTS


COMPILING = re.compile(r"python3 -m (shared\.[\w.]+)")


@pytest.mark.parametrize("stage", ["kernels", "cuda-kernels"])
def test_what_compiles_kernels_has_the_files_that_it_imports(stage: str, tmp_path: Path) -> None:
    """These stages copy single files, so that a change elsewhere does not compile everything anew."""
    instructions = containerfile("worker").stages[stage]
    for copied in instructions.values("COPY"):
        *sources, target = copied.split()
        if target.startswith("/build/shared"):
            for source in sources:
                at = tmp_path / PurePosixPath(target).relative_to("/build")
                if (ROOT / source).is_dir():
                    shutil.copytree(ROOT / source, at)
                else:
                    at.mkdir(parents=True, exist_ok=True)
                    shutil.copy(ROOT / source, at)
    (module,) = (found[1] for run in instructions.values("RUN") if (found := COMPILING.search(run)))
    subprocess.run([sys.executable, "-c", f"import {module}"], cwd=tmp_path, check=True)
