"""The shape of deployments of tests whose workers are of several ranks, over gloo on `cuda-on-cpu`.

    SEGUE_TEST_RANKS=2 python -m pytest tests/integration/faults        or `make ranked`, which names the folders

Each deployment of the cut model then has workers of so many ranks, and ends with a look at what each worker says of its
engine and at its processes; one that names its model or its device is as it is. The model's heads are filled up with
zeros until ranks can share them, so that it computes the same function, and answers are comparable with transformers'.

Plain torch keeps every number of a graph but attention's, so slots are bounded here where a test asks for no more. The
device keeps no bits: a row is rounded otherwise in another batch, and tests compare by `same`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
from pydantic import BaseModel

if TYPE_CHECKING:
    from torch import Tensor

    from tests.integration.deployments.deployment import LocalDeployment, RoleConfigs, RunningProcess

RANKS = int(os.environ.get("SEGUE_TEST_RANKS", "1"))  # of each worker
RANKED = RANKS > 1
FLAGS = ("--device", "cuda-on-cpu", "--dtype", "float32", "--threads", "1")
# A rank of a worker sets 1 GiB apart for graphs, and uses little of it.
BOUNDS = {"memoryBytes": 8 << 30, "contextLen": 8192, "maxRunningRequests": 16}
TOLERANCE = 1e-3  # of a logprob
MEETING_PORTS = 1 if RANKED else 0  # of each process of a worker, on loopback: gloo's
_ATTENTION = {
    "q_proj": ("heads", 0),
    "k_proj": ("kv_heads", 0),
    "v_proj": ("kv_heads", 0),
    "o_proj": ("heads", 1),
}


def followers_of(worker: int) -> list[int]:
    """Processes of the other ranks of a worker, rank 1 first."""
    children = Path(f"/proc/{worker}/task/{worker}/children").read_text().split()
    return sorted(map(int, children))


def flags_of_ranks(flags: tuple[str, ...]) -> tuple[str, ...]:
    """The flags of `segue up` for workers of several ranks, behind those of a test."""
    return (*flags, *FLAGS, "--prefill-gpus", str(RANKS), "--decode-gpus", str(RANKS))


def config_of_ranks(config: RoleConfigs | None) -> RoleConfigs:
    """The settings of roles, with bounds of memory where they have none."""
    given = config or {}
    return {**given, **{role: {**BOUNDS, **given.get(role, {})} for role in ("prefill", "decode")}}


def require_ranks(running: LocalDeployment) -> None:
    """All workers say that they are of so many ranks, and have as many processes."""
    workers = [process for process in running.processes() if process.role != "router"]
    assert workers
    for worker in workers:
        assert f", {RANKS} ranks" in _engine(worker)
        assert len(followers_of(worker.pid)) == RANKS - 1


def _engine(worker: RunningProcess) -> str:
    health = httpx2.get(f"http://127.0.0.1:{worker.admin_port}/readyz", timeout=10.0).json()
    return str(health["facts"]["engine"])


def widened(config: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    """The settings of a model with so many more key-value heads that ranks can share them evenly."""
    kv_heads = -(-config["num_key_value_heads"] // ranks) * ranks
    group = config["num_attention_heads"] // config["num_key_value_heads"]
    return {**config, "num_key_value_heads": kv_heads, "num_attention_heads": kv_heads * group}


def widen(weights: dict[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """The weights of a model with the heads of `config`: those that it had not are zeros, and add nothing."""
    from torch.nn.functional import pad

    sizes = {"heads": config["num_attention_heads"], "kv_heads": config["num_key_value_heads"]}
    found = {}
    for name, weight in weights.items():
        if projection := next((each for each in _ATTENTION if f".{each}." in name), None):
            heads, dim = _ATTENTION[projection]
            missing = sizes[heads] * config["head_dim"] - weight.shape[dim]
            weight = pad(weight, (0, missing) if dim else (0, 0, 0, missing))
        found[name] = weight
    return found


def same(found: Any, expected: Any) -> bool:
    """Whether both are equal; for workers of ranks up to the last digits of floats: their device keeps no bits."""
    if not RANKED:
        return bool(found == expected)
    if isinstance(found, BaseModel) and isinstance(expected, BaseModel):
        return same(found.model_dump(), expected.model_dump())
    if is_dataclass(found) and is_dataclass(expected):
        return same(vars(found), vars(expected))
    if isinstance(found, float) and isinstance(expected, float):
        return abs(found - expected) <= TOLERANCE
    if isinstance(found, Mapping) and isinstance(expected, Mapping):
        return found.keys() == expected.keys() and all(same(found[key], expected[key]) for key in found)
    if isinstance(found, list | tuple) and isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(same, found, expected))
    return bool(found == expected)
