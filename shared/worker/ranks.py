"""The other ranks of a worker: when they may be, how they start, and what their end does.

Pages of several ranks cannot be read by other workers yet, nor can such a worker read. So it computes its prompts
itself, and its KV format is its own: no router pairs it, and a stream that has to leave is computed again elsewhere.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec
import structlog

from shared.engine.config import EngineConfig
from shared.engine.parts import Followers
from shared.primitives.errors import ConfigError
from shared.process.logs import flush
from shared.process.role_main import exit_now
from shared.wire.messages import Role
from shared.worker.follower import FollowerJob
from shared.worker.rank_group import LostRank, RankGroup, start_processes
from shared.worker.worker_config import WorkerConfig

GIVE_WAY_SECONDS = 1.0  # for the watch, when rank 0 fails: the rank that was lost before is the reason

log = structlog.get_logger(__name__)


def refuse(config: WorkerConfig, role: Role, *, computes_prompts: bool) -> None:
    """Raise `ConfigError` for several ranks where they do not work."""
    ranks = config.tensor_parallel_size
    if ranks == 1:
        return
    if config.device not in ("cuda", "cuda-on-cpu"):
        raise ConfigError(
            f"tensor_parallel_size {ranks} needs device cuda, or cuda-on-cpu to try it out: device {config.device} has "
            "one rank"
        )
    if role == "prefill" or not computes_prompts:
        raise ConfigError(
            f"tensor_parallel_size {ranks} is for decode workers with local_tokens_max above 0, and without prefill "
            "workers: pages of several GPUs cannot be read by another worker yet. Set it to 1 here"
        )


def kv_format(own: str, config: WorkerConfig, uid: str) -> str:
    """The format of a worker's pages: of several ranks one that no other worker has."""
    ranks = config.tensor_parallel_size
    return own if ranks == 1 else f"{own}, on {ranks} ranks of {uid}"


@contextmanager
def running(config: WorkerConfig, role: Role, asked: EngineConfig) -> Iterator[Followers | None]:
    """Start them, and end them at last; None: there are none. An error of this process gives way to theirs."""
    if (ranks := config.tensor_parallel_size) == 1:
        yield None
        return

    def job(rank: int, meeting: Path) -> bytes:
        return msgspec.json.encode(FollowerJob(rank, ranks, config.model, str(meeting), asked))

    group = RankGroup(ranks, start_processes("shared.worker.follower", job))
    group.watch(partial(_end, group, role))
    try:
        yield Followers(ranks, group.meeting, group.end)
    except BaseException:
        group.give_way(GIVE_WAY_SECONDS)
        group.remove_meeting()
        raise
    group.close()


def forget_meeting(followers: Followers | None) -> None:
    """Remove the folder where ranks met, if there are any, at an end that `running` does not see."""
    if followers is not None:
        shutil.rmtree(followers.meeting, ignore_errors=True)


def _end(group: RankGroup, role: Role, lost: LostRank) -> None:
    """End this process, whatever its other threads wait for: links end with it, so routers learn of it at once."""
    try:
        group.remove_meeting()
        who = f"rank {lost.rank} of {group.ranks}"
        if lost.refused:
            flush()
            sys.stderr.write(f"segue {role}: {who}: {' '.join(lost.reason.split())}\n")
        else:
            log.critical("rank.lost", rank=lost.rank, ranks=group.ranks, reason=lost.reason)
    finally:  # also where nobody reads the log any more
        exit_now(status=1)
