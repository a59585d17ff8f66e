"""Ids of the events of a stream: how much of it a client has, and a signed ticket that tells any router the rest.

    id: 120r30,95f.kpKyZjEyZTMxZWM…
        │      │  └ the ticket: whose answer it is, its seed, and the digest of the request; the same in all events
        │      └ 95 characters of the second choice, which is finished
        └ 120 characters of the first choice, and 30 of its thoughts; c4 would be so much of its calls of tools

Routers of a deployment have one key pair, so each can read the tickets of the others, and nobody else can write one.
Nothing is stored. A place is counted in characters of the text, and not in events: how tokens fall together into events
differs from run to run.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from shared.primitives.errors import RequestError

EVENT_ID_CHARS_MAX = 4096
MAC_BYTES = 16

_PLACE = re.compile(r"(?:(\d{1,9})(?:r(\d{1,9}))?(?:c(\d{1,9}))?)?(f?)")


class StreamTicket(msgspec.Struct, frozen=True, array_like=True):
    """What another router needs to know of a stream to write the same one."""

    rid: str  # of the HTTP request that began it: its answer is called so
    created: int  # seconds since 1970
    seed: int
    request: bytes  # digest of path, API key's name and body
    fingerprint: str  # of what computes: equal as long as the same seed gives the same output


@dataclass(frozen=True, slots=True)
class ChoicePlace:
    """How much of a choice a client has; `chars` None: not even its first event.

    `thoughts` are characters as well. `calls` are the characters of their arguments, and one for each name of a tool.
    """

    chars: int | None = None
    finished: bool = False
    thoughts: int = 0
    calls: int = 0

    def __str__(self) -> str:
        rest = f"{f'r{self.thoughts}' if self.thoughts else ''}{f'c{self.calls}' if self.calls else ''}"
        return f"{'' if self.chars is None else self.chars}{rest}{'f' if self.finished else ''}"


class StreamIds:
    """Writes and reads tickets. `link_secret` is what all routers of a deployment have, and nobody else."""

    def __init__(self, link_secret: bytes):
        self._key = hashlib.blake2b(b"ids of streams", key=link_secret[:64], digest_size=32).digest()

    def signed(self, ticket: StreamTicket) -> str:
        """The ticket as it stands in ids."""
        packed = msgspec.msgpack.encode(ticket)
        return base64.urlsafe_b64encode(self._mac(packed) + packed).rstrip(b"=").decode()

    def read(self, event_id: str) -> tuple[StreamTicket, list[ChoicePlace]]:
        """Ticket and places of an id. Raises `RequestError` (400) for one that no router here has written."""
        places, dot, text = event_id.partition(".")
        if not dot or len(event_id) > EVENT_ID_CHARS_MAX:
            raise _unknown()
        try:
            signed = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
        except (binascii.Error, ValueError):
            raise _unknown() from None
        mac, packed = signed[:MAC_BYTES], signed[MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(packed)):
            raise _unknown()
        try:
            ticket = msgspec.msgpack.decode(packed, type=StreamTicket)
        except msgspec.DecodeError:  # of another version
            raise _unknown() from None
        return ticket, [_place(each) for each in places.split(",")]

    def _mac(self, packed: bytes) -> bytes:
        return hashlib.blake2b(packed, key=self._key, digest_size=MAC_BYTES).digest()


def event_id(places: Sequence[ChoicePlace], signed_ticket: str) -> str:
    """The id of an event after which a client has so much of each choice."""
    return f"{','.join(map(str, places))}.{signed_ticket}"


def _place(text: str) -> ChoicePlace:
    found = _PLACE.fullmatch(text)
    if found is None:
        raise _unknown()
    chars, thoughts, calls, finished = found.groups()
    return ChoicePlace(int(chars) if chars else None, bool(finished), int(thoughts or 0), int(calls or 0))


def _unknown() -> RequestError:
    return RequestError(
        "Last-Event-ID is not an id of this deployment's streams; leave it out to begin a new one",
        code="invalid_event_id",
    )
