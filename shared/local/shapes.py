"""How many prefill and decode processes `segue up` starts where nobody says so, and which GPU each gets.

    no GPU    1 + 1
    n GPUs    0 + n    decode processes compute the prompts, too: a copy of the weights on each GPU, and no KV travels

With `--tensor-parallel-size k`, or `--decode-gpus k`, there are n / k of them, each with k GPUs.

A machine with GPUs is told in one line what was chosen. That has not been measured on GPUs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib import metadata
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from shared.primitives.errors import ConfigError

DEVICES = Path("/dev")
WSL_DRIVER = Path("/usr/lib/wsl/lib/libcuda.so.1")  # Windows' own; /dev has no node for each of its GPUs
VISIBLE = "CUDA_VISIBLE_DEVICES"


class Shape(NamedTuple):
    """Processes of each role."""

    prefill: int
    decode: int


ONE_GPU_EACH = Shape(1, 1)


def has_driver(devices: Path = DEVICES, wsl_driver: Path = WSL_DRIVER) -> bool:
    """Whether NVIDIA's driver is loaded, or that of the Windows around a WSL is there."""
    return (devices / "nvidiactl").exists() or wsl_driver.exists()


def gpus_of(environ: Mapping[str, str], devices: Path = DEVICES, wsl_driver: Path = WSL_DRIVER) -> list[str]:
    """The GPUs that processes may use, as `CUDA_VISIBLE_DEVICES` names them; [] without NVIDIA's driver.

    In a WSL the first one, unless that variable names others.
    """
    found = sorted(
        int(name[6:]) for path in devices.glob("nvidia*") if re.fullmatch(r"nvidia\d+", name := path.name)
    )
    if not found and wsl_driver.exists():
        found = [0]
    if found and environ.get(VISIBLE) is not None:
        return [name.strip() for name in environ[VISIBLE].split(",") if name.strip() not in ("", "-1")]
    return [str(number) for number in found]


def built_for_cuda() -> bool:
    """Whether the torch that is installed is: its file says so, and to load it takes a second. True: nothing says."""
    try:
        file = metadata.distribution("torch").locate_file("torch/version.py")
        return names_cuda(Path(str(file)).read_text(encoding="utf-8"))
    except (metadata.PackageNotFoundError, OSError):
        return True


def names_cuda(version_file: str) -> bool:
    """Whether this text of torch/version.py names a version of CUDA, and not None."""
    return re.search(r"^cuda\b[^=]*= *['\"]", version_file, re.MULTILINE) is not None


def gpus_to_use(device: str, found: list[str], *, with_cuda: bool) -> tuple[list[str], str]:
    """Return the GPUs on which workers with this `device` compute, and why none where that is a surprise."""
    if device in ("cpu", "cuda-on-cpu"):
        return [], ""
    if device == "auto" and found and not with_cuda:
        return [], (
            f"the CPU computes, not the GPU{'s' * (len(found) > 1)}: the torch that is installed is built without "
            "CUDA; segue-llm[cuda] without the index of builds for CPUs brings the other (in a checkout: "
            "pipx install '.[cuda]')"
        )
    return found, ""


def shape_of(
    gpus: int, prefill: int | None, decode: int | None, *, whole: bool, each: Shape = ONE_GPU_EACH
) -> Shape:
    """The shape for so many GPUs; numbers that were given stay. `whole`: decode processes compute prompts."""
    if prefill is None:
        prefill = 0 if gpus and whole else 1
    left = gpus - prefill * each.prefill
    return Shape(prefill, decode if decode is not None else max(1, left // each.decode))


def described(gpus: int, shape: Shape) -> str:
    """What was chosen for these GPUs, and how to change it."""
    if gpus == 1 and shape == (0, 1):
        return "one GPU: one process computes prompts and streams; --prefill 1 divides it"
    return (
        f"{gpus} GPU{'s' * (gpus > 1)}: {shape.prefill} prefill and {shape.decode} decode processes; "
        "--prefill and --decode change that"
    )


def gpus_for(gpus: list[str], sizes: Sequence[int]) -> list[dict[str, str]]:
    """For workers of so many GPUs each the variable that gives them their own; {}: there are not several."""
    if max(sizes) == 1:
        return [{VISIBLE: gpus[at % len(gpus)]} if len(gpus) > 1 else {} for at in range(len(sizes))]
    ends = list(accumulate(sizes))
    own = [gpus[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    return [{VISIBLE: ",".join(names)} if names else {} for names in own]


def require_gpus(gpus: int, shape: Shape, each: Shape) -> None:
    """Raise ConfigError unless each worker of several GPUs gets its own; 0 GPUs: on a CPU none is needed."""
    needed = shape.prefill * each.prefill + shape.decode * each.decode
    if max(each) > 1 and 0 < gpus < needed:
        raise ConfigError(
            f"--prefill {shape.prefill} with {each.prefill} GPUs each and --decode {shape.decode} with {each.decode} "
            f"each need {needed} GPUs, there are {gpus}: lower one of them"
        )
