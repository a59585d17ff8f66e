"""Round trips and throughput of a link between two processes, beside a bare TCP echo on the same machine.

python -m tests.benchmarks.links
"""

from __future__ import annotations

import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from shared.links.events import LinkEvent, PeerUp, Received
from shared.links.keys import read_keys
from shared.links.sockets import RouterLinks
from shared.wire.messages import Cancel, Hello
from tests.link_keys import write_new_keys
from tests.link_settings import link_settings, write_note

ROUND_TRIPS = 3000
MESSAGES = 50_000
IN_FLIGHT = 1000

TCP_ECHO = """
import socket
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
connection, _ = listener.accept()
connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
while data := connection.recv(65536):
    connection.sendall(data)
"""


def measure_round_trips(trip: Callable[[], None]) -> list[float]:
    """Microseconds of each round trip, sorted, the first hundred left out."""
    times = []
    for _ in range(ROUND_TRIPS):
        begin = time.perf_counter()
        trip()
        times.append((time.perf_counter() - begin) * 1e6)
    return sorted(times[100:])


def tcp_round_trips() -> list[float]:
    with subprocess.Popen([sys.executable, "-c", TCP_ECHO], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        with socket.create_connection(("127.0.0.1", int(process.stdout.readline()))) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

            def trip() -> None:
                connection.sendall(b"x" * 60)
                connection.recv(65536)

            return measure_round_trips(trip)


def receive_some(links: RouterLinks) -> list[LinkEvent]:
    events = links.receive(10.0)
    assert events, "no answer within 10 s"
    return events


def messages_per_second(links: RouterLinks, peer: str) -> float:
    """Answered messages a second with `IN_FLIGHT` of them under way; each is two messages on the link."""
    begin = time.perf_counter()
    sent = received = 0
    while received < MESSAGES:
        while sent < MESSAGES and sent - received < IN_FLIGHT:
            links.send(peer, Cancel(f"request-{sent}", 0))
            sent += 1
        received += sum(isinstance(event, Received) for event in receive_some(links))
    return MESSAGES / (time.perf_counter() - begin)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        write_new_keys(keys)
        command = [sys.executable, "-m", "tests.integration.links.echo_worker", str(keys / "worker.pem"), "1"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            hello = Hello(session=0, role="router", uid="router", epoch=1)
            links = RouterLinks(
                read_keys(str(keys / "router.pem"), "router"), hello, link_settings(), write_note=write_note
            )
            links.connect(address)
            [up] = receive_some(links)
            assert isinstance(up, PeerUp)

            def trip() -> None:
                links.send(up.peer, Cancel("request", 0))
                receive_some(links)

            ours, rate = measure_round_trips(trip), messages_per_second(links, up.peer)
            links.close()
            process.communicate()
    bare = tcp_round_trips()
    ratio = statistics.median(ours) / statistics.median(bare)
    for name, times in (("link round trip", ours), ("bare TCP echo", bare)):
        p99 = times[len(times) * 99 // 100]
        sys.stdout.write(f"{name:<16} median {statistics.median(times):6.0f} us   p99 {p99:6.0f} us\n")
    sys.stdout.write(
        f"ratio            {ratio:.1f}\n"
        f"answered messages a second, {IN_FLIGHT} in flight: {rate:.0f} (twice that many on the link)\n"
    )


if __name__ == "__main__":
    main()
