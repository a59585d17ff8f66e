"""Logprobs in the shapes of OpenAI's two APIs: which text and bytes a token has is llguidance's to say.

A stream's pieces are objects; what a whole answer tells is made as text, batch by batch, and packed while it waits
(`PackedList`).

A token need not be a whole character. Its text is its bytes with U+FFFD for what is broken, or its id if that was asked
for; the bytes tell all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
from llguidance import LLTokenizer

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
    """Grows at its end and is read from its beginning, a batch at a time, as often as it is wanted.

    Tokens and their logprobs that wait to be written take a tenth of what they do as objects.
    """

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


Json = dict[str, Any]


class TokenBytes:
    """The bytes of each token of a model. For any thread once it is `ready`, which takes a second the first time."""

    def __init__(self, tokenizer_json: Callable[[], str]):
        """`tokenizer_json` gives what `tokenizers` reads."""
        self._json = tokenizer_json
        self._tokenizer: LLTokenizer | None = None
        self._making = threading.Lock()

    def ready(self) -> TokenBytes:
        """Itself, able to answer; for a thread that may wait."""
        with self._making:
            if self._tokenizer is None:
                self._tokenizer = LLTokenizer(self._json())
        return self

    def of(self, token_id: int) -> bytes:
        """The bytes of a token; none for an id that the tokenizer does not have."""
        assert self._tokenizer is not None, "not ready"
        if not 0 <= token_id < self._tokenizer.vocab_size:
            return b""
        return bytes(self._tokenizer.decode_bytes([token_id]))


@dataclass(frozen=True, slots=True)
class LogprobObjects:
    """How one answer shows logprobs."""

    token_bytes: TokenBytes
    as_ids: bool = False  # a token is shown as `token_id:17`

    def chat(self, entries: Sequence[TokenEntry]) -> Json:
        """`logprobs` of a choice of chat completions."""
        return {"content": [self._entry(entry) for entry in entries], "refusal": None}

    def completion(self, entries: Sequence[TokenEntry]) -> Json:
        """`logprobs` of a choice of completions; the likeliest include the token itself."""
        return {
            "text_offset": [entry.offset for entry in entries],
            "tokens": [self._text(entry.token_id) for entry in entries],
            "token_logprobs": [entry.logprobs and entry.logprobs.logprob for entry in entries],
            "top_logprobs": [self._top(entry) for entry in entries],
        }

    def chat_texts(self, batches: Iterable[Sequence[TokenEntry]]) -> Iterator[bytes]:
        """The text of what `chat` gives."""
        yield b'{"content":'
        yield from _list_texts([self._entry(entry) for entry in batch] for batch in batches)
        yield b',"refusal":null}'

    def completion_lists(
        self, batches: Callable[[], Iterable[Sequence[TokenEntry]]]
    ) -> dict[str, Iterator[bytes]]:
        """The items of each list that `completion` gives, with commas between them; `batches` is called for each."""
        shown: dict[str, Callable[[TokenEntry], Any]] = {
            "text_offset": lambda entry: entry.offset,
            "tokens": lambda entry: self._text(entry.token_id),
            "token_logprobs": lambda entry: entry.logprobs and entry.logprobs.logprob,
            "top_logprobs": self._top,
        }
        return {name: _shown(show, batches()) for name, show in shown.items()}

    def prompt_texts(self, batches: Iterable[Sequence[TokenEntry]]) -> Iterator[bytes]:
        """The text of `prompt_logprobs` in vLLM's shape: by token id, the token itself and the likeliest."""
        return _list_texts(
            [self._ranked(entry.token_id, entry.logprobs) if entry.logprobs else None for entry in batch]
            for batch in batches
        )

    def _ranked(self, token_id: int, found: TokenLogprobs) -> Json:
        ranked = [(token_id, found.logprob, found.rank)]
        ranked += [
            (likely, logprob, at) for at, (likely, logprob) in enumerate(found.top, 1) if likely != token_id
        ]
        return {
            str(one): {"logprob": logprob, "rank": rank, "decoded_token": self._text(one)}
            for one, logprob, rank in ranked
        }

    def _entry(self, entry: TokenEntry) -> Json:
        assert entry.logprobs is not None, "a token of the prompt in a chat's answer"
        top = [self._one(token_id, logprob) for token_id, logprob in entry.logprobs.top]
        return {**self._one(entry.token_id, entry.logprobs.logprob), "top_logprobs": top}

    def _one(self, token_id: int, logprob: float) -> Json:
        return {
            "token": self._text(token_id),
            "logprob": logprob,
            "bytes": list(self.token_bytes.of(token_id)),
        }

    def _top(self, entry: TokenEntry) -> Json | None:
        if entry.logprobs is None or not entry.logprobs.top:
            return None
        top = {self._text(token_id): logprob for token_id, logprob in entry.logprobs.top}
        return top | {self._text(entry.token_id): entry.logprobs.logprob}

    def _text(self, token_id: int) -> str:
        if self.as_ids:
            return f"token_id:{token_id}"
        return self.token_bytes.of(token_id).decode("utf-8", "replace")


def _shown(show: Callable[[TokenEntry], Any], batches: Iterable[Sequence[TokenEntry]]) -> Iterator[bytes]:
    return _item_texts([show(entry) for entry in batch] for batch in batches)


def _item_texts(batches: Iterable[Sequence[Any]]) -> Iterator[bytes]:
    """The items of a JSON list, with commas between them: a text for each batch, of which none is empty."""
    before = b""
    for batch in batches:
        yield before + msgspec.json.encode(batch)[1:-1]
        before = b","


def _list_texts(batches: Iterable[Sequence[Any]]) -> Iterator[bytes]:
    yield b"["
    yield from _item_texts(batches)
    yield b"]"
