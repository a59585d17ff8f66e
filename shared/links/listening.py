"""The worker's end of its links: accepts the sessions that routers open, and ends them.

A connection is known by the bytes that the ROUTER socket gives it, a router by its name. One router has at most one
session: a new `Hello` ends the old one. A worker whose loop hangs has no sessions (`loop_watch`). Knows no sockets and
no clock, and does not log: what it decides is appended to `outgoing`, `events` and `notes`, and its shell carries out
all three in order.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from shared.batch.effects import Note
from shared.links.counters import LinkCounters
from shared.links.events import LinkEvent, PeerDown, PeerUp, Received, peer_name
from shared.links.session import (
    HEARTBEAT,
    LAST,
    REASON_CHARACTERS_MAX,
    UNREADABLE,
    Envelope,
    LinkSettings,
    Session,
    SessionError,
    closing_frames,
    open_envelope,
    read_message,
    reason_of,
)
from shared.primitives.loop_watch import LoopWatch
from shared.wire.messages import (
    PROTOCOL,
    UNDERSTOOD,
    Closed,
    Heartbeat,
    Hello,
    RouterToWorker,
    decode_from_router,
    encode,
)


@dataclass(slots=True)
class _RouterSession:
    peer: str
    session: Session


class WorkerEnd:
    """All sessions of one worker."""

    def __init__(self, hello: Hello, settings: LinkSettings, counters: LinkCounters):
        self.outgoing: list[tuple[bytes, list[bytes]]] = []  # (connection, frames)
        self.events: list[LinkEvent] = []
        self.notes: list[Note] = []
        self.deadline = float("inf")  # call `tick` by then, seconds of the caller's clock
        self.received_bytes = 0  # bodies of all `Received` so far
        self.counters = counters
        self.loop_watch = LoopWatch(settings.step_seconds_max)
        self._hello = msgspec.structs.replace(hello, understands=UNDERSTOOD[hello.role])
        self._decode = decode_from_router[hello.role]  # a message for the other role is malformed here
        self._settings = settings
        self._links: dict[bytes, _RouterSession] = {}  # by connection
        self._connections: dict[str, bytes] = {}  # by peer

    def receive(self, connection: bytes, frames: list[bytes], now: float) -> None:
        """Take one part of a message from a connection; whatever is wrong with it ends that session only."""
        try:
            envelope = open_envelope(frames)
            link = self._links.get(connection)
            if link is None or (envelope.number == 0 and envelope.session != link.session.session):
                self._open(connection, envelope, now)
            elif envelope.session != link.session.session:
                self.counters.out_of_session += 1  # the end of an older session of this very connection
            else:
                body = link.session.accept(envelope, now)
                if body is not None:
                    self._deliver(connection, link, body)
        except UNREADABLE as error:
            self.counters.malformed += 1
            self.end(connection, str(error))
        except Exception as error:
            self.fail(connection, error)

    def send(self, peer: str, session: int, body: bytes, now: float) -> None:
        """Send within `session`. Dropped and counted when it is over: its PeerDown is then on the way to the sender."""
        connection = self._connections.get(peer, b"")
        link = self._links.get(connection)
        if link is None or link.session.session != session:
            self.counters.messages_unsent += 1
        elif len(body) > self._settings.report_bytes_max:
            self.end(connection, f"a message of {len(body)} bytes is over report_bytes_max")
        else:
            self._queue(connection, link.session, body, now)

    def give_up(self, peer: str, session: int, reason: str, now: float) -> None:
        """End this session with a peer if it is still up: its messages cannot be sent."""
        del now
        connection = self._connections.get(peer, b"")
        link = self._links.get(connection)
        if link is not None and link.session.session == session:
            self.end(connection, reason)

    def fail(self, connection: bytes, error: Exception) -> None:
        """End this connection's session after an error of ours: the others live."""
        reason = reason_of(error)
        self.notes.append(Note("link.failed", {"reason": reason}, "error"))
        self.end(connection, reason)

    def end(self, connection: bytes, reason: str) -> None:
        """End this connection's session, if it has one, and tell its router."""
        link = self._links.pop(connection, None)
        if link is None:
            return
        del self._connections[link.peer]
        self.counters.sessions_ended += 1
        self.events.append(PeerDown(link.peer, reason))
        self.outgoing.append((connection, closing_frames(link.session.session, reason)))
        self.notes.append(Note("link.down", {"peer": link.peer, "reason": reason}))

    def tick(self, now: float) -> None:
        """Send the heartbeats that are due and end the sessions that went silent; all of them if the loop hangs."""
        if now < self.deadline:
            return
        self.deadline = float("inf")
        for connection, link in list(self._links.items()):
            try:
                self._tick_link(connection, link, now)
            except Exception as error:
                self.fail(connection, error)
        if self.loop_watch.hangs(now) and self._links:
            self._end_all_because_the_loop_hangs()

    def _end_all_because_the_loop_hangs(self) -> None:
        self.counters.loop_hangs += 1
        seconds = self.loop_watch.seconds_max
        self.notes.append(Note("link.loop_hangs", {"step_seconds_max": seconds}, "warning"))
        for connection in list(self._links):
            self.end(connection, self._hanging)

    @property
    def _hanging(self) -> str:
        return f"the worker's loop has not turned for {self.loop_watch.seconds_max:g} s"

    def close(self) -> None:
        """End all sessions."""
        for connection in list(self._links):
            self.end(connection, "closed here")

    def _tick_link(self, connection: bytes, link: _RouterSession, now: float) -> None:
        if now >= link.session.silent_at:
            self.end(connection, "silence")
            return
        if now >= link.session.heartbeat_at:
            self._queue(connection, link.session, HEARTBEAT, now)
        self.deadline = min(self.deadline, link.session.deadline, self.loop_watch.deadline)

    def _queue(self, connection: bytes, session: Session, body: bytes, now: float) -> None:
        self.outgoing += [(connection, frames) for frames in session.next_parts(body, now)]

    def _open(self, connection: bytes, envelope: Envelope, now: float) -> None:
        if envelope.number != 0:
            self.counters.out_of_session += 1
            if envelope.number != LAST:
                self.outgoing.append((connection, closing_frames(envelope.session, "no such session")))
            return
        hello = self._read(envelope.part)
        if not isinstance(hello, Hello) or hello.session != envelope.session or envelope.more:
            raise SessionError("malformed: the first message of a session is its Hello")
        if hello.protocol != PROTOCOL or hello.role != "router":
            self._refuse(connection, hello)
            return
        if self.loop_watch.hangs(now):
            self.outgoing.append((connection, closing_frames(hello.session, self._hanging)))
            return
        self._accept(connection, hello, now)

    def _refuse(self, connection: bytes, hello: Hello) -> None:
        self.counters.refused_hello += 1
        reason = f"expected a router of protocol {PROTOCOL}, met {hello.role} of protocol {hello.protocol}"
        self.outgoing.append((connection, closing_frames(hello.session, reason)))
        self.notes.append(Note("link.refused", {"peer": peer_name(hello), "reason": reason}, "warning"))

    def _accept(self, connection: bytes, hello: Hello, now: float) -> None:
        peer = peer_name(hello)
        self.end(connection, "a new session on the same connection")
        self.end(self._connections.get(peer, b""), "a new session of the same router")
        link = _RouterSession(peer, Session(hello.session, self._settings, now))
        link.session.accept(Envelope(hello.session, 0, False, b""), now)
        self._links[connection] = link
        self._connections[peer] = connection
        self.counters.sessions_begun += 1
        answer = encode(msgspec.structs.replace(self._hello, session=hello.session))
        self._queue(connection, link.session, answer, now)
        self.deadline = min(self.deadline, link.session.deadline, self.loop_watch.deadline)
        self.events.append(PeerUp(peer, hello))
        self.notes.append(Note("link.up", {"peer": peer}))

    def _read(self, body: bytes) -> RouterToWorker:
        return read_message(self._decode, body, self._hello.role)

    def _deliver(self, connection: bytes, link: _RouterSession, body: bytes) -> None:
        message = self._read(body)
        if isinstance(message, Closed):
            self.end(connection, f"closed by the router: {message.reason[:REASON_CHARACTERS_MAX]}")
        elif isinstance(message, Hello):
            raise SessionError("malformed: a Hello within a session")
        elif not isinstance(message, Heartbeat):
            self.received_bytes += len(body)
            self.events.append(Received(link.peer, message))
