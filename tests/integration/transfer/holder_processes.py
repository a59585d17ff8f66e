"""Starting, freezing and killing holders that are processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count

import msgspec

from shared.links.keys import Identity, LinkKeys, key_file, new_identity, parse_keys
from shared.transfer.protocol import KvTransport
from shared.transfer.transports import KvNetwork
from shared.wire.baton import Baton, Holder
from tests.fetcher_contract import LEASES, PAGE_BYTES, PAGES

PORTS = "21000-21099"
ROUTER, WORKER = new_identity("router"), new_identity("worker")  # of the deployment in these tests
epochs = count(1)


def worker_keys(own: Identity = WORKER, *others: Identity) -> LinkKeys:
    """The keys of a worker; the others are listed beside its own."""
    return parse_keys(key_file(own, own, *others, ROUTER), "worker")


def network(transport: KvTransport = "nixl") -> KvNetwork:
    """On loopback, where the tests' ports are."""
    return KvNetwork(transport, "lo", PORTS)


class HolderProcess:
    """A holder process. Implements `HolderUnderTest`."""

    def __init__(
        self,
        uid: str,
        epoch: int,
        pages: int = PAGES,
        page_bytes: int = PAGE_BYTES,
        transport: KvTransport = "nixl",
        memory: str = "host",
        rank: str = "",
    ):
        """`memory` is where its pages lie: plain memory of the host, or a tensor on cpu or cuda.

        `rank` is the JSON of a `HeldRank`, for a rank of a worker that has several.
        """
        arguments = [
            uid,
            str(epoch),
            str(pages),
            str(page_bytes),
            transport,
            memory,
            key_file(WORKER, WORKER, ROUTER).decode(),
            *filter(None, [rank]),
        ]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.transfer.holder_process", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.spoiled = False
        self.holder = msgspec.json.decode(self._read_line(), type=Holder)

    def write(self, lease: int, nonce: int, pages: Sequence[int] = ()) -> None:
        """Open a lease on these pages; on all of them if none is named."""
        self._ask(" ".join(map(str, ("write", lease, nonce, *pages))))

    def clear(self, lease: int) -> None:
        self._ask(f"clear {lease}")

    def stamp(self, nonce: int, pages: Sequence[int]) -> None:
        """Fill pages as `PageBuffer.stamp` does."""
        self._ask(" ".join(map(str, ("stamp", nonce, *pages))))

    def spoil(self) -> None:
        """Its known page loses its bytes."""
        self.spoiled = True
        self._ask("spoil")

    def read(self, baton: Baton) -> None:
        """Start to fetch the baton's pages, and never poll."""
        assert self._ask(f"read {msgspec.json.encode(baton).decode()}") == 1

    def be_busy(self, seconds: float) -> None:
        """Spin in Python; the next answer comes after that."""
        self._ask(f"busy {seconds}")

    def busy_turns(self) -> int:
        """What `be_busy` got done, when it is over."""
        return int(self._read_line())

    def freeze(self) -> None:
        self.spoiled = True
        os.kill(self.process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def thaw(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.spoiled = True
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    def _ask(self, line: str) -> object:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return json.loads(self._read_line())

    def _read_line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the holder has ended with status {self.process.wait()}"
        return line


class HolderPool:
    """Holders that outlive a test, since to start one takes seconds. One that was spoiled in any way is not reused."""

    def __init__(
        self,
        transport: KvTransport = "nixl",
        memory: str = "host",
        pages: int = PAGES,
        page_bytes: int = PAGE_BYTES,
    ) -> None:
        self._new = partial(
            HolderProcess,
            "holder",
            pages=pages,
            page_bytes=page_bytes,
            transport=transport,
            memory=memory,
        )
        self._started: list[HolderProcess] = []
        self._idle: list[HolderProcess] = []

    @contextmanager
    def check_out(self) -> Iterator[Callable[[], HolderProcess]]:
        """A function that gives a test one more holder; all of them return to the pool when the test ends."""
        checked_out: list[HolderProcess] = []

        def take() -> HolderProcess:
            if not self._idle:
                self._idle.append(self._new(next(epochs)))
                self._started.append(self._idle[0])
            checked_out.append(self._idle.pop())
            return checked_out[-1]

        yield take
        for holder in checked_out:
            if holder.spoiled:
                holder.kill()
            else:
                for lease in range(LEASES):
                    holder.clear(lease)
                self._idle.append(holder)

    def close(self) -> None:
        """Kill all."""
        for holder in self._started:
            holder.kill()


@contextmanager
def holders() -> Iterator[list[HolderProcess]]:
    """A list; every holder in it is killed at the end."""
    started: list[HolderProcess] = []
    try:
        yield started
    finally:
        for holder in started:
            holder.kill()
