"""Who is admitted to a worker's socket when nobody answers ZMQ's question, and what errors and floods there cost."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pytest
import zmq
from zmq.utils.monitor import parse_monitor_message

from shared.batch.effects import Note
from shared.links.authenticator import ZAP_ENDPOINT, Authenticator
from shared.links.counters import LinkCounters
from shared.links.poller import READ_BATCH
from tests.link_keys import new_keys

PATIENCE_MS = 10_000
OUTCOMES = (zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_DISCONNECTED, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.term()


def test_nobody_is_admitted_when_no_one_answers_zmq(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    """Not even a router: without an answer ZMQ would admit any key."""
    keys = new_keys()
    listening = context.socket(zmq.ROUTER)
    authenticator = Authenticator(context, listening, keys["worker"], LinkCounters(), lambda _: None)
    port = listening.bind_to_random_port("tcp://127.0.0.1")
    authenticator.zap_socket.unbind(ZAP_ENDPOINT)  # as while it closes: nobody is there to be asked
    dialing = context.socket(zmq.DEALER)
    dialing.curve_serverkey = keys["worker"].own.public
    dialing.curve_publickey = keys["router"].own.public
    dialing.curve_secretkey = keys["router"].own.secret
    dialing.connect(f"tcp://127.0.0.1:{port}")
    event = outcome(authenticator)
    dialing.close(linger=0)
    listening.close(linger=0)
    authenticator.close()
    assert event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


def outcome(authenticator: Authenticator) -> int:
    """What became of the first handshake."""
    while authenticator.monitor.poll(PATIENCE_MS):
        event = int(parse_monitor_message(authenticator.monitor.recv_multipart())["event"])
        if event in OUTCOMES:
            return event
    raise AssertionError("the handshake has no outcome")


class Flooded:
    """A socket that always has one more message, and keeps what is sent."""

    def __init__(self, message: list[bytes]):
        self.message = message
        self.read = 0
        self.sent: list[list[bytes]] = []

    def poll(self, timeout_ms: int) -> int:
        assert timeout_ms == 0
        return zmq.POLLIN

    def recv_multipart(self) -> list[bytes]:
        self.read += 1
        return self.message

    def send_multipart(self, frames: list[bytes]) -> None:
        self.sent.append(frames)


class FloodedAuthenticator:
    """An authenticator whose two sockets always have one more message; a context manager."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], request: list[bytes], event: list[bytes]):
        self.keys = new_keys()
        self.notes: list[Note] = []
        self.counters = LinkCounters()
        self.listening = context.socket(zmq.ROUTER)
        self.authenticator = Authenticator(
            context, self.listening, self.keys["worker"], self.counters, self.notes.append
        )
        self.asking, self.telling = Flooded(request), Flooded(event)
        self.patch = pytest.MonkeyPatch()

    def __enter__(self) -> FloodedAuthenticator:
        self.patch.setattr(self.authenticator, "zap_socket", self.asking)
        self.patch.setattr(self.authenticator, "monitor", self.telling)
        return self

    def __exit__(self, *_: object) -> None:
        self.patch.undo()
        self.listening.close(linger=0)
        self.authenticator.close()


REQUEST = [b"1.0", b"7", b"segue", b"10.0.0.1", b"", b"CURVE", b"k" * 32]
DISCONNECTED = [struct.pack("=hi", zmq.EVENT_DISCONNECTED & 0x7FFF, 3), b"tcp://10.0.0.1:1"]


def test_a_flood_of_connections_takes_so_many_of_a_turn_and_no_more(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    with FloodedAuthenticator(context, REQUEST, DISCONNECTED) as flooded:
        flooded.authenticator.answer()
        flooded.authenticator.observe()
        assert (flooded.asking.read, flooded.telling.read) == (READ_BATCH, READ_BATCH)
        assert flooded.counters.refused_foreign_key == READ_BATCH


def test_an_error_about_one_connection_refuses_it_and_is_noted(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    with FloodedAuthenticator(context, REQUEST[:4], [b"no event"]) as flooded:
        flooded.authenticator.answer()
        flooded.authenticator.observe()
        assert flooded.asking.sent == [[b"1.0", b"7", b"400", b"no access", b"", b""]] * READ_BATCH
        assert flooded.telling.read == READ_BATCH
    assert {(note.event, note.level) for note in flooded.notes} == {("link.failed", "error")}
    assert 2 <= len(flooded.notes) < READ_BATCH / 4, "lines come at times"
