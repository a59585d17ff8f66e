"""Lists of tokens and their logprobs that wait to be written, packed: a tenth of what they take as objects."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

import msgspec

from shared.wire.sampled import TokenLogprobs

T = TypeVar("T", bound=msgspec.Struct)

BATCH_LOGPROBS = 1024  # in a batch: their JSON is made in about a millisecond
PACKED_BYTES = 16  # of a logprob: a float, and a token id or a rank
ENTRY_BYTES = 16  # of a token beside its logprobs: id, place in the text, number of likeliest
PACK_BYTES = 64  # of what was added at once: the object, and its place in the list


class TokenEntry(msgspec.Struct, frozen=True, array_like=True):
    """One token of the output, or of the prompt, and how likely it was."""

    token_id: int
    offset: int  # characters of the choice's text before it
    logprobs: TokenLogprobs | None  # None: the first of a prompt


class PackedList(Generic[T]):
    """Grows at its end and is read from its beginning, a batch at a time, as often as it is wanted."""

    def __init__(self, kind: type[T], likeliest: int):
        """`likeliest`: how many tokens are named with each at most."""
        self.held_bytes = 0
        self._batch = max(1, BATCH_LOGPROBS // (1 + max(0, likeliest)))
        self._packs: list[bytes] = []
        self._decode = msgspec.msgpack.Decoder(list[kind]).decode  # type: ignore[valid-type]

    def __bool__(self) -> bool:
        return bool(self._packs)

    def add(self, values: Sequence[T]) -> None:
        """Append some."""
        for begin in range(0, len(values), self._batch):
            pack = msgspec.msgpack.encode(values[begin : begin + self._batch])
            self._packs.append(pack)
            self.held_bytes += len(pack) + PACK_BYTES

    def batches(self) -> Iterator[list[T]]:
        """All values, in their order; no batch is empty."""
        batch: list[T] = []
        for pack in self._packs:
            batch += self._decode(pack)
            if len(batch) >= self._batch:
                yield batch
                batch = []
        if batch:
            yield batch
