"""How many prefill and decode processes `segue up` starts where nobody says so, and which GPU each gets.

    no GPU    1 + 1
    n GPUs    0 + n    decode processes compute the prompts, too: a copy of the weights on each GPU, and no KV travels

With `--tensor-parallel-size k` there are n / k of them, each with k GPUs.

A machine with GPUs is told in one line what was chosen. That has not been measured on GPUs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from shared.primitives.errors import ConfigError

DEVICES = Path("/dev")
VISIBLE = "CUDA_VISIBLE_DEVICES"


class Shape(NamedTuple):
    """Processes of each role."""

    prefill: int
    decode: int


def gpus_of(environ: Mapping[str, str], devices: Path = DEVICES) -> list[str]:
    """The GPUs that processes may use, as `CUDA_VISIBLE_DEVICES` names them; [] without NVIDIA's driver."""
    found = sorted(
        int(name[6:]) for path in devices.glob("nvidia*") if re.fullmatch(r"nvidia\d+", name := path.name)
    )
    if found and environ.get(VISIBLE) is not None:
        return [name.strip() for name in environ[VISIBLE].split(",") if name.strip() not in ("", "-1")]
    return [str(number) for number in found]


def shape_of(gpus: int, prefill: int | None, decode: int | None, *, whole: bool) -> Shape:
    """The shape for so many GPUs; numbers that were given stay. `whole`: decode processes compute prompts."""
    if prefill is None:
        prefill = 0 if gpus and whole else 1
    return Shape(prefill, decode if decode is not None else max(1, gpus - prefill))


def described(gpus: int, shape: Shape) -> str:
    """What was chosen for these GPUs, and how to change it."""
    if gpus == 1 and shape == (0, 1):
        return "one GPU: one process computes prompts and streams; --prefill 1 divides it"
    return (
        f"{gpus} GPU{'s' * (gpus > 1)}: {shape.prefill} prefill and {shape.decode} decode processes; "
        "--prefill and --decode change that"
    )


def gpu_of(gpus: list[str], number: int, each: int = 1) -> dict[str, str]:
    """The variable that gives the worker of this number GPUs of its own; {}: there are not several."""
    if each > 1:
        return {VISIBLE: ",".join(gpus[number * each : (number + 1) * each])} if gpus else {}
    return {VISIBLE: gpus[number % len(gpus)]} if len(gpus) > 1 else {}


def require_gpus(gpus: int, shape: Shape, each: int) -> None:
    """Raise ConfigError unless each decode worker gets so many GPUs of its own, 0 GPUs: on a CPU none is needed."""
    if each == 1:
        return
    if shape.prefill:
        raise ConfigError(
            f"--tensor-parallel-size {each} needs --prefill 0: pages of several GPUs cannot be read by another worker "
            "yet, so decode workers compute their prompts"
        )
    if 0 < gpus < each * shape.decode:
        raise ConfigError(
            f"--decode {shape.decode} and --tensor-parallel-size {each} need {each * shape.decode} GPUs, there are "
            f"{gpus}: lower one of them"
        )
