"""Who is let in at a worker's socket, and a count of who was not.

ZMQ asks over ZAP (RFC 27) about every CURVE client that proved to know our public key; the answer is yes
for the router's key alone. Who fails earlier never gets that far and is seen on the socket's monitor: wrong
mechanism (no key), a handshake that does not decrypt (foreign key), or no handshake at all (plain bytes).

pyzmq's own authenticators run asyncio in a thread of their own and log keys, so the few lines are here. Both
sockets belong to the thread that polls the worker's socket.
"""

from __future__ import annotations

import structlog
import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from shared.links.counters import LinkCounters
from shared.links.keys import KeyPair, derive_keys

log = structlog.get_logger(__name__)

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"segue"
MECHANISM_MISMATCH = 0x11000002  # ZMQ_PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH


class Authenticator:
    """The door of one listening socket. Make it before the socket binds."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        door: zmq.Socket[bytes],
        seed: bytes,
        counters: LinkCounters,
    ):
        self._counters = counters
        keys: KeyPair = derive_keys(seed, "worker")
        self._router_key = z85.decode(derive_keys(seed, "router").public)
        self._worker_key = z85.decode(keys.public)
        self.questions = context.socket(zmq.REP)
        self.questions.bind(ZAP_ENDPOINT)
        door.curve_server = True
        door.curve_secretkey = keys.secret
        door.curve_publickey = keys.public
        door.zap_domain = ZAP_DOMAIN
        self.monitor: zmq.Socket[bytes] = door.get_monitor_socket()
        self._strangers: dict[int, None] = {}  # descriptors whose handshake has no outcome yet, oldest first
        self._counted = False  # the failure that the next disconnection belongs to has been counted

    def answer(self) -> None:
        """Answer every ZAP question that waits."""
        while self.questions.poll(0):
            version, request_id, _, _, _, mechanism, *credentials = self.questions.recv_multipart()
            admitted = mechanism == b"CURVE" and credentials == [self._router_key]
            if not admitted:
                self._refuse("wrong_role" if credentials == [self._worker_key] else "foreign_key")
            status = [b"200", b"OK", b"router"] if admitted else [b"400", b"no access", b""]
            self.questions.send_multipart([version, request_id, *status, b""])

    def observe(self) -> None:
        """Count the connections that ended before ZMQ would ask about them."""
        while self.monitor.poll(0):
            event = parse_monitor_message(self.monitor.recv_multipart())
            self._observe(event["event"], event["value"])

    def _refuse(self, cause: str) -> None:
        """Count it, and say so the first, second, fourth, eighth … time: who may not come in tries for ever."""
        name = f"refused_{cause}"
        count = getattr(self._counters, name) + 1
        setattr(self._counters, name, count)
        if count & (count - 1) == 0:
            log.warning("link.refused", cause=cause, times=count)

    def close(self) -> None:
        """Close both sockets; the door itself is its owner's."""
        self.questions.close(linger=0)
        self.monitor.close(linger=0)

    def _observe(self, kind: int, value: int) -> None:
        if kind == zmq.EVENT_ACCEPTED:
            self._strangers[value] = None
        elif kind == zmq.EVENT_HANDSHAKE_SUCCEEDED and self._strangers:
            # The event does not say whose; the oldest is right but for two at the same moment, and then the
            # counts are still right once both have gone.
            del self._strangers[next(iter(self._strangers))]
        elif kind == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            self._refuse("unencrypted" if value == MECHANISM_MISMATCH else "foreign_key")  # nor decrypts it
            self._counted = True
        elif kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._counted = True  # when the question was answered
        elif kind == zmq.EVENT_DISCONNECTED:
            if value in self._strangers:
                del self._strangers[value]
                if not self._counted:
                    self._refuse("no_handshake")
            self._counted = False
