"""A grammar of the simulated world: which tokens may come next is a hash of the request's own output so far.

So a matcher that has taken a token too many or too few, or one of the prompt, allows other tokens than the oracle. The
frail grammar cannot go on after some outputs, as a real one that meets a limit; where, is a matter of the output alone.
The barren one allows nothing at all. The slow one takes its time, in that of the world, and sometimes much of it.
`ToyMatcher` is what the real `Constraints` take for a matcher of llguidance.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache

from shared.wire.grammar import Grammar
from tests.simulation.world.timeline import Action, TimelineProcess

FIRM, FRAIL, BARREN, SLOW = (Grammar("regex", word) for word in ("firm", "frail", "barren", "slow"))
SLOWEST_SECONDS = 0.015
SLOW_SECONDS = (0.0005,) * 3 + (0.003,) * 4 + (SLOWEST_SECONDS,)  # of a mask, one of these
TOKEN_SECONDS = 0.001  # of a token that a slow one takes
CLASSES = 4  # one token in so many may come next
FAILING = 11  # one output in so many is the last of a frail grammar


def hashed(state: int, token_id: int) -> int:
    """The state after one more token."""
    return hash((state, token_id))


def state_of(output: Sequence[int]) -> int:
    """Where a grammar is after an output."""
    state = 0
    for token_id in output:
        state = hashed(state, token_id)
    return state


def allowed(state: int, vocab_size: int) -> frozenset[int]:
    """The tokens that may come next."""
    return frozenset(range(state % CLASSES, vocab_size, CLASSES))


@lru_cache
def _bits(token_ids: frozenset[int], vocab_size: int) -> bytes:
    return sum(1 << token_id for token_id in token_ids).to_bytes(vocab_size // 8, "little")


def fails(grammar: Grammar, state: int) -> bool:
    """Whether no token may come next."""
    return grammar.text == BARREN.text or (grammar.text == FRAIL.text and state % FAILING == 0 and state != 0)


class ToyClock:
    """The seconds that a worker's masks have taken."""

    def __init__(self, rng: random.Random):
        self._rng = rng
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds

    def take_token(self) -> None:
        """A slow grammar has taken a token."""
        self.seconds += TOKEN_SECONDS

    def compute_mask(self) -> None:
        """A slow grammar has computed a mask."""
        self.seconds += self._rng.choice(SLOW_SECONDS)


class ToyMatcher:
    """A grammar on its way."""

    def __init__(self, grammar: Grammar, vocab_size: int, clock: ToyClock | None = None):
        self._grammar = grammar
        self._vocab_size = vocab_size
        self._clock = clock if grammar.text == SLOW.text else None
        self._state = 0

    def consume_token(self, sampled_token: int) -> bool:
        if self._clock is not None:
            self._clock.take_token()
        self._state = hashed(self._state, sampled_token)
        return not self.is_error()

    def compute_bitmask(self) -> bytes:
        if self._clock is not None:
            self._clock.compute_mask()
        return _bits(allowed(self._state, self._vocab_size), self._vocab_size)

    def is_error(self) -> bool:
        return fails(self._grammar, self._state)

    def get_error(self) -> str:
        return "a frail grammar"


class ToyGrammars:
    """What compiles them: it takes a while, in the time of the world."""

    eos_token_ids: frozenset[int] = frozenset()  # to these grammars an end is a token as any other

    def __init__(
        self, process: TimelineProcess, rng: random.Random, vocab_size: int, wake: Action, clock: ToyClock
    ):
        self._clock = clock
        self._process = process
        self._rng = rng
        self._vocab_size = vocab_size
        self._wake = wake
        self._ready_at: dict[Grammar, float] = {}  # seconds

    def prepare(self, grammar: Grammar) -> None:
        if grammar not in self._ready_at:
            self._ready_at[grammar] = self._process.now + self._rng.choice((0.0, 0.001, 0.05))
            self._process.at(self._ready_at[grammar], self._wake)

    def ready(self, grammar: Grammar) -> bool:
        return self._process.now >= self._ready_at[grammar]

    def error(self, grammar: Grammar) -> str:
        del grammar
        return ""

    def matcher(self, grammar: Grammar) -> ToyMatcher:
        return ToyMatcher(grammar, self._vocab_size, self._clock)
