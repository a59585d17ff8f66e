"""How many prefill and decode processes `segue up` starts where nobody says so, and which GPU each gets.

    no GPU    1 + 1
    n GPUs    0 + n    decode processes compute the prompts, too: a copy of the weights on each GPU, and no KV travels

A machine with GPUs is told in one line what was chosen. That has not been measured on GPUs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

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


def gpu_of(gpus: list[str], number: int) -> dict[str, str]:
    """The variable that gives the worker of this number a GPU of its own; {}: there are not several."""
    return {VISIBLE: gpus[number % len(gpus)]} if len(gpus) > 1 else {}
