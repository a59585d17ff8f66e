"""How followers end, and what rank 0 hears of it."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from shared.engine.config import EngineConfig
from shared.ranks.rank_group import LostRank, RankGroup
from shared.worker.follower import follow
from tests.unit.engine.parallel.rank_followers import Follow, forked
from tests.waiting import comes_true

CONFIG = EngineConfig(pages=8, page_size=16, slots=1, device="cuda-on-cpu")


class Watched:
    """A group of three ranks whose model is not there, or whose followers wait for ever."""

    def __init__(self, folder: Path, *, loads: bool) -> None:
        self.lost: list[LostRank] = []
        body: Follow = follow
        if not loads:
            body = _wait
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


def test_a_follower_that_cannot_load_says_why(tmp_path: Path) -> None:
    watched = Watched(tmp_path / "nothing", loads=True)
    lost = watched.first_lost()
    assert (lost.refused, lost.status) == (True, 1)
    assert str(tmp_path / "nothing") in lost.reason
    watched.close()


@pytest.mark.parametrize("rank", [1, 2])
def test_a_killed_follower_is_heard_of_once_and_by_its_signal(rank: int, tmp_path: Path) -> None:
    watched = Watched(tmp_path, loads=False)
    os.kill(watched.group.processes[rank - 1].pid, signal.SIGKILL)
    lost = watched.first_lost()
    assert (lost.rank, lost.status, lost.refused) == (rank, -signal.SIGKILL, False)
    assert lost.reason == "it was ended by SIGKILL"
    watched.close()
    assert len(watched.lost) == 1
    assert not watched.group.meeting.exists()


def test_an_error_of_rank_0_gives_way_to_a_follower_that_was_lost_before(tmp_path: Path) -> None:
    watched = Watched(tmp_path, loads=False)
    watched.group.give_way(0.01)  # nobody was lost: rank 0 goes on to end
    watched.close()
    watched = Watched(tmp_path, loads=False)
    gave_way = threading.Thread(target=watched.group.give_way, args=(60.0,), daemon=True)
    gave_way.start()
    watched.group.processes[0].kill()
    watched.first_lost()
    gave_way.join(0.2)
    assert gave_way.is_alive(), "whoever hears of the loss ends the process"
    watched.close()
