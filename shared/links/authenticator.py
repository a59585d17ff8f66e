"""Which connections a worker's socket admits, and a count of those it refuses.

ZMQ asks over ZAP (RFC 27) about every CURVE client that proved to know our public key; the answer is yes for the
routers' keys alone. Clients that fail earlier are seen only on the socket's monitor: wrong mechanism (no key), a
handshake that does not decrypt (foreign key), or no handshake at all (plain bytes).

pyzmq's own authenticators run asyncio in a thread of their own and log keys, so the few lines are here. Both sockets
belong to the thread that polls the worker's socket.
"""

from __future__ import annotations

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from shared.batch.effects import Note
from shared.links.counters import LinkCounters
from shared.links.keys import LinkKeys
from shared.links.poller import READ_BATCH
from shared.links.session import reason_of
from shared.links.thread import WriteNote
from shared.primitives.tally import Tally

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"segue"
MECHANISM_MISMATCH = 0x11000002  # ZMQ_PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH


class Authenticator:
    """Admits routers to one listening socket. Make it before the socket binds."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        router_socket: zmq.Socket[bytes],
        keys: LinkKeys,
        counters: LinkCounters,
        write_note: WriteNote,
    ):
        self._counters = counters
        self._write_note = write_note
        self._refusals, self._failures = Tally(), Tally()
        self._admitted = {z85.decode(public) for public in keys.peers}
        self._siblings = {z85.decode(public) for public in keys.siblings}
        self.zap_socket = context.socket(zmq.REP)
        self.zap_socket.bind(ZAP_ENDPOINT)
        router_socket.curve_server = True
        router_socket.curve_secretkey = keys.own.secret
        router_socket.curve_publickey = keys.own.public
        router_socket.zap_domain = ZAP_DOMAIN
        router_socket.zap_enforce_domain = True  # without an answer nobody is admitted, also while closing
        self.monitor: zmq.Socket[bytes] = router_socket.get_monitor_socket()
        self._pending_handshakes: dict[int, None] = {}  # descriptors without an outcome yet, oldest first
        self._counted = False  # the failure that the next disconnection belongs to has been counted

    def answer(self) -> None:
        """Answer the ZAP requests that wait, so many in one turn; the poller tells of the rest."""
        for _ in range(READ_BATCH):
            if not self.zap_socket.poll(0):
                return
            request = self.zap_socket.recv_multipart()
            try:
                admitted = self._admits(request)
            except Exception as error:  # whatever one connection meets, the others live
                self._fail(error)
                admitted = False
            status = [b"200", b"OK", b"router"] if admitted else [b"400", b"no access", b""]
            # always: without it none is asked again
            self.zap_socket.send_multipart([*request[:2], *status, b""])

    def observe(self) -> None:
        """Count the connections that ended before ZMQ would ask about them, so many in one turn."""
        for _ in range(READ_BATCH):
            if not self.monitor.poll(0):
                return
            message = self.monitor.recv_multipart()
            try:
                event = parse_monitor_message(message)
                self._observe(event["event"], event["value"])
            except Exception as error:  # as above
                self._fail(error)

    def _admits(self, request: list[bytes]) -> bool:
        _, _, _, _, _, mechanism, *credentials = request
        key = credentials[0] if mechanism == b"CURVE" else b""
        if key not in self._admitted:
            self._refuse("wrong_role" if key in self._siblings else "foreign_key")
        return key in self._admitted

    def _fail(self, error: Exception) -> None:
        """Note it; lines come at times, since a client that causes it may try without end."""
        reason = reason_of(error)
        if times := self._failures.add(reason):
            self._write_note(Note("link.failed", {"reason": reason, "times": times}, "error"))

    def _refuse(self, cause: str) -> None:
        """Count it; a line comes at times, since a refused client may try without end."""
        name = f"refused_{cause}"
        setattr(self._counters, name, getattr(self._counters, name) + 1)
        if times := self._refusals.add(cause):
            self._write_note(Note("link.refused", {"cause": cause, "times": times}, "warning"))

    def close(self) -> None:
        """Close both sockets; the ROUTER socket is its owner's."""
        self.zap_socket.close(linger=0)
        self.monitor.close(linger=0)

    def _observe(self, kind: int, value: int) -> None:
        if kind == zmq.EVENT_ACCEPTED:
            self._pending_handshakes[value] = None
        elif kind == zmq.EVENT_HANDSHAKE_SUCCEEDED and self._pending_handshakes:
            # The event does not say whose handshake it was. The oldest is right except for two at the same moment,
            # and then the counts are right again once both have gone.
            del self._pending_handshakes[next(iter(self._pending_handshakes))]
        elif kind == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            self._refuse("unencrypted" if value == MECHANISM_MISMATCH else "foreign_key")  # cannot decrypt it
            self._counted = True
        elif kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._counted = True  # in `answer`
        elif kind == zmq.EVENT_DISCONNECTED:
            if value in self._pending_handshakes:
                del self._pending_handshakes[value]
                if not self._counted:
                    self._refuse("no_handshake")
            self._counted = False
