"""Another client, in a process of its own: how long the router keeps it waiting while somebody abuses the router.

    python -m tests.abuse.probing PORT          prints a line a probe: when it began, and seconds of both answers;
                                                from a line "begin" to a line "rest", for probes cost time
    python -m tests.abuse.probing --neighbour   a server that nobody abuses; prints its port

Each probe asks the router and then the neighbour, over a new connection each. Both wait for the same two cores, so what
the neighbour took is the machine's share of a delay, and the rest is the router's.
"""

from __future__ import annotations

import http.client
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests.waiting import soon, until

MODULE = "tests.abuse.probing"
OWN_ADDRESS = "127.0.0.9"  # no test abuses the router from here
PAUSE_SECONDS = 0.04
ANSWER_SECONDS_MAX = 60.0
OTHERS_SECONDS = 0.2  # that others may wait, whatever one client does


@dataclass(frozen=True, slots=True)
class Probe:
    """One question to the router and one to the neighbour."""

    began_at: float
    router_seconds: float
    neighbour_seconds: float


class ProbingClient:
    """The process that probes, and all that it has measured."""

    def __init__(self, port: int):
        self._probes: list[Probe] = []
        self._process = subprocess.Popen(
            [sys.executable, "-m", MODULE, str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            began_at, router, neighbour = map(float, line.split())
            self._probes.append(Probe(began_at, router, neighbour))

    @contextmanager
    def _probing(self) -> Iterator[None]:
        assert self._process.stdin is not None
        self._process.stdin.write("begin\n")
        try:
            yield
        finally:
            self._process.stdin.write("rest\n")

    @contextmanager
    def window(self) -> Iterator[None]:
        """A time in which others must not notice anything: each answer came within 0.2 s of the neighbour's slowest."""
        begin = time.monotonic()
        with self._probing():
            self._wait_for_a_probe(begin)  # one that nothing disturbs
            yield
            end = time.monotonic()
            self._wait_for_a_probe(end)
        seen = [probe for probe in self._probes if begin <= probe.began_at <= end]
        slowest = max(probe.router_seconds for probe in seen)
        allowed = soon(OTHERS_SECONDS) + max(probe.neighbour_seconds for probe in seen)
        assert slowest <= allowed, f"another client waited for {slowest:.2f} s, allowed were {allowed:.2f} s"

    def _wait_for_a_probe(self, after: float) -> None:
        """Until a probe that began after this time has its answers."""
        until(
            lambda: self._probes and self._probes[-1].began_at >= after,
            2 * ANSWER_SECONDS_MAX,
            "another client's answer",
        )

    def slowest(self, count: int) -> float:
        """The longest of so many answers of the router."""
        with self._probing():
            until(lambda: len(self._probes) >= count, ANSWER_SECONDS_MAX, "another client's answers")
        return max(probe.router_seconds for probe in self._probes)

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.wait(10)
        self._reader.join(10)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()


def seconds_to_answer(port: int) -> float:
    """Seconds that a new client's GET /health takes; infinite when no answer comes, or not 200."""
    began = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", port, ANSWER_SECONDS_MAX, (OWN_ADDRESS, 0))
    try:
        connection.request("GET", "/health")
        answer = connection.getresponse()
        answer.read()
    except (OSError, http.client.HTTPException):
        return float("inf")
    finally:
        connection.close()
    return time.monotonic() - began if answer.status == 200 else float("inf")


class _Answer(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        while self.rfile.readline().strip():
            pass
        self.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")


def be_neighbour() -> None:
    """Serve until whoever holds the other end of standard input has gone."""
    with socketserver.TCPServer(("127.0.0.1", 0), _Answer) as server:
        threading.Thread(target=_end_with_stdin, args=(server,)).start()
        sys.stdout.write(f"{server.server_address[1]}\n")
        sys.stdout.flush()
        server.serve_forever()


def _end_with_stdin(server: socketserver.TCPServer) -> None:
    sys.stdin.read()
    server.shutdown()


def obey(probing: threading.Event) -> None:
    """Do what each line of standard input says."""
    for line in sys.stdin:
        (probing.set if line == "begin\n" else probing.clear)()


def probe_until_killed(port: int) -> None:
    """Probe the router on this port, and a neighbour of our own."""
    probing = threading.Event()
    threading.Thread(target=obey, args=(probing,), daemon=True).start()
    command = [sys.executable, "-m", MODULE, "--neighbour"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as neighbour:
        assert neighbour.stdout is not None
        neighbour_port = int(neighbour.stdout.readline())
        pause = threading.Event()
        while not pause.wait(PAUSE_SECONDS):
            probing.wait()
            began = time.monotonic()
            sys.stdout.write(f"{began} {seconds_to_answer(port)} {seconds_to_answer(neighbour_port)}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    if sys.argv[1] == "--neighbour":
        be_neighbour()
    else:
        probe_until_killed(int(sys.argv[1]))
