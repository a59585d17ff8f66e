"""The followers of a worker: their processes, and the watch over them.

One process a GPU. Followers are started before anything heavy is done, and inherit three descriptors: a socket, the
memory of the ring, and the file where ranks meet, which is in memory as well, so that no `kill -9` leaves it. However
rank 0 ends, they end: their socket ends, and the kernel kills them (PR_SET_PDEATHSIG). They have a session of their
own, so a terminal's Ctrl-C reaches rank 0 alone.

A follower's end is the worker's end, since all that ranks compute they compute together. Rank 0's own threads may stand
in a sum that never comes, so a thread watches the sockets, and ends the process by itself.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from shared.worker.rank_channel import LeaderEnd, ReportKind

_END_SECONDS = 5.0  # for followers to end that are told to
_STATUS_SECONDS = 0.5  # to learn how a process has ended
_CAUSE_SECONDS = 0.4  # for the end of the rank by which another one was lost


@dataclass(frozen=True, slots=True)
class LostRank:
    """A follower that has ended by itself."""

    rank: int
    status: int | None  # of its exit, or minus the signal; None: not known yet
    refused: bool  # it could not start
    sentence: str  # its last one, if it had any

    @property
    def reason(self) -> str:
        """How it ended, in words."""
        if self.sentence:
            return self.sentence
        if self.status is None:
            return "it has closed its socket, and its process still runs"
        if self.status < 0:
            names = {each.value: each.name for each in signal.Signals}
            return f"it was ended by {names.get(-self.status, f'signal {-self.status}')}"
        return f"it exited with status {self.status}"


class FollowerProcess(Protocol):
    """As `subprocess.Popen`."""

    @property
    def pid(self) -> int: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def kill(self) -> None: ...


# Of a rank: descriptors of the file where all meet, of its socket and of the memory.
Start = Callable[[int, int, int, int], FollowerProcess]


def meeting_at(descriptor: int) -> Path:
    """The file where ranks meet, for a process that has this descriptor of it."""
    return Path(f"/proc/self/fd/{descriptor}")


class RankGroup:
    """The followers of this process, which is rank 0."""

    def __init__(self, ranks: int, start: Start) -> None:
        """Start ranks 1, 2 …; at once, for each loads for itself."""
        self.ranks = ranks
        # Never closed: torch opens it by its path again at its end, and the number may be another file's by then.
        met = os.memfd_create("segue-meeting")
        self.meeting = meeting_at(met)
        memory = os.memfd_create("segue-orders")
        self.processes: list[FollowerProcess] = []
        sockets = []
        for rank in range(1, ranks):
            own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self.processes.append(start(rank, met, theirs.fileno(), memory))
            sockets.append(own)
        self.end = LeaderEnd(sockets, memory)
        self._ending = False
        self._lost = threading.Event()
        self._first = threading.Lock()  # of those who end the process

    def watch(self, on_lost: Callable[[LostRank], None]) -> None:
        """Call this, once and from another thread, when a follower has ended by itself."""
        threading.Thread(target=self._watch, args=(on_lost,), name="ranks", daemon=True).start()

    def give_way(self, seconds: float) -> None:
        """Rank 0 ends by an error: if that is because a follower was lost, whoever is told of it ends the process."""
        if self._lost.wait(seconds):
            threading.Event().wait()
        self._ending = True

    def close(self) -> None:
        """End the followers."""
        self._ending = True
        self.end.end()
        for process in self.processes:
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for each in self.end.sockets:
            each.close()

    def _watch(self, on_lost: Callable[[LostRank], None]) -> None:
        poll, of = select.poll(), {each.fileno(): at for at, each in enumerate(self.end.sockets)}
        for fd in of:
            poll.register(fd, 0)  # ends alone, and no reports
        lost: list[int] = []
        while found := poll.poll(_CAUSE_SECONDS * 1000 if lost else None):
            if self._ending:
                return
            self._lost.set()
            for fd, _ in found:
                poll.unregister(fd)
                lost.append(of[fd])
            if any(self._is_cause(each) for each in lost):
                break
        on_lost(self._lost_rank(max(lost, key=self._is_cause)))

    def _is_cause(self, follower: int) -> bool:
        """Whether it ended first: the others miss its part of a sum, may end sooner, and say so."""
        try:
            self.end.read(follower)
        except Exception as error:  # whatever it told: it has ended, and that counts
            self.end.sentences.setdefault(follower, (ReportKind.FAILED, f"{type(error).__name__}: {error}"))
        kind, _ = self.end.sentences.get(follower, (None, ""))
        return kind is not ReportKind.PEER_LOST

    def _lost_rank(self, follower: int) -> LostRank:
        kind, sentence = self.end.sentences.get(follower, (None, ""))
        try:
            status = self.processes[follower].wait(_STATUS_SECONDS)
        except subprocess.TimeoutExpired:
            status = None
        return LostRank(follower + 1, status, kind is ReportKind.REFUSED, sentence)


def start_processes(module: str, job: Callable[[int, Path], bytes]) -> Start:
    """How ranks are started as `python -m` of a module, with two descriptors as arguments, and a job each on stdin."""

    def start(rank: int, met: int, of_socket: int, memory: int) -> FollowerProcess:
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(of_socket), str(memory)],
            stdin=subprocess.PIPE,
            pass_fds=(met, of_socket, memory),
            start_new_session=True,
        )
        assert process.stdin is not None
        with process.stdin:
            process.stdin.write(job(rank, meeting_at(met)))
        return process

    return start
