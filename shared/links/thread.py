"""The I/O thread of a process's links, and the two queues between it and the other threads.

    caller's threads                    link thread
    send, connect  --> commands  -->    poll -> commands -> read -> tick -> flush
    receive        <-- inbox     <--    events

Heartbeats flow while the caller is busy with a long step. Only the link thread touches the sockets, from its start
to its end. It also writes the ends' notes to the log. Knows neither roles nor frames: `End` decides, `LinkSockets`
holds the sockets.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from functools import partial
from typing import Literal, Protocol

import structlog

from shared.batch.effects import Note
from shared.links.counters import LinkCounters
from shared.links.events import LinkEvent
from shared.links.inbox import Inbox
from shared.links.poller import SocketPoller
from shared.links.session import LinkSettings, reason_of
from shared.wire.messages import Message, encode

log = structlog.get_logger(__name__)

CLOSE_SECONDS = 5.0
WAIT_SECONDS_MAX = 60.0
COMMAND_BYTES = 512  # of one that waits, beside the body; measured 400

Command = Callable[[float], None]  # called on the link thread with `now`
WriteNote = Callable[[Note], None]
PeerSession = tuple[str, int]  # the peer's name, the session's number


class End(Protocol):
    """What decides: `WorkerEnd` or `RouterEnd`."""

    events: list[LinkEvent]
    notes: list[Note]
    counters: LinkCounters
    deadline: float
    received_bytes: int

    def tick(self, now: float) -> None: ...

    def send(self, peer: str, session: int, body: bytes, now: float) -> None: ...

    def give_up(self, peer: str, session: int, reason: str, now: float) -> None: ...


class LinkSockets(Protocol):
    """What holds the sockets of an end."""

    def register(self, poller: SocketPoller) -> None:
        """Tell the poller what to wait for, once."""

    def read(self, ready: Collection[object], now: float, unread_full: bool) -> None:
        """Feed the end from the sockets that are ready; with `unread_full`, refuse to."""

    def flush(self, now: float) -> None:
        """Carry out what the end has decided, never blocking."""

    def close(self, now: float) -> None:
        """End all sessions and close all sockets."""


class Outbox:
    """What waits for the link thread to send it, in bytes by session. A session over its bound is given up."""

    def __init__(self, unsent_bytes_max: int):
        self._unsent_bytes_max = unsent_bytes_max
        self._unsent_bytes: dict[PeerSession, int] = {}
        self._given_up: set[PeerSession] = set()
        self._lock = threading.Lock()

    def add(self, session: PeerSession, body: bytes) -> Literal["waits", "over", "given up"]:
        """Whether this body may wait. "over" is answered once, for who gives the session up."""
        with self._lock:
            unsent_bytes = self._unsent_bytes.get(session, 0) + len(body) + COMMAND_BYTES
            if session in self._given_up:
                return "given up"
            if unsent_bytes > self._unsent_bytes_max:
                self._given_up.add(session)
                return "over"
            self._unsent_bytes[session] = unsent_bytes
            return "waits"

    def remove(self, session: PeerSession, body: bytes) -> None:
        """Take a body off the count of unsent bytes: it is being sent."""
        with self._lock:
            self._unsent_bytes[session] -= len(body) + COMMAND_BYTES
            if not self._unsent_bytes[session]:
                del self._unsent_bytes[session]

    def forget(self, session: PeerSession) -> None:
        """Drop a session that has been given up."""
        with self._lock:
            self._given_up.discard(session)


class ThreadedLinks:
    """The links of one process: runs an end and its wire on a thread of their own until `close`."""

    def __init__(
        self,
        end: End,
        wire: LinkSockets,
        settings: LinkSettings,
        *,
        on_ready: Callable[[], None] | None = None,
        write_note: WriteNote,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._end = end
        self._wire = wire
        self._silence_seconds = settings.silence_seconds
        self._write_note = write_note
        self._clock = clock
        self._turned_at = clock()
        self._inbox = Inbox(settings, on_ready)
        self._outbox = Outbox(settings.unsent_bytes_max)
        # messages that were not sent, since their peers do not know them
        self._not_understood: set[str] = set()
        self._received_bytes = 0  # of the end, when it was last looked at
        self._commands: deque[Command] = deque()
        self._closing = False
        self._wake_recv, self._wake_send = socket.socketpair()
        self._wake_recv.setblocking(False)
        self._wake_send.setblocking(False)
        self._poller = SocketPoller()
        self._thread = threading.Thread(target=self._run, name="links", daemon=True)
        self._thread.start()

    def receive(self, timeout_seconds: float) -> list[LinkEvent]:
        """The next events; waits for one, or `wake`, up to the timeout. Raises InvariantError if the thread died."""
        return self._inbox.take(timeout_seconds)

    def wake(self) -> None:
        """Let a waiting `receive` return; from any thread."""
        self._inbox.wake()

    def send(self, peer: str, message: Message) -> None:
        """Queue a message for the session of `peer` whose PeerUp `receive` returned; from any thread.

        It is dropped and counted when that session is over: its PeerDown is then on the way, or was received. When
        unsent_bytes_max would be passed, the session ends. A message that the peer's version does not know is not
        sent: the caller should have asked `Hello.reads`.
        """
        hello = self._inbox.hellos.get(peer)
        if hello is not None and not hello.reads(type(message)):
            self.command(partial(self._note_not_understood, peer, type(message).__name__))
            return
        session = (peer, self.session_of(peer))
        body = encode(message)
        verdict = self._outbox.add(session, body)
        if verdict == "waits":
            self.command(partial(self._send, session, body))
        elif verdict == "over":
            self.command(partial(self._give_up, session))

    def session_of(self, peer: str) -> int:
        """The number of its session, as far as the caller of `receive` knows; -1: there is none."""
        hello = self._inbox.hellos.get(peer)
        return hello.session if hello is not None else -1

    def command(self, command: Command) -> None:
        """Run this on the link thread, in order; from any thread."""
        self._commands.append(command)
        self._wake_thread()

    def close(self) -> None:
        """End all sessions, close the sockets and join the thread; a second time is a no-op."""
        if self._closing:
            return
        self._closing = True
        self._wake_thread()
        self._thread.join(CLOSE_SECONDS)
        self._poller.close()
        self._wake_recv.close()
        self._wake_send.close()

    def _note_not_understood(self, peer: str, name: str, now: float) -> None:
        """Counted always, but written once for each message: a mistake may repeat with every token."""
        del now
        self._end.counters.not_understood += 1
        if name not in self._not_understood:
            self._not_understood.add(name)
            self._end.notes.append(Note("link.not_understood", {"peer": peer, "message": name}, "error"))

    def _send(self, session: PeerSession, body: bytes, now: float) -> None:
        self._outbox.remove(session, body)
        try:
            self._end.send(*session, body, now)
        except Exception as error:  # whatever one link meets, the others live
            self._end.give_up(*session, reason_of(error), now)

    def _give_up(self, session: PeerSession, now: float) -> None:
        self._end.give_up(*session, "unsent_bytes_max reached", now)
        self._outbox.forget(session)

    def _wake_thread(self) -> None:
        try:
            self._wake_send.send(b"\0")
        except BlockingIOError:
            return  # a wake-up is pending already

    def _run(self) -> None:
        self._poller.register(self._wake_recv)
        self._wire.register(self._poller)
        try:
            while not self._closing:
                self._turn()
            now = self._clock()
            self._carry_out_commands(now)  # messages sent before `close` go before the Closed
            self._wire.close(now)
            self._write_notes()
        except BaseException as failure:
            log.critical("link.thread_died", exc_info=True)
            self._inbox.fail(failure)
            raise

    def _turn(self) -> None:
        due_at = max(self._turned_at, min(self._end.deadline, self._turned_at + WAIT_SECONDS_MAX))
        wait_seconds = max(due_at - self._clock(), 0.0)
        ready = self._poller.poll(wait_seconds)
        now = self._turned_at = self._clock()
        if now - due_at >= self._silence_seconds:
            # We were frozen longer than our peers wait: the messages that have arrived are of sessions that are over.
            self._end.tick(now)
        if self._wake_recv in ready:
            self._wake_recv.recv(4096)
        self._carry_out_commands(now)
        self._wire.read(ready, now, self._inbox.full)
        self._end.tick(now)  # after reading: a peer whose heartbeat waits in the socket is not silent
        self._wire.flush(now)
        if self._end.events:
            events, self._end.events = self._end.events, []
            self._inbox.put(events, self._end.received_bytes - self._received_bytes)
            self._received_bytes = self._end.received_bytes
        self._write_notes()

    def _write_notes(self) -> None:
        notes, self._end.notes = self._end.notes, []
        for note in notes:
            self._write_note(note)

    def _carry_out_commands(self, now: float) -> None:
        for _ in range(len(self._commands)):
            command = self._commands.popleft()
            try:
                command(now)
            except Exception as error:  # whatever one command meets, the other links live
                log.error("link.command_failed", reason=reason_of(error))
