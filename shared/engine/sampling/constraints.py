"""What each slot's grammar allows next: a matcher a slot, beside the sampler, which only the forward thread touches.

A matcher is made at every join, of the grammar and the request's own output, and takes each token as it is sampled. So
it is right wherever a request goes on, and nobody but the sampler has to know of it. A step has no time for some masks
(`mask_budget`): their rows sit it out, and nothing of them changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shared.batch.schedule_batch import SlotJoin
from shared.engine.sampling.grammars import Matcher, TimedMatcher
from shared.engine.sampling.mask_budget import MaskBudget, MaskShares
from shared.grammar.limits import error_of
from shared.primitives.errors import InvariantError
from shared.wire.grammar import Grammar

NOTHING_ALLOWED = "no token is allowed after the output so far"


class Matchers(Protocol):
    """Where matchers come from."""

    eos_token_ids: frozenset[int]

    def matcher(self, grammar: Grammar) -> Matcher:
        """One at the start of its grammar."""


class Constraints:
    """The matchers of all slots. Without `grammars` no request may have one."""

    def __init__(self, grammars: Matchers | None, vocab_size: int, budget: MaskBudget | None = None):
        self._grammars = grammars
        self._vocab_size = vocab_size
        self._budget = budget or MaskBudget()
        self._matchers: dict[int, TimedMatcher] = {}

    def __contains__(self, slot: int) -> bool:
        return slot in self._matchers

    def __bool__(self) -> bool:
        return bool(self._matchers)

    def join(self, join: SlotJoin) -> None:
        """Overwrite what the slot held."""
        self._matchers.pop(join.slot, None)
        self._budget.join(join.slot, join.tenant)
        if join.params.grammar is not None:
            if self._grammars is None:
                raise InvariantError(
                    "a request with a grammar came to an engine that does not name the feature"
                )
            output = join.token_ids[join.prompt_len :]
            matcher = self._grammars.matcher(join.params.grammar)
            self._matchers[join.slot] = TimedMatcher(matcher, output, self._budget.clock)

    def share(
        self, slots: Sequence[int], mask: Callable[[int, float], bool], *, may_sit_out: int
    ) -> MaskShares:
        """Have the rows of a step masked that have a grammar, each by `mask(row, seconds)`: see `MaskBudget.share`."""
        rows = [row for row, slot in enumerate(slots) if slot in self._matchers]
        return self._budget.share(slots, rows, mask, bounded=may_sit_out)

    def mask(
        self,
        slot: int,
        logits: NDArray[np.float32],
        ends: NDArray[np.int64] | None,
        seconds: float = math.inf,
    ) -> str | None:
        """Set to -inf what must not come next in a slot that has a grammar; returns why nothing may, or "".

        logits [vocab], in place. `ends` must not come either, unless the grammar allows nothing else. None: that is
        not known after `seconds`, and nothing is set. After an error the slot has no matcher: a row that follows is
        discarded.
        """
        matcher = self._matchers[slot]
        if (bits := matcher.mask(seconds)) is None:
            return None
        error = error_of(matcher)
        if not error:
            allowed = np.frombuffer(bits, np.uint8)
            masked = np.unpackbits(allowed, count=self._vocab_size, bitorder="little") == 0
            np.putmask(logits, _with_ends(masked, ends), -np.inf)
            if logits.max() > -np.inf:
                return ""
        del self._matchers[slot]
        return error or NOTHING_ALLOWED

    def take(self, slots: Sequence[int], token_ids: Sequence[int]) -> None:
        """The next token of each slot is chosen. An end ends the matcher, too.

        A row may follow in the same slot that is one past its request's end; it is discarded, whatever it samples.
        """
        for slot, token_id in zip(slots, token_ids, strict=True):
            if (matcher := self._matchers.get(slot)) is None:
                continue
            if self._grammars is not None and token_id in self._grammars.eos_token_ids:
                del self._matchers[slot]
            else:
                matcher.take(token_id)


def _with_ends(masked: NDArray[np.bool_], ends: NDArray[np.int64] | None) -> NDArray[np.bool_]:
    if ends is None:
        return masked
    both = masked.copy()
    both[ends] = True
    return masked if both.all() else both
