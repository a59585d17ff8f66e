"""Reads of KV pages by each transport over loopback TCP, in turns: GB/s, CPU seconds, and the ratio to UCX.

python -m tests.benchmarks.kv_transports

Each round reads the same pages by each transport, one after the other, and ratios are of neighbours: so other work on
the machine hits both. CPU seconds are those of both processes. "staged" is TLS between tensors, which either end
copies out of and into as it would VRAM.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import threading
import time
from pathlib import Path

from shared.transfer.fetches import FetchLimits
from shared.transfer.protocol import FetchLanded, KvTransport
from shared.transfer.transfer import Transfer
from shared.transfer.transports import open_offer
from tests.fetcher_contract import KV_FORMAT, LEASES, PATIENCE_SECONDS, Clock, FetchWorld
from tests.integration.transfer.holder_process import make_buffer
from tests.integration.transfer.holder_processes import HolderProcess, epochs, network, worker_keys

WAYS: dict[str, tuple[KvTransport, str]] = {  # transport, and where the pages lie at both ends
    "nixl": ("nixl", "host"),
    "tls": ("tls", "host"),
    "staged": ("tls", "cpu"),
}
READ_BYTES = 256 * 2**20
WARM_ROUNDS = 4  # the kernel's buffers grow while they are used
LIMITS = FetchLimits(fetches_max=16, fetch_seconds_max=PATIENCE_SECONDS, quarantine_seconds=PATIENCE_SECONDS)
TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """Of one process so far, user and system."""
    fields = Path("/proc", str(pid), "stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


class Reading:
    """A holder process of one transport and the reader of it, in this process."""

    def __init__(self, transport: KvTransport, memory: str, page_bytes: int):
        pages = READ_BYTES // page_bytes
        self.buffer = make_buffer(memory, pages, page_bytes)
        identity = ("reader", next(epochs))
        offer = open_offer(network(transport), worker_keys(), identity, self.buffer.memory, LEASES)
        self.transfer = Transfer(offer, self.buffer.memory, KV_FORMAT, limits=LIMITS, clock=time.monotonic)
        self.holder = HolderProcess("holder", next(epochs), pages, page_bytes, transport, memory)
        self.holder.write(3, 77)
        self.world = FetchWorld(self.transfer, self.buffer, Clock(), lambda: self.holder)
        # Every second page first: neighbours would be one span, and a pool after some hours has few neighbours.
        self.pages = (*range(0, pages, 2), *range(1, pages, 2))

    def read(self) -> tuple[float, float]:
        """All pages once: seconds, and CPU seconds of both processes."""
        pids = (os.getpid(), self.holder.process.pid)
        before, begin = sum(map(cpu_seconds, pids)), time.perf_counter()
        self.transfer.start(1, self.world.baton(self.holder, self.pages), 0, range(len(self.pages)))
        pause = threading.Event()
        while not (events := self.transfer.poll()):
            pause.wait(0.0005)  # as a worker's loop, which has other work
        seconds = time.perf_counter() - begin
        assert isinstance(events[0], FetchLanded), events
        return seconds, sum(map(cpu_seconds, pids)) - before

    def close(self) -> None:
        self.transfer.close()
        self.holder.kill()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.kv_transports", description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--page-bytes", type=int, default=2**20)
    arguments = parser.parse_args()
    os.environ["UCX_TLS"] = "tcp"  # what there was between hosts; on one machine UCX would take another way
    readings = {way: Reading(*WAYS[way], arguments.page_bytes) for way in WAYS}
    rounds: list[dict[str, tuple[float, float]]] = []
    for number in range(WARM_ROUNDS + arguments.rounds):
        figures = {way: reading.read() for way, reading in readings.items()}
        if number >= WARM_ROUNDS:
            rounds.append(figures)
    for way in WAYS:
        speed = statistics.median(READ_BYTES / each[way][0] / 1e9 for each in rounds)
        cpu = statistics.median(each[way][1] for each in rounds)
        ratios = sorted(each["nixl"][0] / each[way][0] for each in rounds)
        sys.stdout.write(
            f"{way:8} {speed:5.2f} GB/s, {cpu:.2f} s of CPU; ratio to nixl over TCP: median "
            f"{statistics.median(ratios):.2f}, {ratios[0]:.2f} to {ratios[-1]:.2f}\n"
        )
    for reading in readings.values():
        reading.close()


if __name__ == "__main__":
    main()
