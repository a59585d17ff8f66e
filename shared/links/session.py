"""One session of a link: numbering, heartbeats and silence.

ZMQ reconnects and drops messages silently, so a message that arrives proves nothing about those sent before it. A
session makes the loss visible: the router draws 64 random bits for each connection, and every message travels as
one or more parts, each of two frames,

    [session, 8 bytes | sequence number, 8 bytes | more parts follow, 1 byte] [part of one msgpack message]

numbered from 0 (the `Hello`) in each direction. A gap, a repeat, foreign bytes or silence ends the session;
it is never repaired. Only `Closed` carries the number `LAST`, because its sender may not know the next number.

Parts are small because ZMQ applies its limit on a frame to strangers too, who have not proven a key yet: what they can
make a process keep is one frame each. Large messages are joined here, and their size is checked while they arrive.

Also what both ends of a link share: settings, counters, the heartbeat, and the errors that bytes of a peer can raise.
Nothing here knows sockets, clocks or threads: callers pass `now` in seconds of any monotonic clock.
"""

from __future__ import annotations

import math
import struct
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from shared.wire.messages import READABLE, Closed, Heartbeat, Message, Role, encode

LAST = 2**64 - 1
HEARTBEAT = encode(Heartbeat())
FRAME_BYTES_MAX = 64 << 10  # as ZMQ counts it, encrypted
PART_BYTES_MAX = FRAME_BYTES_MAX - 1024  # the rest is more than CURVE adds
REASON_CHARACTERS_MAX = 1000  # of a Closed, which has one part


_HEADER = struct.Struct("!QQ?")
_AnyMessage = TypeVar("_AnyMessage", bound=Message)


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """Times and bounds of a link; both ends of a deployment should agree on the times."""

    heartbeat_seconds: float  # quiet for this long: send a heartbeat
    silence_seconds: float  # heard nothing for this long: the session is over; also the limit of a dial
    step_seconds_max: float = math.inf  # a worker's loop did not turn for this long: its sessions are over
    redial_seconds: float = 0.1  # first wait before dialing again; doubles up to `redial_seconds_max`
    redial_seconds_max: float = 2.0
    message_bytes_max: int = 8 << 20  # one body for a worker; a prompt of a million token ids is 5 MB
    report_bytes_max: int = 1 << 20  # one body for a router; the tokens of 4,096 requests are 0.2 MB
    unsent_messages_max: int = 4096  # high-water mark of each peer, in and out, inside ZMQ; counts parts
    unsent_bytes_max: int = 64 << 20  # bodies for one peer that wait for the link thread
    unread_messages_max: int = 16384  # events that wait for `receive`, all peers together
    unread_bytes_max: int = 32 << 20  # bodies of those events as they came; prompts take 14 times that


class SessionError(Exception):
    """The frames cannot be the next ones of this session; the message says why."""


# All that the bytes of a peer can raise.
UNREADABLE = (SessionError, msgspec.MsgspecError, ValueError, RecursionError)


class Envelope(msgspec.Struct, frozen=True):
    """The two frames of a part, read but not yet checked."""

    session: int
    number: int
    more: bool  # other parts of the same message follow
    part: bytes


class _Tagged(msgspec.Struct):
    """What every message is, known or not."""

    type: str


def read_message(decode: Callable[[bytes], _AnyMessage], body: bytes, reader: Role) -> _AnyMessage:
    """Decode what arrived. Raises one of UNREADABLE; an unknown message is named.

    An unknown message ends its session as any other fault does: its reader cannot know whether a request waits for it.
    """
    try:
        return decode(body)
    except msgspec.ValidationError:
        name = msgspec.msgpack.decode(body, type=_Tagged).type
        if name in READABLE[reader]:
            raise
        raise SessionError(
            f"unknown message {name[:REASON_CHARACTERS_MAX]!r}: a {reader} of this version does not read it"
        ) from None


def reason_of(error: Exception) -> str:
    """Why an error of our own ends a session: what it was and where it arose. Its message may quote a client."""
    places = traceback.extract_tb(error.__traceback__)
    where = f" at {Path(places[-1].filename).name}:{places[-1].lineno}" if places else ""
    return f"{type(error).__name__}{where}"


def open_envelope(frames: list[bytes]) -> Envelope:
    """Raises SessionError when these are not the frames of a part."""
    if len(frames) != 2 or len(frames[0]) != _HEADER.size:
        raise SessionError("malformed: expected a header and a part")
    session, number, more = _HEADER.unpack(frames[0])
    return Envelope(session, number, more, frames[1])


def seal(session: int, number: int, part: bytes, *, more: bool = False) -> list[bytes]:
    """The inverse of `open_envelope`."""
    return [_HEADER.pack(session, number, more), part]


def closing_frames(session: int, reason: str) -> list[bytes]:
    """The last message of a session."""
    return seal(session, LAST, encode(Closed(reason[:REASON_CHARACTERS_MAX])))


class Session:
    """One end of a session. Times are seconds of the caller's clock."""

    def __init__(self, session: int, settings: LinkSettings, now: float):
        self.session = session
        self._settings = settings
        self._sent = 0  # the number of the next part to send
        self._received = 0  # the number of the next part to receive
        self._joined = bytearray()  # parts of a message whose last has not arrived
        self._sent_at = now
        self._heard_at = now

    def next_parts(self, body: bytes, now: float) -> list[list[bytes]]:
        """The frames of each part of one message, numbered."""
        begins = range(0, max(len(body), 1), PART_BYTES_MAX)
        parts = [
            seal(self.session, number, body[begin : begin + PART_BYTES_MAX], more=begin != begins[-1])
            for number, begin in enumerate(begins, self._sent)
        ]
        self._sent += len(parts)
        self._sent_at = now
        return parts

    def accept(self, envelope: Envelope, now: float) -> bytes | None:
        """The message that this part completes, if it does.

        Raises SessionError unless `envelope` is the next part of this session, or its last.
        """
        if envelope.session != self.session:
            raise SessionError("another session")
        if envelope.number not in (self._received, LAST):
            kind = "gap" if envelope.number > self._received else "repeat"
            raise SessionError(f"{kind}: expected part {self._received}, met {envelope.number}")
        self._received += 1
        self._heard_at = now
        if envelope.number == LAST or not (self._joined or envelope.more):
            return envelope.part
        return self._join(envelope)

    def _join(self, envelope: Envelope) -> bytes | None:
        self._joined += envelope.part
        if len(self._joined) > self._settings.message_bytes_max:
            self._joined.clear()
            raise SessionError(f"malformed: a message of more than {self._settings.message_bytes_max} bytes")
        if envelope.more:
            return None
        body = bytes(self._joined)
        self._joined.clear()
        return body

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
