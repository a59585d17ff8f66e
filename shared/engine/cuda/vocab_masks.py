"""What a request's grammar, `allowed_token_ids` and `bad_words` leave of the vocabulary, as bits, on the host.

A mask may follow the output: then it is right once all tokens before are known, so its row is sampled after the step
before was waited for (`device`). What is masked is what `sampler` masks, and the same `MaskBudget` says
which rows a step has no time for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shared.batch.schedule_batch import SlotJoin
from shared.engine.sampling.grammars import TimedMatcher
from shared.engine.sampling.masks import (
    NOTHING_ALLOWED,
    REMEMBERED,
    MaskBudget,
    MaskShares,
    Matchers,
    last_ids,
)
from shared.limits.grammars import error_of
from shared.primitives.errors import InvariantError

Bits = NDArray[np.uint8]  # a bit a token, the lowest first


def mask_words(vocab_size: int) -> int:
    """int32 words of a row's bits."""
    return -(-vocab_size // 32)


class SlotMask:
    """Mask of one request in its slot."""

    def __init__(
        self,
        join: SlotJoin,
        matchers: Matchers | None,
        budget: MaskBudget,
        eos_token_ids: frozenset[int],
        everything: Bits,
    ):
        """`everything`: the bits of the whole vocabulary."""
        params, output = join.params, join.token_ids[join.prompt_len :]
        self.unknown = 0  # tokens that are sampled, and not known here yet
        self.last_token = join.last_token  # of those that are known
        self._everything = everything
        self._matcher: TimedMatcher | None = None
        if params.grammar is not None:
            if matchers is None:
                raise InvariantError(
                    "a request with a grammar came to an engine that does not name the feature"
                )
            self._matcher = TimedMatcher(matchers.matcher(params.grammar), output, budget.clock)
        self._eos_token_ids = eos_token_ids
        self._early = bits_of(eos_token_ids.union(params.stop_token_ids), everything)
        self._early_tokens = params.min_new_tokens - len(output)  # so many more, and ends may come
        self._allowed = (
            bits_of(params.allowed_token_ids, everything) if params.allowed_token_ids else everything
        )
        self._bad_words = params.bad_words
        self._output = list(output[-REMEMBERED:])

    @property
    def follows_output(self) -> bool:
        """Whether it differs from token to token."""
        return self._matcher is not None or bool(self._bad_words)

    @property
    def has_grammar(self) -> bool:
        """Whether it takes time to compute."""
        return self._matcher is not None

    def bits(self, seconds: float = math.inf) -> tuple[Bits, str] | None:
        """What may come next; and why nothing may, or "". None: that is not known after `seconds`.

        After an error the row is discarded, whatever it samples.
        """
        bits = self._allowed
        if masked := last_ids(self._bad_words, self._output):
            bits = bits & ~bits_of(masked, self._everything)
        if self._matcher is None:
            return bits, ""
        if (mask := self._matcher.mask(seconds)) is None:
            return None
        error = error_of(self._matcher)
        if not error:
            found = np.frombuffer(mask, np.uint8)
            allowed = np.zeros_like(bits)  # of whole words
            allowed[: len(found)] = found[: len(bits)]
            bits = bits & allowed
            if self._early_tokens > 0 and (later := bits & ~self._early).any():
                return later, ""
            if bits.any():
                return bits, ""
        self._matcher = None
        return self._everything, error or NOTHING_ALLOWED

    def take(self, token_id: int) -> None:
        """The next token is known. An end ends the grammar, too: rows behind it are discarded."""
        self.unknown -= 1
        self.last_token = token_id
        self._early_tokens -= 1
        self._output.append(token_id)
        del self._output[:-REMEMBERED]
        if self._matcher is None:
            return
        if token_id in self._eos_token_ids:
            self._matcher = None
        else:
            self._matcher.take(token_id)


@dataclass(slots=True)
class MaskedRows:
    """What masks leave of the rows of a step, by their places in it."""

    bits: dict[int, Bits] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)  # rows that have no token left, and why
    shares: MaskShares = field(default_factory=MaskShares)


class VocabMasks:
    """The masks of all slots."""

    def __init__(self, vocab_size: int, eos_token_ids: frozenset[int], matchers: Matchers | None):
        self._matchers = matchers
        self._budget = MaskBudget()
        self._eos_token_ids = eos_token_ids
        self._masks: dict[int, SlotMask] = {}
        self._vocab_size = vocab_size

    @cached_property
    def _everything(self) -> Bits:
        """The bits of the whole vocabulary."""
        bits = np.zeros(4 * mask_words(self._vocab_size), dtype=np.uint8)
        whole = np.packbits(np.ones(self._vocab_size, dtype=np.uint8), bitorder="little")
        bits[: len(whole)] = whole
        return bits

    def join(self, join: SlotJoin) -> None:
        """Overwrite what the slot held."""
        self._masks.pop(join.slot, None)
        self._budget.join(join.slot, join.tenant)
        params = join.params
        if params.grammar is not None or params.allowed_token_ids or params.bad_words:
            self._masks[join.slot] = SlotMask(
                join, self._matchers, self._budget, self._eos_token_ids, self._everything
            )

    def of(self, slots: Iterable[int]) -> list[tuple[int, SlotMask]]:
        """The masks of a step's rows, each with its row."""
        if not self._masks:
            return []
        return [(row, mask) for row, slot in enumerate(slots) if (mask := self._masks.get(slot)) is not None]

    def last_token(self, slot: int) -> int:
        """The last token of a slot's request that is known here."""
        token_id = self._masks[slot].last_token
        assert token_id is not None, f"slot {slot} has not got a token"
        return token_id

    def compute(
        self, slots: Sequence[int], masks: Sequence[tuple[int, SlotMask]], *, may_sit_out: int
    ) -> MaskedRows:
        """The bits of a step's rows. `masks` are those of its `slots`, and all tokens before are known.

        Of the rows the first `may_sit_out` have no bits where there is no time for them.
        """
        found = MaskedRows()
        if not masks and not self._budget.has_debts:  # as nearly always
            return found
        by_row = dict(masks)

        def compute(row: int, seconds: float) -> bool:
            if (left := by_row[row].bits(seconds)) is None:
                return False
            found.bits[row], why = left
            if why:
                found.failed[row] = why
            return True

        rows = [row for row, mask in masks if mask.has_grammar]
        for row in by_row.keys() - rows:
            compute(row, math.inf)
        found.shares = self._budget.share(slots, rows, compute, bounded=may_sit_out)
        return found


def bits_of(token_ids: Iterable[int], everything: Bits) -> Bits:
    """The bits of some tokens; those that the vocabulary does not have are passed over."""
    flags = np.zeros(8 * len(everything), dtype=np.uint8)
    ids = np.fromiter(token_ids, dtype=np.int64)
    flags[ids[ids < len(flags)]] = 1
    return np.packbits(flags, bitorder="little") & everything
