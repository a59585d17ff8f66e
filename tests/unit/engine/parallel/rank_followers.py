"""The other ranks of a device that a test drives: processes forked by a server that has imported torch already."""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from multiprocessing.reduction import DupFd
from pathlib import Path
from queue import Queue
from subprocess import TimeoutExpired
from typing import Any

import msgspec
import torch

from shared.engine.config import EngineConfig
from shared.engine.parts import Followers
from shared.worker.follower import FollowerJob, follow
from shared.worker.rank_channel import FollowerEnd
from shared.worker.rank_group import FollowerProcess, LostRank, RankGroup, Start, meeting_at

_CONTEXT = multiprocessing.get_context("forkserver")
_PRELOADED = ["torch", "shared.worker.follower", "tests.unit.engine.parallel.rank_jobs"]

Follow = Callable[..., Any]  # of a job and an end; does not return


class ForkedFollower:
    """See `FollowerProcess`."""

    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process
        assert process.pid is not None
        self.pid = process.pid

    def wait(self, timeout: float | None = None) -> int:
        """See `FollowerProcess`."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutExpired("follower", timeout or 0.0)
        return self._process.exitcode

    def kill(self) -> None:
        """See `FollowerProcess`."""
        self._process.kill()


def forked(ranks: int, folder: Path, config: EngineConfig, body: Follow) -> Start:
    """Followers of this model, which do what `body` says."""
    _CONTEXT.set_forkserver_preload(_PRELOADED)

    def start(rank: int, met: int, of_socket: int, memory: int) -> FollowerProcess:
        job = FollowerJob(rank, ranks, str(folder), "", config)
        own, theirs = _CONTEXT.Pipe(duplex=False)
        given = (body, job, DupFd(met), DupFd(of_socket), DupFd(memory), theirs)
        process = _CONTEXT.Process(target=_follow, args=given, daemon=True)
        process.start()
        theirs.close()
        with own:  # its descriptors are copied here until it has them
            assert own.recv() == "begun"
        return ForkedFollower(process)

    return start


def _follow(body: Follow, job: FollowerJob, met: Any, of_socket: Any, memory: Any, begun: Connection) -> None:
    torch.set_num_threads(1)
    end = FollowerEnd(socket.socket(fileno=of_socket.detach()), memory.detach())
    job = msgspec.structs.replace(job, meeting=str(meeting_at(met.detach())))
    with begun:
        begun.send("begun")
    body(job, end)


class TestRanks:
    """Ranks 1, 2 … of a model, while this process is rank 0. One such group at a time."""

    __test__ = False

    def __init__(self, ranks: int, folder: Path, config: EngineConfig, body: Follow = follow) -> None:
        self.lost: Queue[LostRank] = Queue()
        self.group = RankGroup(ranks, forked(ranks, folder, config, body))
        self.group.watch(self.lost.put)
        self.followers = Followers(ranks, self.group.meeting, self.group.end)

    def close(self) -> None:
        """End them."""
        self.group.close()
        torch.distributed.destroy_process_group()
