"""Workers of `tests.benchmarks.fleet`: real link ends over CURVE, which only tell their load. One process for all.

    python -m tests.benchmarks.fleet_workers KEYS PREFILL DECODE LOADS_PER_SECOND ROOM

It prints the address of each worker, a line each, and ends when its standard input is closed. ROOM is the share of the
decode workers' loads that bring room: each of them has the router look through all that waits. No prefill worker ever
has room, so nothing is placed.
"""

from __future__ import annotations

import random
import select
import sys
import time

import zmq

from shared.links.counters import LinkCounters
from shared.links.keys import LinkKeys, read_keys
from shared.links.listening import WorkerEnd
from shared.links.poller import SocketPoller
from shared.wire.messages import WORKER_ROLES, Hello, Limits, Load, Role, encode
from tests.link_settings import link_settings

LIMITS = Limits(context_len=8192, page_size=16, pages=10_000, slots=64, vocab_size=1000)
TURN_SECONDS = 0.005


class FakeWorker:
    """One listening socket without a thread of its own. It accepts no request, so that all requests wait."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: LinkKeys, role: Role, number: int):
        hello = Hello(
            session=0,
            role=role,
            uid=f"{role}-{number}",
            epoch=number,
            model_name="m",
            model="w",
            kv_format="kv",
            limits=LIMITS,
        )
        self._end = WorkerEnd(hello, link_settings(), LinkCounters())
        self.role = role
        self._sessions: dict[str, int] = {}  # by router
        self.socket = context.socket(zmq.ROUTER)
        self.socket.curve_server = True
        self.socket.curve_secretkey = keys.own.secret
        self.socket.curve_publickey = keys.own.public
        self.socket.bind("tcp://127.0.0.1:*")
        self.address = self.socket.get_string(zmq.LAST_ENDPOINT)

    def read(self, poller: SocketPoller, now: float) -> None:
        """Take in what routers sent: greetings and heartbeats."""
        for connection, *frames in poller.read(self.socket):
            self._end.receive(connection, frames, now)
        for event in self._end.events:
            if hasattr(event, "hello"):
                self._sessions[event.peer] = event.hello.session
            elif hasattr(event, "reason"):
                self._sessions.pop(event.peer, None)
        self._end.events.clear()

    def tell(self, load: Load, now: float) -> None:
        """Tell all routers this load."""
        for peer, session in self._sessions.items():
            self._end.send(peer, session, encode(load), now)

    def flush(self, poller: SocketPoller, now: float) -> None:
        """Send what is to be sent; one that is not connected any more gets nothing."""
        self._end.tick(now)
        if self._end.outgoing:
            poller.used(self.socket)
        for connection, frames in self._end.outgoing:
            self.socket.send_multipart([connection, *frames], zmq.NOBLOCK)
        self._end.outgoing.clear()
        self._end.notes.clear()


def _load(number: int, *, roomy: bool) -> Load:
    """A load that differs from the one before; a roomy one brings slots and pages where there were none."""
    queued_tokens = number % 4096
    if roomy:
        return Load(queued_tokens=queued_tokens, free_pages=LIMITS.pages, slots_free=LIMITS.slots)
    return Load(queued=8, queued_tokens=queued_tokens, free_pages=number % 64, accepting=False)


def main() -> None:
    path, prefill, decode, per_second = sys.argv[1], *map(int, sys.argv[2:5])
    room = float(sys.argv[5])
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 8192)
    keys = read_keys(path, "worker")
    counts = dict(zip(WORKER_ROLES, (prefill, decode), strict=True))
    workers = [
        FakeWorker(context, keys, role, number) for role, count in counts.items() for number in range(count)
    ]
    sys.stdout.write("".join(f"{worker.address}\n" for worker in workers))
    sys.stdout.flush()
    poller = SocketPoller()
    by_socket: dict[object, FakeWorker] = {worker.socket: worker for worker in workers}
    for worker in workers:
        poller.register(worker.socket)
    told, began = 0, time.monotonic()
    while not select.select([sys.stdin], [], [], TURN_SECONDS)[0]:
        now = time.monotonic()
        for source in poller.poll(0):
            by_socket[source].read(poller, now)
        due = int((now - began) * per_second)
        for number in range(told, due):
            worker = workers[number % len(workers)]
            worker.tell(_load(number, roomy=worker.role == "decode" and random.random() < room), now)
        told = due
        for worker in workers:
            worker.flush(poller, now)


if __name__ == "__main__":
    main()
