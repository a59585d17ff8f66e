"""How followers end, and what rank 0 hears of it."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import threading
from pathlib import Path

import pytest
import torch

from shared.engine.config import EngineConfig
from shared.engine.parallel import meeting
from shared.engine.parallel.shares import Share
from shared.primitives.errors import RankError
from shared.worker.follower import FollowerJob, fail, follow
from shared.worker.rank_channel import FollowerEnd, ReportKind
from shared.worker.rank_group import LostRank, RankGroup
from tests.unit.engine.parallel.rank_followers import Follow, forked
from tests.unit.engine.tiny_models import FAMILIES, save_model
from tests.waiting import comes_true

CONFIG = EngineConfig(pages=8, page_size=16, slots=1, device="cuda-on-cpu")


class Watched:
    """A group of three ranks whose model is not there, or whose followers do something else."""

    def __init__(self, folder: Path, body: Follow) -> None:
        self.lost: list[LostRank] = []
        self.group = RankGroup(3, forked(3, folder, CONFIG, body))
        self.group.watch(self.lost.append)

    def first_lost(self) -> LostRank:
        assert comes_true(lambda: self.lost, 60.0)
        (lost,) = self.lost
        return lost

    def close(self) -> None:
        for process in self.group.processes:
            process.kill()
        self.group.close()


def _wait(*_: object) -> None:
    threading.Event().wait()


def _leave(job: FollowerJob, end: FollowerEnd) -> None:
    """Add up with the others; rank 2 leaves them and lives on."""
    collectives = meeting.meet(Path(job.meeting), Share(job.rank, job.ranks), on_gpus=False)
    assert collectives.sum(torch.ones(3)).tolist() == [3.0] * 3
    if job.rank == 2:
        torch.distributed.destroy_process_group()
        _wait()
    try:
        collectives.sum(torch.ones(3))
    except BaseException as error:
        fail(end, error)


def _babble(job: FollowerJob, end: FollowerEnd) -> None:
    if job.rank == 2:
        _wait()
    end.copied(7)  # which nobody asked for
    end.say(ReportKind.FAILED, "no more memory")
    os._exit(1)


def test_a_follower_that_cannot_load_says_why(tmp_path: Path) -> None:
    watched = Watched(tmp_path / "nothing", follow)
    lost = watched.first_lost()
    assert (lost.refused, lost.status) == (True, 1)
    assert str(tmp_path / "nothing") in lost.reason
    watched.close()


@pytest.mark.parametrize("rank", [1, 2])
def test_a_killed_follower_is_heard_of_once_and_by_its_signal(rank: int, tmp_path: Path) -> None:
    watched = Watched(tmp_path, _wait)
    os.kill(watched.group.processes[rank - 1].pid, signal.SIGKILL)
    lost = watched.first_lost()
    assert (lost.rank, lost.status, lost.refused) == (rank, -signal.SIGKILL, False)
    assert lost.reason == "it was ended by SIGKILL"
    watched.close()
    assert len(watched.lost) == 1


def test_ranks_meet_in_no_file_that_a_killed_rank_0_would_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    watched = Watched(tmp_path, _leave)
    together = meeting.meet(watched.group.meeting, Share(0, 3), on_gpus=False)
    assert together.sum(torch.ones(3)).tolist() == [3.0] * 3
    assert not list(tmp_path.iterdir()), "before anybody could remove it"
    watched.close()
    torch.distributed.destroy_process_group()


def test_an_error_of_rank_0_gives_way_to_a_follower_that_was_lost_before(tmp_path: Path) -> None:
    watched = Watched(tmp_path, _wait)
    watched.group.give_way(0.01)  # nobody was lost: rank 0 goes on to end
    watched.close()
    watched = Watched(tmp_path, _wait)
    gave_way = threading.Thread(target=watched.group.give_way, args=(60.0,), daemon=True)
    gave_way.start()
    watched.group.processes[0].kill()
    watched.first_lost()
    gave_way.join(0.2)
    assert gave_way.is_alive(), "whoever hears of the loss ends the process"
    watched.close()


def test_a_rank_that_misses_the_part_of_another_is_not_the_one_that_was_lost(tmp_path: Path) -> None:
    """It may end sooner than the one that it misses: whoever is named has to be the cause."""
    watched = Watched(tmp_path, _leave)
    together = meeting.meet(watched.group.meeting, Share(0, 3), on_gpus=False)
    assert together.sum(torch.ones(3)).tolist() == [3.0] * 3
    with pytest.raises(RankError, match="another rank has left an exchange"):
        together.sum(torch.ones(3))
    assert watched.group.processes[0].wait(30) == 1
    watched.group.processes[1].kill()
    lost = watched.first_lost()
    assert (lost.rank, lost.reason) == (2, "it was ended by SIGKILL")
    assert watched.group.end.sentences[0][0] is ReportKind.PEER_LOST
    watched.close()
    torch.distributed.destroy_process_group()


def test_a_follower_that_tells_nonsense_and_ends_is_heard_of(tmp_path: Path) -> None:
    """The watch is all that ends rank 0 then, so nothing that a follower tells may end the watch."""
    watched = Watched(tmp_path, _babble)
    lost = watched.first_lost()
    assert (lost.rank, lost.reason) == (1, "no more memory")
    watched.close()


def test_a_follower_whose_rank_0_has_ended_before_it_began_waits_for_nobody(tmp_path: Path) -> None:
    save_model(FAMILIES["mistral"], tmp_path)
    own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    own.close()
    memory = os.memfd_create("a test")
    with theirs:
        process = forked(2, tmp_path, CONFIG, follow)(1, memory, theirs.fileno(), memory)
    os.close(memory)
    try:
        assert process.wait(60) == 1
    finally:
        process.kill()


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (-9, "it was ended by SIGKILL"),
        (-40, "it was ended by signal 40"),
        (3, "it exited with status 3"),
        (None, "it has closed its socket, and its process still runs"),
    ],
)
def test_how_a_follower_ended_is_said_in_words(status: int | None, words: str) -> None:
    assert LostRank(1, status, refused=False, sentence="").reason == words
