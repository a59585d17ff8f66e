"""What a worker of ranks costs its hosts, step after step: no memory, no descriptor, and a follower less than rank 0.

Memory is what allocators have given out, so a follower tells it by itself: freed memory hides what is kept, and the
kernel joins pages to huge ones. `SEGUE_TEST_RANK_STEPS=10000` takes so many steps.
"""

from __future__ import annotations

import ctypes
import gc
import os
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import msgspec
import pytest

from shared.batch.schedule_batch import ExtendRow, ForwardMode
from shared.engine.cuda.device import CudaDevice
from shared.worker.follower import FollowerJob, follow
from shared.worker.rank_channel import FollowerEnd
from tests.abuse.procfs import cpu_seconds, descriptors, threads
from tests.unit.engine.driver import Driver, tokens_of
from tests.unit.engine.tiny_models import FAMILIES, VOCAB_SIZE, save_model
from tests.waiting import comes_true

ROUND, SETTLED = 40, 5  # steps; rounds until allocators and caches have about what they need
STEPS = int(os.environ.get("SEGUE_TEST_RANK_STEPS", "200"))
SLOTS, PAGES_PER_SLOT, PROMPT_LEN = 4, 4, 20
# What each step keeps has an object or more; some caches are still being filled.
KEPT_BYTES_MAX, KEPT_OBJECTS_MAX = 1 << 20, STEPS + 100
# CPU time of a follower, where rank 0 has 1: of the threads that launch steps, and of all with the sums over gloo.
HOST_WORK_MAX, WORK_MAX = 0.6, 1.2


class HostCost(msgspec.Struct):
    """What a process has taken of its host."""

    octets: int
    objects: int
    descriptors: int
    threads: int
    host_work: float  # CPU seconds of its main thread
    work: float  # of all its threads


class _MallocInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc."""

    _fields_ = [
        *((f"_{number}", ctypes.c_size_t) for number in range(4)),
        ("mapped", ctypes.c_size_t),
        *((f"_{number}", ctypes.c_size_t) for number in range(5, 7)),
        ("in_use", ctypes.c_size_t),
        *((f"_{number}", ctypes.c_size_t) for number in range(8, 10)),
    ]


def own_cost() -> HostCost:
    pid, libc = os.getpid(), ctypes.CDLL(None)
    # `stat` counts CPU time by hundredths of a second.
    host_work = int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9
    work = cpu_seconds(pid)
    gc.collect()
    libc.mallinfo2.restype = _MallocInfo
    given = libc.mallinfo2()
    held = (given.in_use + given.mapped, sys.getallocatedblocks(), descriptors(pid), len(threads(pid)))
    return HostCost(*held, host_work, work)


def _follow_and_tell(job: FollowerJob, end: FollowerEnd) -> NoReturn:
    """A follower that tells its cost to whoever connects."""

    def tell() -> None:
        while True:
            peer, _ = listening.accept()
            with peer:
                peer.send(msgspec.json.encode(own_cost()))

    listening = socket.socket(socket.AF_UNIX)
    listening.bind(f"{job.folder}/cost")
    listening.listen()
    threading.Thread(target=tell, daemon=True).start()
    follow(job, end)


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    """Of two ranks."""
    save_model(FAMILIES["mistral"], tmp_path)
    driver = Driver(
        tmp_path,
        device="cuda-on-cpu",
        ranks=2,
        body=_follow_and_tell,
        pages=SLOTS * PAGES_PER_SLOT,
        slots=SLOTS,
        host_fraction=0.5,
        extend_tokens=64,
    )
    yield driver
    driver.close()


def costs(folder: Path) -> tuple[HostCost, HostCost]:
    """Of rank 0, which is this process, and of rank 1."""
    with socket.socket(socket.AF_UNIX) as asking:
        asking.connect(f"{folder}/cost")
        follower = msgspec.json.decode(asking.recv(4096), type=HostCost)
    return own_cost(), follower


@pytest.mark.long
def test_steps_keep_nothing_and_followers_have_less_to_do_on_the_host(driver: Driver, tmp_path: Path) -> None:
    for number in range(SETTLED):
        serve_a_round(driver, 2 * number)
    before, measured = (
        costs(tmp_path),
        costs(tmp_path),
    )  # to look for memory takes time, behind the first one's
    for number in range(SETTLED, SETTLED + STEPS // ROUND):
        serve_a_round(driver, 2 * number)
    after = costs(tmp_path)
    for one, other in zip(before, after, strict=True):
        assert (other.descriptors, other.threads) == (one.descriptors, one.threads)
        assert other.octets - one.octets <= KEPT_BYTES_MAX
        assert other.objects - one.objects <= KEPT_OBJECTS_MAX
    own, followers = (other.host_work - one.host_work for one, other in zip(measured, after, strict=True))
    assert followers <= HOST_WORK_MAX * own
    own, followers = (other.work - one.work for one, other in zip(measured, after, strict=True))
    assert followers <= WORK_MAX * own


def serve_a_round(driver: Driver, copies: int) -> None:
    """Steps of each mode, and two copies of pages."""
    slots = tuple(range(SLOTS))
    for slot in slots:
        driver.prefill(slot, tokens_of(slot, PROMPT_LEN, VOCAB_SIZE), pages_of(slot))
    driver.decode(slots, 19)
    device = driver.device
    assert isinstance(device, CudaDevice)
    device.start_backup(copies + 1, [0, 1], [2, 3])
    driver.decode(slots, 8)
    device.start_restore(copies + 2, [2, 3], [0, 1])
    join = driver.join(0, pages_of(0), prompt_len=PROMPT_LEN)
    row = ExtendRow(0, tokens_of(SLOTS, PROMPT_LEN, VOCAB_SIZE), 0, True)
    driver.run(ForwardMode.MIXED, joins=[join], extend=[row], decode_slots=slots[1:])
    driver.decode(slots, 8)
    copied: list[int] = []

    def all_copied() -> bool:
        copied.extend(device.copies_done())
        return len(copied) == 2

    assert comes_true(all_copied, 30.0)
    driver.logits.clear()
    driver.tokens.clear()


def pages_of(slot: int) -> range:
    return range(PAGES_PER_SLOT * slot, PAGES_PER_SLOT * (slot + 1))
