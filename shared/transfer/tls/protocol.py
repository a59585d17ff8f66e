"""What a reader asks a TLS holder for, in the messages of either version of the protocol.

Offsets are in the holder's page memory, so no address of a process is ever on the wire. An answer is a row of portions,
which both ends cut from the spans in the same way: at most `PORTION_BYTES` each, small spans together in one. Two
releases meet in a rolling upgrade. Which messages a connection carries is settled by its handshake
(`keys.Version`): readers of the release before ask for the lease word itself, those of this one whether it is
what they know. Knows no sockets, no keys and no leases.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from shared.transfer.reader import SPANS_MAX
from shared.transfer.tls.channel import PORTION_BYTES
from shared.transfer.tls.keys import TlsError, Version

REQUEST_BYTES_MAX = PORTION_BYTES


class GetPages(msgspec.Struct, frozen=True, tag="pages", forbid_unknown_fields=True):
    """Read spans of the page memory, each (offset, size) in bytes, while the lease's word is the nonce."""

    lease: int
    nonce: int
    spans: Annotated[tuple[tuple[int, int], ...], msgspec.Meta(max_length=SPANS_MAX)]


class CheckLease(msgspec.Struct, frozen=True, tag="check", forbid_unknown_fields=True):
    """Ask whether the lease's word is the nonce: answered by `HOLDS` or `ENDED`."""

    lease: int
    nonce: int


class GetWord(msgspec.Struct, frozen=True, tag="word", forbid_unknown_fields=True):
    """Read a lease word, of `WORD_BYTES`: only between this release and the one before."""

    lease: int


HOLDS, ENDED = b"\x01", b"\x00"

Request = GetPages | CheckLease | GetWord
_DECODERS: dict[Version, msgspec.msgpack.Decoder[Request]] = {
    Version.OLDER: msgspec.msgpack.Decoder(GetPages | GetWord),
    Version.BOUND: msgspec.msgpack.Decoder(GetPages | CheckLease),
}


def encode_request(request: Request) -> bytes:
    """As it goes into a frame."""
    return msgspec.msgpack.encode(request)


def decode_request(payload: bytes, version: Version) -> Request:
    """`TlsError` for bytes that are no request of that version."""
    try:
        return _DECODERS[version].decode(payload)
    except (msgspec.MsgspecError, ValueError) as error:
        raise TlsError(f"no request: {error}") from None


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of one span."""

    span: int  # its index
    begin: int  # within the span
    size_bytes: int


def cut_portions(sizes: Sequence[int]) -> Iterator[list[Piece]]:
    """The portions of spans of these sizes, in order."""
    portion: list[Piece] = []
    room = PORTION_BYTES
    for index, size in enumerate(sizes):
        begin = 0
        while begin < size:
            piece = Piece(index, begin, min(room, size - begin))
            portion.append(piece)
            begin += piece.size_bytes
            room -= piece.size_bytes
            if room == 0:
                yield portion
                portion, room = [], PORTION_BYTES
    if portion:
        yield portion
