"""What `allowed_token_ids` and `bad_words` leave of each slot's choice. Only the forward thread touches it.

A bad word is a sequence of token ids. Its last one is masked where the output so far ends with the others; the prompt
does not count. So a slot remembers the end of its request's own output, from the join on, which brings all of it.

Something is always left: the router refuses requests whose masks could leave nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shared.batch.schedule_batch import SlotJoin
from shared.wire.sampling_params import MAX_BAD_WORD_TOKENS

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
