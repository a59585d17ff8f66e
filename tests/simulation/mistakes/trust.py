"""Mistakes in what a worker believes: see `mutations`."""

from __future__ import annotations

from collections.abc import Sequence

import decode.admission
import prefill.waiting_queue
from shared.transfer.grants import Grants, Shown, _Grant
from shared.wire.baton import Baton
from shared.wire.messages import Decode, Prefill
from tests.simulation.mistakes.mutation import Mutation, Patch, into
from tests.simulation.world.fabric import FabricWords

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


@_mistake("trust", "a lease opens every page")
def _unbound_leases() -> list[Patch]:
    def covers(self: _Grant, pages: range) -> bool:
        del self, pages
        return True

    return [(_Grant, "covers", covers)]


@_mistake("trust", "a lease opens all but its last page")
def _a_page_too_few() -> list[Patch]:
    def write(self: Grants, lease: int, nonce: int, pages: Sequence[int]) -> None:
        real(self, lease, nonce, pages[:-1])

    real = Grants.write
    return [(Grants, "write", write)]


@_mistake("trust", "a word that was told opens the pages")
def _told_words_open() -> list[Patch]:
    def tell(self: Grants, shown: Shown, lease: int) -> int:
        del shown
        return self.read(lease)

    return [(Grants, "tell", tell)]


@_mistake("trust", "whoever was told a word counts as one that has shown it")
def _told_words_count_as_shown() -> list[Patch]:
    def tell(self: Grants, shown: Shown, lease: int) -> int:
        shown[lease] = self.read(lease)
        return real(self, shown, lease)

    real = Grants.tell
    return [(Grants, "tell", tell)]


@_mistake("trust", "an older reader is told of no lease")
def _older_readers_are_told_nothing() -> list[Patch]:
    def tell(self: Grants, shown: Shown, lease: int) -> int:
        del self, shown, lease
        return 0

    return [(Grants, "tell", tell)]


@_mistake("trust", "the next nonce can be computed")
def _counted_nonces() -> list[Patch]:
    last: dict[FabricWords, int] = {}

    def open_lease(self: FabricWords, lease: int, pages: Sequence[int]) -> int:
        last[self] = last.get(self, len(last) << 32) + 1
        self.write(lease, last[self], pages)
        return last[self]

    return [(FabricWords, "open", open_lease)]


@_mistake("trust", "a lease whose word was told holds for a reader that got no page")
def _told_leases_hold() -> list[Patch]:
    def holds(self: Grants, shown: Shown, lease: int, nonce: int) -> bool:
        del shown
        return self.read(lease) == nonce

    return [(Grants, "holds", holds)]
