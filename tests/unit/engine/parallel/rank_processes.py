"""Ranks of a model as processes of this machine, which do what a test tells them, over gloo on loopback.

They are started once, by a server that has imported torch already, and serve all tests of this folder: a job names a
function of a module, and the first ranks run it together.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import FileStore

from shared.engine.parallel.collectives import Collectives, GlooCollectives

RANKS = 4
_SIZES = (2, 4)
_SECONDS_MAX = 180.0
_PRELOADED = ["torch", "tests.unit.engine.parallel.rank_jobs"]

Job = Callable[..., Any]  # of collectives and what it is given


class RankProcesses:
    """Four ranks, which also serve as two."""

    def __init__(self, folder: Path) -> None:
        """`folder`: where they meet."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(RANKS):
            own, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, folder / "store", theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(own)
            self._processes.append(process)

    def run(self, ranks: int, job: Job, *args: Any) -> list[Any]:
        """What the job gives on each of so many ranks."""
        pipes = self._pipes[:ranks]
        for pipe in pipes:
            pipe.send((ranks, job, args))
        found = []
        for rank, pipe in enumerate(pipes):
            assert pipe.poll(_SECONDS_MAX), f"rank {rank} of {ranks} does not answer"
            done, result = pipe.recv()
            assert done, f"rank {rank} of {ranks}: {result}"
            found.append(result)
        return found

    def close(self) -> None:
        """End them."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(10)
            process.kill()
            process.join()
            process.close()


def _serve(rank: int, store: Path, pipe: Connection) -> None:
    """Of a rank: do what comes until the pipe ends."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=FileStore(str(store), RANKS), rank=rank, world_size=RANKS)
    groups = {size: dist.new_group(list(range(size))) for size in _SIZES}
    while True:
        try:
            ranks, job, args = pipe.recv()
        except EOFError:
            os._exit(0)
        collectives: Collectives = GlooCollectives(groups[ranks])
        try:
            pipe.send((True, job(collectives, *args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
