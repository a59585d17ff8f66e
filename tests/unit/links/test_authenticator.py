"""Who is admitted to a worker's socket at the moments when nobody answers ZMQ's question."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq
from zmq.utils.monitor import parse_monitor_message

from shared.links.authenticator import ZAP_ENDPOINT, Authenticator
from shared.links.counters import LinkCounters
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
