"""Strangers without keys at the workers' links: refused, cheap, and no stream notices them.

Workers of a deployment on one machine have no port for KV. That a stranger cannot write a worker's memory is shown
elsewhere, for the transports that a chart can turn on.
"""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import zmq

from tests.abuse.procfs import listening_ports
from tests.abuse.target import MARKER, MIB, AbusedDeployment
from tests.abuse.wire import Conversation, connect, converse, get, talk
from tests.integration.deployments.deployment import RunningProcess
from tests.integration.deployments.ranked import MEETING_PORTS, followers_of
from tests.waiting import soon, until

REFUSED_SECONDS = 5.0  # a handshake has 3 s
ANSWER_BYTES_MAX = 1024  # a greeting and an error; no message
STRANGER_MIB = 32
SIGNATURE = b"\xff" + bytes(8) + b"\x7f"


def greeting(mechanism: bytes, version: bytes = b"\x03\x00") -> bytes:
    """The first 64 bytes of ZMTP 3."""
    return SIGNATURE + version + mechanism.ljust(20, b"\0") + bytes(32)


def long_frame(size: int) -> bytes:
    """The head of a ZMTP frame of this size."""
    return b"\x02" + size.to_bytes(8, "big")


TLS_HELLO = bytes.fromhex("16030100c8010000c40303") + bytes(range(32)) + bytes(157)
STRANGERS = {
    "nothing": b"",
    "garbage": random.Random(1).randbytes(4096),
    "zeros": bytes(4096),
    "HTTP": get(f"/{MARKER}"),
    "a TLS hello": TLS_HELLO,
    "half a greeting": greeting(b"CURVE")[:30],
    "ZMTP 1": b"\x01\x00\x05\x00hello",
    "ZMTP 2": SIGNATURE + b"\x01\x05\x00\x00\x05\x00hello",
    "ZMTP 3 without security": greeting(b"NULL") + b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER",
    "ZMTP 3 with a password": greeting(b"PLAIN") + b"\x04\x10\x05HELLO\x04user\x04word",
    "ZMTP 3 with an unknown mechanism": greeting(MARKER.upper().encode()[:20]),
    "ZMTP 9": greeting(b"CURVE", b"\x09\x00"),
    "a hello of CURVE that is garbage": greeting(b"CURVE")
    + b"\x04\xc8\x05HELLO"
    + random.Random(2).randbytes(194),
    "a message before the handshake": greeting(b"CURVE") + b"\x00\x05hello" * 100,
    "a frame of 16 MiB before the handshake": greeting(b"CURVE") + long_frame(16 * MIB) + bytes(MIB),
    "a frame of an exabyte before the handshake": greeting(b"CURVE") + long_frame(1 << 60) + bytes(MIB),
}


@pytest.fixture(scope="module", autouse=True)
def every_worker_lives_on(target: AbusedDeployment) -> Iterator[None]:
    """No stranger of this module ends a worker or a link."""
    target.all_home()
    before = {worker.uid: worker.pid for worker in target.workers()}
    sessions = target.running.total("router", "segue_link_sessions_total{event=ended}")
    yield
    assert {worker.uid: worker.pid for worker in target.workers()} == before
    assert target.running.total("router", "segue_link_sessions_total{event=ended}") == sessions


def links_port(target: AbusedDeployment, uid: str = "decode-0") -> int:
    """Where this worker listens for routers."""
    (line,) = [line for line in target.running.command.children().values() if f" --uid {uid} " in line]
    words = line.split()
    return int(words[words.index("--links-port") + 1])


def worker(target: AbusedDeployment, uid: str = "decode-0") -> RunningProcess:
    """The process of this worker."""
    (found,) = [process for process in target.workers() if process.uid == uid]
    return found


@pytest.fixture(scope="module")
def refused(target: AbusedDeployment) -> dict[str, Conversation]:
    """What each stranger got; all come at once, because a handshake that stands still has 3 s."""
    port = links_port(target)

    def come(data: bytes) -> Conversation:
        with connect(port) as connection:
            return converse(connection, data, replies=10**9, seconds_max=soon(REFUSED_SECONDS))

    with target.growth_below(STRANGER_MIB, worker(target)), ThreadPoolExecutor(len(STRANGERS)) as pool:
        return dict(zip(STRANGERS, pool.map(come, STRANGERS.values()), strict=True))


@pytest.mark.parametrize("name", STRANGERS)
def test_a_stranger_at_a_links_port_is_refused(refused: dict[str, Conversation], name: str) -> None:
    assert refused[name].closed, "the connection is still open"
    assert len(refused[name].raw) <= ANSWER_BYTES_MAX


def test_a_foreign_key_is_refused_and_counted(target: AbusedDeployment) -> None:
    def refusals() -> float:
        metrics = target.running.metrics(worker(target))
        return sum(value for name, value in metrics.items() if name.startswith("segue_link_refusals_total"))

    before = refusals()
    context = zmq.Context()
    try:
        stranger = context.socket(zmq.DEALER)
        stranger.linger = 0
        stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
        stranger.curve_serverkey, _ = zmq.curve_keypair()
        stranger.connect(f"tcp://127.0.0.1:{links_port(target)}")
        stranger.send(MARKER.encode())
        until(lambda: refusals() > before, soon(REFUSED_SECONDS), "the count of the refusal")
        assert not stranger.poll(100)
    finally:
        context.destroy(linger=0)


def test_130_strangers_who_send_all_they_can_cost_a_worker_little(target: AbusedDeployment) -> None:
    data = greeting(b"CURVE") + long_frame(16 * MIB - 1)
    with ExitStack() as stack, target.growth_below(STRANGER_MIB, worker(target)):
        strangers = [stack.enter_context(connect(links_port(target))) for _ in range(130)]
        push_all(strangers, data, 3.0)


def push_all(connections: list[socket.socket], data: bytes, seconds: float) -> None:
    """Send this and then zeros over all connections, as much as they take."""
    zeros = bytes(MIB)
    for connection in connections:
        connection.sendall(data)
        connection.setblocking(False)
    deadline = time.monotonic() + seconds
    open_now = list(connections)
    while open_now and time.monotonic() < deadline:
        for connection in list(open_now):
            try:
                connection.send(zeros)
            except BlockingIOError:
                continue
            except OSError:
                open_now.remove(connection)


def test_two_thousand_strangers_at_a_links_port_disturb_no_stream(target: AbusedDeployment) -> None:
    with ExitStack() as stack, target.undisturbed_streams(), target.others.window():
        for uid in ("decode-0", "decode-1"):
            for _ in range(1000):
                stack.enter_context(connect(links_port(target, uid)))
    assert target.running.all_linked()


def test_a_thousand_silent_connections_to_a_workers_probes_are_cheap(target: AbusedDeployment) -> None:
    """The probe comes from another address: one that connects a thousand times in a second is closed for its rest."""
    probed = worker(target)
    with ExitStack() as stack, target.growth_below(STRANGER_MIB, probed):
        for _ in range(1000):
            stack.enter_context(connect(probed.admin_port))
        said = talk(probed.admin_port, get("/livez"), seconds_max=target.allowed(2), source="127.0.0.1")
        assert said.statuses() == [200]


@pytest.mark.aggregated
def test_workers_on_one_machine_have_no_port_for_kv(target: AbusedDeployment) -> None:
    for process in target.workers():
        own = {process.admin_port, links_port(target, process.uid)}
        assert own <= listening_ports(process.pid)
        assert len(listening_ports(process.pid)) == len(own) + MEETING_PORTS
        assert all(len(listening_ports(pid)) == MEETING_PORTS for pid in followers_of(process.pid))
