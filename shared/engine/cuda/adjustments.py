"""What few rows of a step ask of their logits before a token is chosen: penalties, bias, masked ends, filters.

The host knows these rows by their slots. It stages their numbers; the device gathers just their logits. The order is
that of `shared.engine.sampling.sampler`, the arithmetic that of `sampler` beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.batch.schedule_batch import SlotJoin
from shared.engine.cuda.kernels.step_kernels import StepKernels
from shared.engine.cuda.slots import DeviceWords
from shared.engine.cuda.staging import Staging
from shared.engine.sampling.sampler import Adjustment
from shared.wire.sampling_params import SamplingParams

Rows = NDArray[np.signedinteger]

_PENALIZED, _ADDED, _FILTERED = 1, 2, 4


@dataclass(frozen=True, slots=True)
class Adjusted:
    """The device's part of one step."""

    changes: Mapping[Adjustment, Callable[[Tensor], None]]  # each of logits float32 [rows, vocab]
    after: tuple[Callable[[Tensor], None], ...]  # each is given the chosen tokens int32 [rows]


UNADJUSTED = Adjusted({}, ())


class Adjustments:
    """The parameters of all slots, on the host."""

    def __init__(
        self,
        slots: int,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        kernels: StepKernels,
        words: DeviceWords,
    ) -> None:
        self._kernels = kernels
        self._words = words
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._kinds = np.zeros(slots, dtype=np.uint8)
        self._prompt_lens = np.zeros(slots, dtype=np.int32)
        self._temperature, self._top_p, self._log_min_p, self._repetition, self._frequency, self._presence = (
            np.zeros(slots, dtype=np.float32) for _ in range(6)
        )
        self._top_k = np.zeros(slots, dtype=np.int32)
        self._addends: dict[int, _Addends] = {}  # by slot

    def join(self, join: SlotJoin) -> None:
        """Overwrite what the slot held."""
        slot, params = join.slot, join.params
        self._kinds[slot] = (
            (_PENALIZED if params.penalized else 0)
            | (_ADDED if params.logit_bias or params.min_new_tokens else 0)
            | (_FILTERED if _filters(params) else 0)
        )
        self._prompt_lens[slot] = join.prompt_len
        self._temperature[slot], self._top_p[slot] = params.temperature, params.top_p
        self._log_min_p[slot] = float(torch.tensor(params.min_p, dtype=torch.float32).log())
        self._top_k[slot] = min(params.top_k, self._vocab_size) if params.top_k > 0 else self._vocab_size
        self._repetition[slot] = params.repetition_penalty
        self._frequency[slot], self._presence[slot] = params.frequency_penalty, params.presence_penalty
        self._addends.pop(slot, None)
        if self._kinds[slot] & _ADDED:
            ends = sorted(self._eos_token_ids.union(params.stop_token_ids))
            # A grammar may allow nothing but an end: `vocab_masks` masks ends beside it.
            masks_ends = params.min_new_tokens and params.grammar is None
            masked = np.array(ends if masks_ends else [], dtype=np.int32)
            biased = np.array(list(params.logit_bias), dtype=np.int32)
            values = np.array(list(params.logit_bias.values()), dtype=np.float32)
            self._addends[slot] = _Addends(biased, values, masked, join.prompt_len + params.min_new_tokens)

    def stage(self, slots: Rows, kv_lens: Rows, staging: Staging) -> Adjusted:
        """Stage what the rows of a step ask for. `kv_lens` [rows]: tokens before the one to choose."""
        kinds = self._kinds[slots]
        if not np.count_nonzero(kinds):
            return UNADJUSTED
        changes: dict[Adjustment, Callable[[Tensor], None]] = {}
        after: list[Callable[[Tensor], None]] = []
        if len(rows := np.flatnonzero(kinds & _PENALIZED)):
            penalties = self._stage_penalties(rows, slots[rows], kv_lens[rows], staging)
            changes[Adjustment.PENALTIES] = penalties.apply
            after.append(penalties.remember)
        if len(rows := np.flatnonzero(kinds & _ADDED)):
            added = self._stage_addends(rows, slots[rows], kv_lens[rows], staging)
            changes.update({Adjustment.ADDENDS: added} if added else {})
        if len(rows := np.flatnonzero(kinds & _FILTERED)):
            changes[Adjustment.FILTERS] = self._stage_filters(rows, slots[rows], staging)
        return Adjusted(changes, tuple(after))

    def _stage_penalties(self, rows: Rows, slots: Rows, kv_lens: Rows, staging: Staging) -> _Penalties:
        columns: list[Rows] = [rows, slots, self._prompt_lens[slots], kv_lens]
        factors = [self._repetition[slots], self._frequency[slots], self._presence[slots]]
        _, numbers = staging.put(_stack(columns))
        _, floats = staging.put(np.stack(factors).view(np.int32))
        return _Penalties(
            self._words.history, numbers, floats.view(torch.float32), int(kv_lens.max()), self._vocab_size
        )

    def _stage_addends(self, rows: Rows, slots: Rows, kv_lens: Rows, staging: Staging) -> _Addition | None:
        places, values = [], []
        for row, slot, kv_len in zip(rows.tolist(), slots.tolist(), kv_lens.tolist(), strict=True):
            token_ids, added = self._addends[slot].at(kv_len)
            places.append(np.stack((np.full_like(token_ids, row), token_ids)))
            values.append(added)
        staged = np.concatenate(values)
        if not len(staged):
            return None
        _, numbers = staging.put(np.concatenate(places, axis=1))
        _, floats = staging.put(staged.view(np.int32))
        return _Addition(numbers, floats.view(torch.float32))

    def _stage_filters(self, rows: Rows, slots: Rows, staging: Staging) -> _Filters:
        _, numbers = staging.put(_stack([rows, self._top_k[slots]]))
        factors = [self._temperature[slots], self._top_p[slots], self._log_min_p[slots]]
        _, floats = staging.put(np.stack(factors).view(np.int32))
        return _Filters(self._kernels, numbers, floats.view(torch.float32))


