"""A follower's process: `python -m shared.worker.follower SOCKET MEMORY`, started by rank 0 alone.

It loads its share of the model and does what orders say, until it is told the end or rank 0 has ended. Its pages are
offered and read into by a thread beside (`shared.transfer.ranks.service`). It reads no settings and logs nothing: what
ends it is told to rank 0, whose log has the line.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import NoReturn

import msgspec

from shared.engine.config import EngineConfig
from shared.engine.cuda.follower import FollowerDevice, load_follower
from shared.engine.parallel.orders import OrderKind, command_of
from shared.engine.parallel.shares import Share
from shared.engine.streams import Mark
from shared.primitives.errors import RankError, StartError
from shared.transfer.ranks.service import RankService, offer_of
from shared.worker.page_memory import page_memory
from shared.worker.rank_channel import FollowerEnd, ReportKind

_PR_SET_PDEATHSIG = 1


class FollowerJob(msgspec.Struct, frozen=True):
    """What a follower needs to know."""

    rank: int
    ranks: int
    folder: str  # of the model
    meeting: str
    config: EngineConfig


def follow(job: FollowerJob, end: FollowerEnd) -> NoReturn:
    """Be a follower; ends the process."""
    if (
        end.is_alone
    ):  # rank 0 ended before the kernel was asked to end this process with it: nobody would come
        os._exit(1)
    try:
        share = Share(job.rank, job.ranks)
        device = load_follower(Path(job.folder), job.config, share, Path(job.meeting))
        end.open(device.order_words)
        pages = page_memory(device.cache, device.heads)
        service = RankService(pages, offer_of(job.rank, end.map_shared), end.tell_kv)
        threading.Thread(target=service.run, args=(partial(fail, end),), name="kv-rank", daemon=True).start()
        _work(device, service, end, job.rank)
    except StartError as error:
        end.say(ReportKind.REFUSED, str(error))
    except BaseException as error:  # whatever it is, rank 0 is told
        fail(end, error)
    os._exit(1)


def _work(device: FollowerDevice, service: RankService, end: FollowerEnd, rank: int) -> None:
    """Do what is ordered. Returns when rank 0 has ended."""
    launched = SimpleQueue[tuple[Mark, int | None]]()
    threading.Thread(target=_report, args=(launched, end), daemon=True).start()
    while (order := end.take()) is not None:
        match order.kind:
            case OrderKind.STEP:
                device.step(order)
                launched.put((device.record(), None))
            case OrderKind.BACKUP | OrderKind.RESTORE:
                device.copy(order)
                launched.put((device.record(copies=True), order.name))
            case OrderKind.KV:
                if order.name == rank:
                    service.tell(command_of(order))
            case OrderKind.END:
                device.close()
                os._exit(0)
        end.give_back()


def _report(launched: SimpleQueue[tuple[Mark, int | None]], end: FollowerEnd) -> None:
    """Tell which copies are done; ends the process when the device has failed."""
    try:
        while True:
            mark, copy = launched.get()
            mark.wait()
            if copy is not None:
                end.copied(copy)
    except BaseException as error:
        fail(end, error)


def fail(end: FollowerEnd, error: BaseException) -> NoReturn:
    """Tell rank 0 of an error, and end the process."""
    kind = ReportKind.PEER_LOST if isinstance(error, RankError) else ReportKind.FAILED
    end.say(kind, f"{type(error).__name__}: {error}")
    os._exit(1)


def main() -> NoReturn:
    """Read the job from stdin and do it."""
    for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 drains, and needs its followers for it
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    of_socket, memory = map(int, sys.argv[1:])
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=FollowerJob)
    follow(job, FollowerEnd(socket.socket(fileno=of_socket), memory))


if __name__ == "__main__":
    main()
