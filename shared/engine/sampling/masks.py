"""What each slot may choose next: what its grammar allows, in a bounded time, and what lists and bad words leave.

Only the forward thread touches these, beside the sampler. A grammar's matcher is made at every join, of the grammar and
the request's own output, and takes each token as it is sampled. So it is right wherever a request goes on, and nobody
but the sampler has to know of it. A step has no time for some masks (`MaskBudget`): their rows sit it out, and nothing
of them changes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shared.batch.schedule_batch import SlotJoin
from shared.engine.sampling.grammars import Clock, Matcher, TimedMatcher
from shared.limits.grammars import error_of
from shared.primitives.errors import InvariantError
from shared.wire.grammar import Grammar
from shared.wire.sampling_params import MAX_BAD_WORD_TOKENS

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


# ---- how long a step computes masks of grammars for rows that decode, and for whom: a budget a tenant ----------------
# Masks are computed one after the other on the thread that all streams share. A row whose tenant has used its time sits
# this step out: it gets no token, its cache stays as long as it was, and a later step computes the same again. Sampling
# depends on the request alone, so no token changes, only when it comes.
#
#     step 1   a1 a2 a3 │ a4 a5 a6 sit out      the row whose last mask is oldest goes first
#     step 2   a4 a5 a6 │ a1 a2 a3 sit out
#
# A mask that has begun is not stopped, but what it takes beyond the budget is taken from the next steps. In seconds of
# the thread, so a machine that is busy with other things makes nobody wait longer. Nothing here knows grammars or
# tokens.


TENANT_SECONDS = 0.005  # of a step; 64 rows of an ordinary schema take 3 ms
ALL_SECONDS = 0.02  # of a step, of all tenants together
ALONE_SECONDS = 0.025  # of a step in which nobody else has a row: who comes waits for about four of them


@dataclass(slots=True)
class MaskShares:
    """What became of the rows of a step, by their places in it."""

    sat_out: set[int] = field(default_factory=set)
    seconds: dict[int, float] = field(default_factory=dict)  # of those that were computed, in part or whole


class MaskBudget:
    """The time of all slots' tenants."""

    def __init__(self, clock: Clock = time.thread_time) -> None:
        self.clock = clock
        self._tenants: dict[int, str] = {}  # by slot
        self._turns = 0
        self._turn: dict[int, int] = {}  # in which its last mask was computed or it joined, by slot
        self._owed: dict[str, float] = {}  # seconds beyond the budget, by tenant; what is paid is forgotten
        self._all_owed = 0.0

    def join(self, slot: int, tenant: str) -> None:
        """Overwrite what the slot held."""
        self._tenants[slot] = tenant
        self._end_turn(slot)

    @property
    def has_debts(self) -> bool:
        """Whether a step without masks pays for those before."""
        return bool(self._owed or self._all_owed)

    def share(
        self,
        slots: Sequence[int],
        rows: Collection[int],
        compute: Callable[[int, float], bool],
        *,
        bounded: int | None = None,
    ) -> MaskShares:
        """Have the masks of some `rows` of a step computed, as far as their tenants have time.

        `slots` are those of all rows of the step. `compute` is given a row and how many seconds it has, and returns
        whether it is done. Rows from place `bounded` on are computed, whatever they take; None: there are no such rows.
        """
        if not rows and not self.has_debts:
            return MaskShares()  # as nearly always: no row of a step without grammars costs anything
        tenants = {self._tenants.get(slot, "") for slot in slots}
        each = TENANT_SECONDS if len(tenants) > 1 else ALONE_SECONDS
        left = {tenant: each - self._owed.get(tenant, 0.0) for tenant in tenants}
        left_of_all = (ALL_SECONDS if len(tenants) > 1 else ALONE_SECONDS) - self._all_owed
        shares = MaskShares()
        last = (
            len(slots) if bounded is None else bounded
        )  # streams have theirs before the first tokens of prompts
        for row in sorted(rows, key=lambda row: (row >= last, self._turn.get(slots[row], 0))):
            slot = slots[row]
            tenant = self._tenants.get(slot, "")
            seconds = min(left[tenant], left_of_all)
            began_at = self.clock()
            if row >= last:
                compute(row, float("inf"))
            elif seconds <= 0 or not compute(row, seconds):
                shares.sat_out.add(row)
            spent = self.clock() - began_at
            left[tenant] -= spent
            left_of_all -= spent if row < last else 0.0  # its own tenant pays for a prompt
            if spent:
                shares.seconds[row] = spent
            if row not in shares.sat_out:
                self._end_turn(slot)
        self._pay(left, left_of_all)
        return shares

    def _end_turn(self, slot: int) -> None:
        self._turns += 1
        self._turn[slot] = self._turns

    def _pay(self, left: dict[str, float], left_of_all: float) -> None:
        """What was taken beyond the budget is owed; tenants that have no row pay, too."""
        absent = {tenant: TENANT_SECONDS - owed for tenant, owed in self._owed.items() if tenant not in left}
        self._owed = {tenant: -rest for tenant, rest in (left | absent).items() if rest < 0}
        self._all_owed = max(0.0, -left_of_all)


# ---- what `allowed_token_ids` and `bad_words` leave of each slot's choice --------------------------------------------
# A bad word is a sequence of token ids. Its last one is masked where the output so far ends with the others; the prompt
# does not count. So a slot remembers the end of its request's own output, from the join on, which brings all of it.
#
# Something is always left: the router refuses requests whose masks could leave nothing.


REMEMBERED = MAX_BAD_WORD_TOKENS - 1  # tokens of the output that the longest bad word looks at


class TokenMasks:
    """The masks of all slots."""

    def __init__(self) -> None:
        self._allowed: dict[int, NDArray[np.int64]] = {}
        self._bad_words: dict[int, tuple[tuple[int, ...], ...]] = {}
        self._outputs: dict[int, list[int]] = {}  # the end of each, of slots with bad words

    def __contains__(self, slot: int) -> bool:
        return slot in self._allowed or slot in self._bad_words

    def __bool__(self) -> bool:
        return bool(self._allowed or self._bad_words)

    def join(self, join: SlotJoin) -> None:
        """Overwrite what the slot held."""
        for held in (self._allowed, self._bad_words, self._outputs):
            held.pop(join.slot, None)
        if join.params.allowed_token_ids:
            self._allowed[join.slot] = np.array(join.params.allowed_token_ids, dtype=np.int64)
        if join.params.bad_words:
            self._bad_words[join.slot] = join.params.bad_words
            self._outputs[join.slot] = list(join.token_ids[join.prompt_len :][-REMEMBERED:])

    def mask(self, slot: int, logits: NDArray[np.float32]) -> None:
        """Set to -inf what must not come next in a slot that has masks; logits [vocab], in place."""
        if (allowed := self._allowed.get(slot)) is not None:
            kept = logits[allowed]
            logits.fill(-np.inf)
            logits[allowed] = kept
        if words := self._bad_words.get(slot):
            logits[last_ids(words, self._outputs[slot])] = -np.inf

    def take(self, slots: Sequence[int], token_ids: Sequence[int]) -> None:
        """The next token of each slot is chosen."""
        for slot, token_id in zip(slots, token_ids, strict=True):
            if (output := self._outputs.get(slot)) is not None:
                output.append(token_id)
                del output[:-REMEMBERED]


def last_ids(words: Sequence[tuple[int, ...]], output: Sequence[int]) -> list[int]:
    """The last tokens of the words that `output`, or its end, has all others of."""
    return [
        word[-1]
        for word in words
        if len(word) == 1 or tuple(output[len(output) - len(word) + 1 :]) == word[:-1]
    ]