@dataclass(frozen=True, slots=True)
class _Addends:
    """Bias, and ends that may not come before a length."""

    biased: NDArray[np.int32]
    values: NDArray[np.float32]
    masked: NDArray[np.int32]
    masked_below: int  # tokens of the sequence

    def at(self, kv_len: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        if kv_len >= self.masked_below:
            return self.biased, self.values
        never = np.full(len(self.masked), -np.inf, dtype=np.float32)
        return np.concatenate((self.biased, self.masked)), np.concatenate((self.values, never))


@dataclass(frozen=True, slots=True)
class _Penalties:
    history: Tensor  # int32 [slots + 1, tokens]
    numbers: Tensor  # int32 [4, rows]: rows, slots, prompt lengths, lengths
    floats: Tensor  # float32 [3, rows]: repetition, frequency, presence
    longest: int  # tokens of a sequence
    vocab_size: int

    def apply(self, logits: Tensor) -> None:
        """Penalize tokens that the request has had."""
        rows, slots, prompt_lens, kv_lens = self.numbers.long()
        repetition, frequency, presence = self.floats.unsqueeze(2)
        token_ids = self.history[:, : self.longest].index_select(0, slots).long()
        place = torch.arange(self.longest, device=logits.device)
        of_prompt = place < prompt_lens.unsqueeze(1)
        of_output = (place < kv_lens.unsqueeze(1)) & ~of_prompt
        none = torch.zeros(len(rows), self.vocab_size, dtype=torch.int32, device=logits.device)
        counts = none.scatter_add(1, token_ids, of_output.int())
        seen = none.scatter_add(1, token_ids, of_prompt.int()).add_(counts) > 0
        found = logits.index_select(0, rows)
        found = torch.where(seen, torch.where(found > 0, found / repetition, found * repetition), found)
        found -= frequency * counts
        found -= presence * (counts > 0)
        logits.index_copy_(0, rows, found)

    def remember(self, tokens: Tensor) -> None:
        """Append what was chosen to the history."""
        rows, slots, _, kv_lens = self.numbers.long()
        self.history.view(-1).index_copy_(
            0, slots * self.history.shape[1] + kv_lens, tokens.index_select(0, rows)
        )


@dataclass(frozen=True, slots=True)
class _Addition:
    numbers: Tensor  # int32 [2, entries]: rows, tokens
    floats: Tensor  # float32 [entries]

    def __call__(self, logits: Tensor) -> None:
        rows, token_ids = self.numbers.long()
        logits.view(-1).index_add_(0, rows * logits.shape[1] + token_ids, self.floats)


@dataclass(frozen=True, slots=True)
class _Filters:
    kernels: StepKernels
    numbers: Tensor  # int32 [2, rows]: rows, top_k
    floats: Tensor  # float32 [3, rows]: temperature, top_p, the logarithm of min_p

    def __call__(self, logits: Tensor) -> None:
        """Set to -inf what top_k, top_p and min_p exclude."""
        rows, top_k = self.numbers
        self.kernels.filter_rows(logits, rows, top_k, self.floats)


def _filters(params: SamplingParams) -> bool:
    # in float32, as the device has it: a temperature that is 0 there is greedy
    return bool(np.float32(params.temperature) > 0) and (
        params.top_k > 0 or params.top_p < 1 or params.min_p > 0
    )


def _stack(columns: Sequence[Rows]) -> NDArray[np.int32]:
    return np.stack([column.astype(np.int32) for column in columns])
