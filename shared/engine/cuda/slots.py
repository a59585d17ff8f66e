"""The state of each slot: on the device, where steps read it, and a mirror on the host, where they are planned.

All of it on the device is one array of int32 words, so that whatever a batch changes goes there as pairs (place, word):

    [slots + 1, STATE_WORDS]  length, last token, sampling        [slots + 1, width]  page tables
    [slots + 1, context + 1]  token ids, for penalties

The last slot is padding: its table names the padding page, its length stays 0. The host never reads the device's words;
its mirror is what they will be once all that was launched has run.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from shared.batch.schedule_batch import ExtendRow, ScheduleBatch, SlotJoin
from shared.engine.checkpoint.kv_cache import INVALID_PAGE
from shared.engine.cuda.kernels.step_kernels import STATE_WORDS, SlotWord, StepKernels
from shared.engine.cuda.staging import Staging
from shared.engine.parallel.orders import Operation
from shared.engine.sampling.sampler import signed
from shared.engine.streams import Stream, Work
from shared.primitives.errors import ConfigError, InvariantError

Words = NDArray[np.int32]

ENTRY_WORDS = 2**16  # of staging for changed words
PLACES_MAX = 2**31 - 1  # a place is an int32
_NO_PAIRS = np.empty((0, 2), dtype=np.int32)


class DeviceWords:
    """The words on the device, and views of them."""

    def __init__(
        self, slots: int, width: int, page_size: int, padding_page: int, device: torch.device
    ) -> None:
        rows, history = slots + 1, width * page_size + 1
        sizes = [rows * STATE_WORDS, rows * width, rows * history]
        if sum(sizes) > PLACES_MAX:
            raise ConfigError(
                f"{slots} requests of up to {width * page_size} tokens are more than the device keeps account of: "
                "lower max_running_requests or context_len"
            )
        self.words = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        state, tables, token_ids = torch.split(self.words, sizes)
        self.state = state.view(rows, STATE_WORDS)
        self.page_tables = tables.view(rows, width)
        self.history = token_ids.view(rows, history)
        self.page_tables[slots, 0] = padding_page

    def stage(self, pairs: Words, staging: Staging, stream: Stream, kernels: StepKernels) -> list[Work]:
        """Begin a step's staging with its changes, int32 [n, 2]; those that do not fit beside it are written before."""
        fits = ENTRY_WORDS // 2
        staging.begin()
        if not len(pairs):
            return []
        for start in range(0, len(pairs) - fits, fits):
            _, staged = staging.put(pairs[start : start + fits])
            staging.note(Operation.WRITE, staged, fits)
            staging.upload()
            stream.run(partial(kernels.write_words, staged, self.words))
            staging.end(stream.record())
            staging.begin()
        rest = pairs[(len(pairs) - 1) // fits * fits :]
        _, staged = staging.put(rest)
        staging.note(Operation.WRITE, staged, len(rest))
        return [partial(kernels.write_words, staged, self.words)]


class SlotMirror:
    """What the host knows of each slot, and the words that it changes."""

    def __init__(self, slots: int, width: int, pages: int, page_size: int, vocab_size: int) -> None:
        self.slots = slots
        self.page_size = page_size
        self.kv_lens = np.zeros(slots + 1, dtype=np.int64)  # tokens in the cache
        self.tables = np.full((slots + 1, width), INVALID_PAGE, dtype=np.int32)
        self._page_counts = np.zeros(slots + 1, dtype=np.int64)
        self._set_back: dict[int, int] = {}  # last tokens of slots that the device knows too much of
        self._pages = pages
        self._vocab_size = vocab_size
        self._tables_at = (slots + 1) * STATE_WORDS
        self._history_at = self._tables_at + (slots + 1) * width
        self._tokens_max = width * page_size

    def change(self, batch: ScheduleBatch) -> Words:
        """Take over what a batch changes; returns the pairs [n, 2] to write on the device, no place twice.

        Raises `InvariantError` for what is out of bounds.
        """
        if not (batch.joins or batch.grants or batch.extend or self._set_back):
            return _NO_PAIRS
        states = {join.slot: self._join(join) for join in batch.joins}
        pairs = [
            *states.values(),
            *(self._one_back(slot, token_id) for slot, token_id in self._set_back.items()),
            *(self._history(join) for join in batch.joins if join.params.needs_history),
        ]
        self._set_back = {}
        # One array for all of a step: a call of numpy costs more than the pages of a grant.
        pages = [(join.slot, join.pages) for join in batch.joins]
        pages += [(grant.slot, grant.pages) for grant in batch.grants]
        if pages:
            pairs.append(self._append_pages(pages))
        for row in batch.extend:
            kv_len = self._extend(row, batch.step)
            if (joined := states.get(row.slot)) is not None:
                joined[SlotWord.KV_LEN, 1] = kv_len
            else:
                place = row.slot * STATE_WORDS + SlotWord.KV_LEN
                pairs.append(np.array([[place, kv_len]], dtype=np.int32))
        return np.concatenate(pairs)

    def _join(self, join: SlotJoin) -> Words:
        """Overwrite the slot; returns the pairs of its state."""
        slot, last_token = join.slot, 0 if join.last_token is None else join.last_token
        self._set_back.pop(slot, None)
        self.check_token_ids([last_token])
        self._page_counts[slot] = 0
        self.tables[slot] = INVALID_PAGE
        self.kv_lens[slot] = join.kv_len
        return pairs_from(slot * STATE_WORDS, _state_words(join, last_token))

    def _history(self, join: SlotJoin) -> Words:
        self.check_token_ids(join.token_ids)
        place = self._history_at + join.slot * (self._tokens_max + 1)
        return pairs_from(place, np.array(join.token_ids, dtype=np.int32))

    def _append_pages(self, given: Sequence[tuple[int, Sequence[int]]]) -> Words:
        """Append pages to slots' tables, (slot, pages) in order; returns the pairs that write them."""
        width = self.tables.shape[1]
        places: list[int] = []
        pages: list[int] = []
        for slot, new in given:
            start = int(self._page_counts[slot])
            end = start + len(new)
            if end > width:
                raise InvariantError(f"slot {slot} is given {end} pages, a table holds {width}")
            self._page_counts[slot] = end
            places += range(slot * width + start, slot * width + end)
            pages += new
        pairs = np.empty((len(pages), 2), dtype=np.int32)
        pairs[:, 0], pairs[:, 1] = places, pages
        _check_bounds("page", pairs[:, 1], self._pages)
        self.tables.reshape(-1)[pairs[:, 0]] = pairs[:, 1]
        pairs[:, 0] += self._tables_at
        return pairs

    def check_token_ids(self, token_ids: ArrayLike) -> None:
        """Raise `InvariantError` unless all are in the vocabulary: kernels look at no bound."""
        _check_bounds("token", np.asarray(token_ids), self._vocab_size)

    def set_back(self, slot: int, last_token: int) -> None:
        """A row of DECODE has got no token: its slot is one token shorter, and goes on from `last_token` again."""
        self.kv_lens[slot] -= 1
        self._set_back[slot] = last_token

    def _one_back(self, slot: int, last_token: int) -> Words:
        self.check_token_ids([last_token])
        place = slot * STATE_WORDS
        lengths, tokens = (
            (place + SlotWord.KV_LEN, self.kv_lens[slot]),
            (place + SlotWord.LAST_TOKEN, last_token),
        )
        return np.array([lengths, tokens], dtype=np.int32)

    def lengthen(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """A DECODE step of these slots: one token each. Returns their lengths then."""
        self.kv_lens[slots] = kv_lens = self.kv_lens[slots] + 1
        return kv_lens

    def _extend(self, row: ExtendRow, step: int) -> int:
        """Lengthen the slot by an EXTEND step's row; returns its length then."""
        if self.kv_lens[row.slot] != row.start:
            raise InvariantError(f"step {step} extends a slot elsewhere than at the end of its cache")
        self.kv_lens[row.slot] = kv_len = row.start + len(row.token_ids)
        return kv_len

    def pages_of(self, slots: NDArray[np.int64], kv_lens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Pages that the slots' tokens take, so many of each, [rows]; `InvariantError` if a table has fewer."""
        needed = (kv_lens + (self.page_size - 1)) // self.page_size
        if np.count_nonzero(needed > self._page_counts[slots]):
            if (longest := int(kv_lens.max())) > self._tokens_max:
                raise InvariantError(f"a request of {longest} tokens exceeds its page table")
            raise InvariantError("a request has fewer pages than tokens")
        return needed


def pairs_from(place: int, words: Words) -> Words:
    """Pairs (place, word) that write `words` one behind the other from `place` on, int32 [n, 2]."""
    pairs = np.empty((len(words), 2), dtype=np.int32)
    pairs[:, 0] = np.arange(place, place + len(words), dtype=np.int32)
    pairs[:, 1] = words
    return pairs


def _state_words(join: SlotJoin, last_token: int) -> Words:
    words = np.zeros(STATE_WORDS, dtype=np.int32)
    words[SlotWord.KV_LEN] = join.kv_len
    words[SlotWord.LAST_TOKEN] = last_token
    words[SlotWord.PROMPT_LEN] = join.prompt_len
    words[SlotWord.TEMPERATURE : SlotWord.TEMPERATURE + 1].view(np.float32)[0] = join.params.temperature
    words[SlotWord.SEED : SlotWord.SEED + 2].view(np.int64)[0] = signed(join.params.seed)
    return words


def _check_bounds(what: str, values: NDArray[np.signedinteger], end: int) -> None:
    if not len(values):
        return
    low, high = int(values.min()), int(values.max())
    if low < 0 or high >= end:
        raise InvariantError(f"{what} {low} or {high} is not in 0 … {end - 1}")
