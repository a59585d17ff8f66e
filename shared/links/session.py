"""One session of a link: numbering, heartbeats and silence.

ZMQ reconnects and drops messages silently, so a message that arrives proves nothing about those sent before it. A
session makes the loss visible: the router draws 64 random bits for each connection, and every message travels as
three frames,

    [session, 8 bytes] [sequence number, 8 bytes] [body: one msgpack message]

numbered from 0 (the `Hello`) in each direction. A gap, a repeat, foreign bytes or silence ends the session;
it is never repaired. Only `Closed` carries the number `LAST`, because its sender may not know the next number.

Also what both ends of a link share: settings, counters, the heartbeat, and the errors that bytes of a peer can raise.
Nothing here knows sockets, clocks or threads: callers pass `now` in seconds of any monotonic clock.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import msgspec

from shared.messages import Closed, Heartbeat, encode

LAST = 2**64 - 1
HEARTBEAT = encode(Heartbeat())

_NUMBER = struct.Struct("!Q")


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """Times and bounds of a link; both ends of a deployment should agree on the times."""

    heartbeat_seconds: float  # quiet for this long: send a heartbeat
    silence_seconds: float  # heard nothing for this long: the session is over; also the limit of a dial
    step_seconds_max: float = math.inf  # a worker's loop did not turn for this long: its sessions are over
    redial_seconds: float = 0.1  # first wait before dialing again; doubles up to `redial_seconds_max`
    redial_seconds_max: float = 2.0
    message_bytes_max: int = 16 << 20  # one body; a prompt of a million token ids is 5 MB
    unsent_messages_max: int = 4096  # high-water mark of each peer, in and out, inside ZMQ
    unread_messages_max: int = 16384  # events that wait for `receive`, all peers together


class SessionError(Exception):
    """The frames cannot be the next ones of this session; the message says why."""


# All that the bytes of a peer can raise.
UNREADABLE = (SessionError, msgspec.MsgspecError, ValueError, RecursionError)


@dataclass(frozen=True, slots=True)
class Envelope:
    """The three frames, read but not yet checked."""

    session: int
    number: int
    body: bytes


def open_envelope(frames: list[bytes]) -> Envelope:
    """Raises SessionError when these are not the frames of a message."""
    if len(frames) != 3 or len(frames[0]) != _NUMBER.size or len(frames[1]) != _NUMBER.size:
        raise SessionError("malformed: expected a session, a number and a body")
    return Envelope(_NUMBER.unpack(frames[0])[0], _NUMBER.unpack(frames[1])[0], frames[2])


def seal(session: int, number: int, body: bytes) -> list[bytes]:
    """The inverse of `open_envelope`."""
    return [_NUMBER.pack(session), _NUMBER.pack(number), body]


def closing_frames(session: int, reason: str) -> list[bytes]:
    """The last message of a session."""
    return seal(session, LAST, encode(Closed(reason)))


class Session:
    """One end of a session. Times are seconds of the caller's clock."""

    def __init__(self, session: int, settings: LinkSettings, now: float):
        self.session = session
        self._settings = settings
        self._sent = 0  # the number of the next message to send
        self._received = 0  # the number of the next message to receive
        self._sent_at = now
        self._heard_at = now

    def next_frames(self, body: bytes, now: float) -> list[bytes]:
        """Number one message."""
        frames = seal(self.session, self._sent, body)
        self._sent += 1
        self._sent_at = now
        return frames

    def accept(self, envelope: Envelope, now: float) -> None:
        """Raises SessionError unless `envelope` is the next message of this session, or its last."""
        if envelope.session != self.session:
            raise SessionError("another session")
        if envelope.number not in (self._received, LAST):
            kind = "gap" if envelope.number > self._received else "repeat"
            raise SessionError(f"{kind}: expected message {self._received}, met {envelope.number}")
        self._received += 1
        self._heard_at = now

    @property
    def deadline(self) -> float:
        """When this session next needs its end: for a heartbeat, or because it is over."""
        return min(self.heartbeat_at, self.silent_at)

    @property
    def heartbeat_at(self) -> float:
        """When a heartbeat is due if nothing else is sent."""
        return self._sent_at + self._settings.heartbeat_seconds

    @property
    def silent_at(self) -> float:
        """When the session is over if nothing more is heard."""
        return self._heard_at + self._settings.silence_seconds
