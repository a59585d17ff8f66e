"""The router's end of its links: dials workers, greets them, and dials again whenever a session ends.

    resting --redial_at--> greeting --Hello--> up
       ^----- refused, silent, put off -'       |
       ^--------- gap, silence, Closed, send ---'

Every session has a connection of its own, so nothing of an older session can arrive on it. Knows no sockets, no clock
and no randomness (session numbers come from `draw_session`), and does not log: what it decides is appended to
`outgoing`, `events` and `notes`, and its shell carries out all three in order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec

from shared.batch.effects import Note
from shared.links.counters import LinkCounters
from shared.links.events import LinkEvent, PeerDown, PeerUp, Received, peer_name
from shared.links.session import (
    HEARTBEAT,
    PART_BYTES_MAX,
    REASON_CHARACTERS_MAX,
    UNREADABLE,
    LinkSettings,
    Session,
    SessionError,
    closing_frames,
    open_envelope,
    read_message,
    reason_of,
)
from shared.primitives.backoff import backoff_seconds
from shared.wire.messages import (
    PROTOCOL,
    UNDERSTOOD,
    Closed,
    Heartbeat,
    Hello,
    Load,
    decode_from_worker,
    encode,
)

LOOK_SECONDS = 0.05  # between two looks at all links: so late a heartbeat or an end by silence may be
FAULT_REST_SECONDS = (
    1.0  # after a session that the worker's own words have ended; doubles by each further one …
)
FAULT_REST_SECONDS_MAX = 60.0
FAULTS_FORGOTTEN_SECONDS = 600.0  # … until it has been in order for so long
UNREACHABLE_SECONDS = 60.0  # until a warning: a worker that starts may load its model for this long


@dataclass(frozen=True, slots=True)
class Dial:
    """Open a new connection to this address."""

    address: str
    ungreeted: int  # dials of it that ended without a Hello: where workers may have one of several keys, try the next


@dataclass(frozen=True, slots=True)
class SendFrames:
    """Send these on the connection to this address."""

    address: str
    frames: list[bytes]


@dataclass(frozen=True, slots=True)
class HangUp:
    """Drop the connection to this address."""

    address: str


@dataclass(slots=True)
class _WorkerLink:
    address: str
    redial_at: float
    down_since: float
    session: Session | None = None  # None: resting until redial_at
    peer: str = ""  # "": greeting, or resting
    failures: int = 0  # since the last PeerUp
    ungreeted: int = 0  # dials that ended without a Hello
    faults: int = 0  # sessions that its own words have ended, lately
    faulted_at: float = 0.0
    warned: bool = False  # of being unreachable, since the last PeerUp


class RouterEnd:
    """All sessions of one router."""

    def __init__(
        self, hello: Hello, settings: LinkSettings, counters: LinkCounters, draw_session: Callable[[], int]
    ):
        self.outgoing: list[Dial | SendFrames | HangUp] = []
        self.events: list[LinkEvent] = []
        self.notes: list[Note] = []
        self.deadline = float("inf")  # call `tick` by then, seconds of the caller's clock
        self.received_bytes = 0  # bodies of all `Received` so far but loads, see `inbox`
        self.counters = counters
        self._hello = msgspec.structs.replace(hello, understands=UNDERSTOOD["router"])
        self._settings = settings
        self._receiving = replace(settings, message_bytes_max=settings.report_bytes_max)
        self._draw_session = draw_session
        self._links: dict[str, _WorkerLink] = {}  # by address
        self._peers: dict[str, _WorkerLink] = {}

    def connect(self, address: str, now: float) -> None:
        """Dial this worker from now on; a no-op for an address already dialed."""
        if address not in self._links:
            self._links[address] = _WorkerLink(address, redial_at=now, down_since=now)
            self.deadline = min(self.deadline, now)

    def redial(self, address: str, now: float) -> None:
        """Dial this worker at once if it is known and its link rests."""
        link = self._links.get(address)
        if link is not None and link.session is None:
            link.redial_at = now
            self.deadline = min(self.deadline, now)

    def disconnect(self, address: str, now: float) -> None:
        """End the session with this worker and stop dialing it."""
        self.end(address, "disconnected here", now)
        self._links.pop(address, None)

    def receive(self, address: str, frames: list[bytes], now: float) -> None:
        """Take one part of a message from a worker; whatever is wrong with it ends this session only."""
        link = self._links.get(address)
        if link is None or link.session is None:
            self.counters.out_of_session += 1
            return
        try:
            body = link.session.accept(open_envelope(frames), now)
            if body is not None:
                self._deliver(link, link.session.session, body, now)
        except UNREADABLE as error:
            self.counters.malformed += 1
            self.end(address, str(error), now, fault=isinstance(error, msgspec.MsgspecError))
        except Exception as error:
            self.fail(address, error, now)

    def send(self, peer: str, session: int, body: bytes, now: float) -> None:
        """Send within `session`. Dropped and counted when it is over: its PeerDown is then on the way to the sender."""
        link = self._peers.get(peer)
        if link is None or link.session is None or link.session.session != session:
            self.counters.messages_unsent += 1
        elif len(body) > self._settings.message_bytes_max:
            self.end(link.address, f"a message of {len(body)} bytes is over message_bytes_max", now)
        else:
            self._queue(link, link.session, body, now)

    def end_faulty(self, peer: str, session: int, reason: str, now: float) -> None:
        """End this session with a worker, if it is still up, because of what it said. It is dialed later each time."""
        link = self._peers.get(peer)
        if link is not None and link.session is not None and link.session.session == session:
            self.end(link.address, reason, now, fault=True)

    def give_up(self, peer: str, session: int, reason: str, now: float) -> None:
        """End this session with a peer if it is still up: its messages cannot be sent."""
        link = self._peers.get(peer)
        if link is not None and link.session is not None and link.session.session == session:
            self.end(link.address, reason, now)

    def fail(self, address: str, error: Exception, now: float) -> None:
        """End the session with this worker after an error of ours: the others live."""
        reason = reason_of(error)
        self.notes.append(Note("link.failed", {"address": address, "reason": reason}, "error"))
        link = self._links.get(address)
        if link is not None and link.session is None:
            self._rest(link, now)  # it failed before there was a session to end
        self.end(address, reason, now)

    def end(self, address: str, reason: str, now: float, *, fault: bool = False) -> None:
        """End the session with this worker, if there is one, and dial again after a rest; `fault`: by its own words."""
        link = self._links.get(address)
        if link is None or link.session is None:
            return
        self.outgoing += [SendFrames(address, closing_frames(link.session.session, reason)), HangUp(address)]
        self._rest(link, now)
        if fault:
            self._rest_longer(link, now)
        if link.peer:
            del self._peers[link.peer]
            self.counters.sessions_ended += 1
            self.events.append(PeerDown(link.peer, reason))
            self.notes.append(Note("link.down", {"peer": link.peer, "address": address, "reason": reason}))
            link.peer, link.down_since = "", now
        else:
            link.ungreeted += 1
            self._note_unreachable(link, reason, now)

    def put_off(self, address: str, now: float) -> None:
        """The dial has not begun: the worker's name is being looked up. It comes again soon, and this is no failure."""
        link = self._links.get(address)
        if link is not None and link.session is not None:
            link.session, link.redial_at = None, now + LOOK_SECONDS
            self.deadline = min(self.deadline, link.redial_at)

    def tick(self, now: float) -> None:
        """Dial, send the heartbeats that are due and end the sessions that went silent."""
        if now < self.deadline:
            return
        self.deadline = float("inf")
        for link in self._links.values():
            try:
                self._tick_link(link, now)
            except Exception as error:
                self.fail(link.address, error, now)
            self.deadline = min(self.deadline, link.session.deadline if link.session else link.redial_at)
        self.deadline = max(self.deadline, now + LOOK_SECONDS)

    def close(self, now: float) -> None:
        """End all sessions and stop dialing."""
        for address in list(self._links):
            self.disconnect(address, now)

    def _tick_link(self, link: _WorkerLink, now: float) -> None:
        if link.session is not None and now >= link.session.silent_at:
            self.end(link.address, "silence", now)
        elif link.session is None and now >= link.redial_at:
            self._dial(link, now)
        elif link.session is not None and now >= link.session.heartbeat_at:
            self._queue(link, link.session, HEARTBEAT, now)

    def _queue(self, link: _WorkerLink, session: Session, body: bytes, now: float) -> None:
        self.outgoing += [SendFrames(link.address, frames) for frames in session.next_parts(body, now)]

    def _dial(self, link: _WorkerLink, now: float) -> None:
        link.session = Session(self._draw_session(), self._receiving, now)
        hello = encode(msgspec.structs.replace(self._hello, session=link.session.session))
        self.outgoing.append(Dial(link.address, link.ungreeted))
        self._queue(link, link.session, hello, now)

    def _rest(self, link: _WorkerLink, now: float) -> None:
        link.session = None
        link.failures += 1
        rest_seconds = backoff_seconds(
            link.failures, self._settings.redial_seconds, self._settings.redial_seconds_max
        )
        link.redial_at = now + rest_seconds
        self.deadline = min(self.deadline, link.redial_at)

    def _rest_longer(self, link: _WorkerLink, now: float) -> None:
        """A worker that comes back at once takes requests each time, and each time they lose it."""
        if now - link.faulted_at > FAULTS_FORGOTTEN_SECONDS:
            link.faults = 0
        link.faults += 1
        link.faulted_at = now
        rest_seconds = backoff_seconds(link.faults, FAULT_REST_SECONDS, FAULT_REST_SECONDS_MAX)
        link.redial_at = max(link.redial_at, now + rest_seconds)

    def _deliver(self, link: _WorkerLink, session: int, body: bytes, now: float) -> None:
        message = read_message(decode_from_worker, body, "router")
        if isinstance(message, Hello) and len(body) > PART_BYTES_MAX:
            raise SessionError("malformed: a Hello of several parts")
        if isinstance(message, Closed):
            self.end(link.address, f"closed by the worker: {message.reason[:REASON_CHARACTERS_MAX]}", now)
        elif not link.peer:
            self._greeted(link, session, message, now)
        elif isinstance(message, Hello):
            raise SessionError("malformed: a Hello within a session")
        elif not isinstance(message, Heartbeat):
            self.received_bytes += 0 if isinstance(message, Load) else len(body)
            self.events.append(Received(link.peer, message))

    def _greeted(self, link: _WorkerLink, session: int, message: object, now: float) -> None:
        if not isinstance(message, Hello) or message.session != session:
            raise SessionError("malformed: the first message of a session is its Hello")
        peer = peer_name(message)
        if refusal := self._refusal(message, peer):
            self.counters.refused_hello += 1
            fields = {"peer": peer, "address": link.address, "reason": refusal}
            self.notes.append(Note("link.refused", fields, "warning"))
            self.end(link.address, refusal, now)
            return
        link.peer, link.failures, link.warned = peer, 0, False
        self._peers[peer] = link
        self.counters.sessions_begun += 1
        self.events.append(PeerUp(peer, message))
        self.notes.append(Note("link.up", {"peer": peer, "address": link.address}))

    def _refusal(self, hello: Hello, peer: str) -> str:
        """Why this worker is not linked; empty: it is."""
        if hello.protocol != PROTOCOL or hello.role == "router":
            return f"expected a worker of protocol {PROTOCOL}, met {hello.role} of protocol {hello.protocol}"
        if peer in self._peers:
            return f"the same worker is linked through {self._peers[peer].address}"
        return ""

    def _note_unreachable(self, link: _WorkerLink, reason: str, now: float) -> None:
        """One line for the first dial that fails, and one warning when it has lasted."""
        seconds = now - link.down_since
        fields = {"address": link.address, "reason": reason, "seconds": round(seconds)}
        if not link.warned and seconds >= UNREACHABLE_SECONDS:
            link.warned = True
            self.notes.append(Note("link.unreachable", fields, "warning"))
        elif link.failures == 1:
            self.notes.append(Note("link.unreachable", fields))
