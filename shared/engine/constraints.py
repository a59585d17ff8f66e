"""What each slot's grammar allows next: a matcher a slot, beside the sampler, which only the forward thread touches.

A matcher is made at every join, of the grammar and the request's own output, and takes each token as it is sampled. So
it is right wherever a request goes on, and nobody but the sampler has to know of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shared.errors import InvariantError
from shared.grammar import Grammar
from shared.guidance import error_of
from shared.schedule_batch import SlotJoin

NOTHING_ALLOWED = "no token is allowed after the output so far"


class Matcher(Protocol):
    """A grammar on its way, as llguidance's `LLMatcher` is."""

    def consume_token(self, sampled_token: int) -> bool: ...
    def compute_bitmask(self) -> bytes: ...
    def is_error(self) -> bool: ...
    def get_error(self) -> str: ...


class Matchers(Protocol):
    """Where matchers come from."""

    eos_token_ids: frozenset[int]

    def matcher(self, grammar: Grammar, output: Sequence[int]) -> Matcher:
        """One that has taken `output`."""


class Constraints:
    """The matchers of all slots. Without `grammars` no request may have one."""

    def __init__(self, grammars: Matchers | None, vocab_size: int):
        self._grammars = grammars
        self._vocab_size = vocab_size
        self._matchers: dict[int, Matcher] = {}

    def __contains__(self, slot: int) -> bool:
        return slot in self._matchers

    def __bool__(self) -> bool:
        return bool(self._matchers)

    def join(self, join: SlotJoin) -> None:
        """Overwrite what the slot held."""
        self._matchers.pop(join.slot, None)
        if join.params.grammar is not None:
            if self._grammars is None:
                raise InvariantError(
                    "a request with a grammar came to an engine that does not name the feature"
                )
            output = join.token_ids[join.prompt_len :]
            self._matchers[join.slot] = self._grammars.matcher(join.params.grammar, output)

    def bar(self, slot: int, logits: NDArray[np.float32], ends: NDArray[np.int64] | None) -> str:
        """Set to -inf what must not come next in a slot that has a grammar; returns why nothing may, or "".

        logits [vocab], in place. `ends` must not come either, unless the grammar allows nothing else. After an error
        the slot has no matcher: a row that follows is discarded.
        """
        matcher = self._matchers[slot]
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        error = error_of(matcher)
        if not error:
            barred = np.unpackbits(bits, count=self._vocab_size, bitorder="little") == 0
            np.putmask(logits, _with_ends(barred, ends), -np.inf)
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
                matcher.consume_token(token_id)


def _with_ends(barred: NDArray[np.bool_], ends: NDArray[np.int64] | None) -> NDArray[np.bool_]:
    if ends is None:
        return barred
    both = barred.copy()
    both[ends] = True
    return barred if both.all() else both
