"""Mistakes in what a worker believes: see `tests.simulation.mutations`."""

from __future__ import annotations

import decode.admission
import prefill.waiting_queue
from shared.baton import Baton
from shared.messages import Decode, Prefill
from tests.simulation.mutation import Mutation, Patch, into

MISTAKES: dict[str, Mutation] = {}
_mistake = into(MISTAKES)


@_mistake("trust", "a worker computes whatever tokens and parameters it is sent")
def _believed_commands() -> list[Patch]:
    def unsound(command: Prefill | Decode, vocab_size: int) -> str:
        del command, vocab_size
        return ""

    return [(decode.admission, "unsound", unsound), (prefill.waiting_queue, "unsound", unsound)]


@_mistake("trust", "a worker reads whatever a baton names")
def _believed_batons() -> list[Patch]:
    def unsound_baton(baton: Baton, page_size: int) -> str:
        del baton, page_size
        return ""

    return [(decode.admission, "unsound_baton", unsound_baton)]
