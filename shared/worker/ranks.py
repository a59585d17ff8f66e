"""The other ranks of a worker: when they may be, how they start, offer their pages, and what their end does."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import structlog

from shared.engine.config import EngineConfig
from shared.engine.parts import Followers
from shared.links.keys import LinkKeys
from shared.primitives.errors import ConfigError
from shared.process.logs import flush
from shared.process.role_main import exit_now
from shared.transfer.grants import Grants
from shared.transfer.memory import PageMemory
from shared.transfer.offer import Offer
from shared.transfer.ranks.commands import OfferPages, TablePlace
from shared.transfer.ranks.shared_leases import SharedLeases, WrittenGrants
from shared.transfer.ranks.told_rank import ToldRank
from shared.transfer.transports import KvNetwork, open_offer
from shared.wire.messages import Role
from shared.worker.follower import FollowerJob
from shared.worker.rank_channel import LeaderEnd
from shared.worker.rank_group import LostRank, RankGroup, start_processes
from shared.worker.worker_config import WorkerConfig

GIVE_WAY_SECONDS = 1.0  # for the watch, when rank 0 fails: the rank that was lost before is the reason

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RunningRanks:
    """The other ranks, for the engine and for the transfer."""

    followers: Followers
    port: LeaderEnd

    def offer(self, transfer: TransferParts) -> tuple[Offer, tuple[ToldRank, ...]]:
        """Offer the pages of all ranks: rank 0's, and what the others are told to. `TransferError`: one cannot.

        By TLS each rank is asked for its pages, so all of them see the leases; by NIXL nobody is asked.
        """
        leases, pages_max = transfer.leases, transfer.pages.pages + transfer.pages.known_pages
        offset, memory = self.port.share_memory(SharedLeases.bytes_for(leases, pages_max))
        grants = WrittenGrants(SharedLeases(memory, leases, pages_max))
        uid, epoch = transfer.identity
        command = OfferPages(
            uid, epoch, transfer.network, transfer.keys, TablePlace(offset, leases, pages_max)
        )
        told = tuple(ToldRank(self.port, rank) for rank in range(1, self.followers.ranks))
        for each in told:
            each.ask_offer(command)
        return transfer.own_offer(grants), told


@dataclass(frozen=True, slots=True)
class TransferParts:
    """What a worker's pages are offered with."""

    network: KvNetwork
    keys: LinkKeys
    identity: tuple[str, int]  # uid, epoch
    pages: PageMemory  # of rank 0
    leases: int

    def own_offer(self, grants: Grants | None = None) -> Offer:
        """Rank 0's. `TransferError` in one sentence when it cannot be had."""
        return open_offer(self.network, self.keys, self.identity, self.pages, self.leases, grants=grants)


def refuse(config: WorkerConfig) -> None:
    """Raise `ConfigError` for several ranks where they do not work."""
    ranks = config.tensor_parallel_size
    if ranks > 1 and config.device not in ("cuda", "cuda-on-cpu"):
        raise ConfigError(
            f"tensor_parallel_size {ranks} needs device cuda, or cuda-on-cpu to try it out: device {config.device} has "
            "one rank"
        )


@contextmanager
def running(config: WorkerConfig, role: Role, asked: EngineConfig) -> Iterator[RunningRanks | None]:
    """Start them, and end them at last; None: there are none. An error of this process gives way to theirs."""
    if (ranks := config.tensor_parallel_size) == 1:
        yield None
        return

    def job(rank: int, meeting: Path) -> bytes:
        return msgspec.json.encode(FollowerJob(rank, ranks, config.model, str(meeting), asked))

    group = RankGroup(ranks, start_processes("shared.worker.follower", job))
    group.watch(partial(_end, group, role))
    try:
        yield RunningRanks(Followers(ranks, group.meeting, group.end), group.end)
    except BaseException:
        group.give_way(GIVE_WAY_SECONDS)
        raise
    group.close()


def _end(group: RankGroup, role: Role, lost: LostRank) -> None:
    """End this process, whatever its other threads wait for: links end with it, so routers learn of it at once."""
    try:
        who = f"rank {lost.rank} of {group.ranks}"
        if lost.refused:
            flush()
            sys.stderr.write(f"segue {role}: {who}: {' '.join(lost.reason.split())}\n")
        else:
            log.critical("rank.lost", rank=lost.rank, ranks=group.ranks, reason=lost.reason)
    finally:  # also where nobody reads the log any more
        exit_now(status=1)
