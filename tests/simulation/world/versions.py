"""Processes of two versions in one world: the newer one knows a message more, and its messages have a field more.

A seed has old processes only, new ones only, both, or a rolling upgrade: each process is old when the world begins, and
new when it comes again. New ones send `Novelty` now and then, to those that understand it; it asks for nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from shared.wire.messages import (
    Failed,
    Foreseen,
    Hello,
    Load,
    Message,
    Paused,
    Role,
    RouterToDecode,
    RouterToPrefill,
    Scored,
    Serve,
    WorkerToRouter,
    decode_from_router,
    decode_from_worker,
    encode,
)
from tests.doubles.novelty import Novelty

Luck = Callable[[str], random.Random]  # a generator of its own for each purpose
WAYS = ("old", "new", "both", "both", "rolling", "rolling")
NEWER = (
    Failed.__name__,
    Foreseen.__name__,
    Novelty.__name__,
    Paused.__name__,
    Scored.__name__,
    Serve.__name__,
)
NOVELTIES = 0.05  # share of the messages received that a new process answers with one
LATER_FIELD = encode("of_a_later_version") + encode(("unheard", 1))
FIELDS_MAX = 15  # of a map whose length is in its first byte …
MAP_OF_MORE = b"\xde"  # … and the first byte of one whose length is in the next two

OLDER_READERS: Mapping[Role, Callable[[bytes], Message]] = {
    **decode_from_router,
    "router": decode_from_worker,
}
_NEWER_UNIONS: Mapping[Role, Any] = {
    "prefill": RouterToPrefill | Novelty,
    "decode": RouterToDecode | Novelty,
    "router": WorkerToRouter | Novelty,
}
NEWER_READERS: Mapping[Role, Callable[[bytes], Message]] = {
    role: msgspec.msgpack.Decoder(union).decode for role, union in _NEWER_UNIONS.items()
}


def way_of(luck: Luck) -> str:
    """Which versions a world has: one of `WAYS`."""
    return luck("versions").choice(WAYS)


def understood_by(luck: Luck, uid: str, restarts: int) -> tuple[str, ...]:
    """What a process lists in its `Hello`, by the version it is of."""
    newer = {
        "old": False,
        "new": True,
        "both": luck(f"version of {uid}").random() < 0.5,
        "rolling": restarts > 0,
    }
    return NEWER if newer[way_of(luck)] else ()


def written(message: Message, writer: Hello) -> bytes:
    """The message as a process of this version writes it."""
    if not writer.understands:
        return encode(as_older(message))
    wire = encode(message)
    if wire[:1] == MAP_OF_MORE:
        return MAP_OF_MORE + (int.from_bytes(wire[1:3]) + 1).to_bytes(2) + wire[3:] + LATER_FIELD
    fields = (wire[0] & FIELDS_MAX) + 1
    head = bytes([wire[0] + 1]) if fields <= FIELDS_MAX else MAP_OF_MORE + fields.to_bytes(2)
    return head + wire[1:] + LATER_FIELD


def as_older(message: Message) -> Message:
    """Without what an older process does not say."""
    if isinstance(message, Load):
        return msgspec.structs.replace(
            message,
            pages_for_new=-1,
            pages_a_second=0.0,
            extend_rate=0.0,
            position_seconds=0.0,
            step_seconds=0.0,
            pages_arriving=0,
            pages_arriving_a_second=0.0,
            extend_rate_alone=0.0,
            slots_for_new=-1,
            pages_foreseen=-1,
        )
    return message


def read(wire: bytes, reader: Hello) -> Message:
    """The message as a process of this version reads it: a real one would end the session if it could not."""
    readers = NEWER_READERS if reader.understands else OLDER_READERS
    try:
        return readers[reader.role](wire)
    except msgspec.ValidationError as error:
        raise AssertionError(f"{reader.uid} cannot read what was sent to it: {error}") from error


class Novelties:
    """When one process sends `Novelty`."""

    def __init__(self, hello: Hello, luck: Luck, count: Callable[[str], None]):
        self._newer = bool(hello.understands)
        self._rng = luck(f"novelties of {hello.uid} {hello.epoch}")
        self._count = count

    def due(self) -> bool:
        """Whether it would send one now; then `understood` is the question."""
        return self._newer and self._rng.random() < NOVELTIES

    def without(self) -> None:
        """The peer does not understand it: nothing is sent."""
        self._count("path a new message is not sent to an older version")
