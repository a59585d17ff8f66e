"""What a reader asks a sealed holder for, and what it is allowed to get.

Offsets are in the holder's page memory, so no address of a process is ever on the wire. An answer is a row of portions,
which both ends cut from the spans in the same way: at most `PORTION_BYTES` each, small spans together in one.
Knows no sockets and no keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from shared.transfer.memory import WORD_BYTES, PageMemory, WordTable
from shared.transfer.reader import SPANS_MAX
from shared.transfer.sealed_channel import PORTION_BYTES
from shared.transfer.sealed_keys import SealError

REQUEST_BYTES_MAX = PORTION_BYTES


class GetPages(msgspec.Struct, frozen=True, tag="pages", forbid_unknown_fields=True):
    """Read spans of the page memory, each (offset, size) in bytes, while the lease's word is the nonce."""

    lease: int
    nonce: int
    spans: Annotated[tuple[tuple[int, int], ...], msgspec.Meta(max_length=SPANS_MAX)]


class GetWord(msgspec.Struct, frozen=True, tag="word", forbid_unknown_fields=True):
    """Read a lease word."""

    lease: int


Request = GetPages | GetWord
_DECODER = msgspec.msgpack.Decoder(Request)


def encode_request(request: Request) -> bytes:
    """As it goes into a frame."""
    return msgspec.msgpack.encode(request)


def decode_request(payload: bytes) -> Request:
    """`SealError` for bytes that are no request."""
    try:
        request: Request = _DECODER.decode(payload)
    except (msgspec.MsgspecError, ValueError) as error:
        raise SealError(f"no request: {error}") from None
    return request


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


class OfferedMemory:
    """The pages and lease words that this worker lets others read, and the rules."""

    def __init__(self, pages: PageMemory, words: WordTable):
        self._pages = pages
        self._words = words

    def refusal(self, request: Request) -> str:
        """Why nothing is answered; empty: it may be. Every number in a request is the peer's."""
        if not 0 <= request.lease < len(self._words):
            return f"lease {request.lease} is not one of {len(self._words)}"
        if isinstance(request, GetWord):
            return ""
        if not request.spans:
            return "no span is asked for"
        size = self._pages.size_bytes
        for offset, length in request.spans:
            if offset < 0 or length <= 0 or offset + length > size:
                return f"{length} bytes at {offset} are not within the {size} bytes of KV pages"
        if sum(length for _, length in request.spans) > size:
            return f"more bytes are asked for than the {size} of all KV pages"
        return ""

    def is_open(self, request: GetPages) -> bool:
        """Whether the pages may be read now: under a lease that holds, or the known page, which has nobody's KV."""
        if request.nonce and self._words.read(request.lease) == request.nonce:
            return True
        known = self._pages.known_page * self._pages.page_bytes
        return known >= 0 and all(offset >= known for offset, _ in request.spans)

    def word(self, lease: int) -> bytes:
        """The lease word as it is now, as in memory."""
        return self._words.read(lease).to_bytes(WORD_BYTES, "little")

    def page_bytes_at(self, offset: int, size_bytes: int) -> memoryview | None:
        """Bytes of the page memory, not copied; None where only `read` gets at them."""
        view = self._pages.access.view(self._pages.address + offset, size_bytes)
        return view.toreadonly() if view else None

    def read(self, offset: int, into: memoryview) -> None:
        """Copy bytes of the page memory."""
        self._pages.access.read(self._pages.address + offset, into)

    def buffer(self, size_bytes: int) -> memoryview:
        """Memory to read into."""
        return self._pages.access.buffer(size_bytes)
