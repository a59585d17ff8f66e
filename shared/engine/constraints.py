"""What each slot's grammar allows next: a matcher a slot, beside the sampler, which only the forward thread touches.

A matcher is made at every join, of the grammar and the request's own output, and takes each token as it is sampled. So
it is right wherever a request goes on, and nobody but the sampler has to know of it.
"""

from __future__ import annotations

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from shared.engine.grammars import Grammars
from shared.guidance import error_of
from shared.schedule_batch import SlotJoin

NOTHING_ALLOWED = "no token is allowed after the output so far"


class Constraints:
    """The matchers of all slots."""

    def __init__(self, grammars: Grammars, vocab_size: int):
        self._grammars = grammars
        self._vocab_size = vocab_size
        self._matchers: dict[int, LLMatcher] = {}

    def __contains__(self, slot: int) -> bool:
        return slot in self._matchers

    def __bool__(self) -> bool:
        return bool(self._matchers)

    def join(self, join: SlotJoin) -> None:
        """Overwrite what the slot held."""
        self._matchers.pop(join.slot, None)
        if join.params.grammar is not None:
            output = join.token_ids[join.prompt_len :]
            self._matchers[join.slot] = self._grammars.matcher(join.params.grammar, output)

    def barred(self, slot: int) -> NDArray[np.bool_] | str:
        """Which tokens must not come next in a slot that has a grammar, bool [vocab]; or why none may."""
        matcher = self._matchers[slot]
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if error := error_of(matcher):
            return error
        barred = np.unpackbits(bits, count=self._vocab_size, bitorder="little") == 0
        return NOTHING_ALLOWED if barred.all() else barred

    def take(self, slot: int, token_id: int) -> None:
        """The slot's next token is chosen. An end ends the matcher, too.

        A row may follow in the same slot that is one past its request's end; it is discarded, whatever it samples.
        """
        if token_id in self._grammars.eos_token_ids:
            del self._matchers[slot]
        else:
            self._matchers[slot].consume_token(token_id)

    def leave(self, slot: int) -> None:
        """Forget the slot's matcher: its request has ended."""
        self._matchers.pop(slot, None)
