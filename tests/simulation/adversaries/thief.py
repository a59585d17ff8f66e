"""A worker of the deployment that was taken over: it has the workers' key, and wants KV that is not its own.

It asks holders by the TLS transport's own rules, as either version. Whatever it gets beyond the pages of a lease
that it was given is found here. Workers of the older version are not asked: they tell everything.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from shared.transfer.grants import Shown, Verdict
from tests.simulation.world.fabric import Agent, Fabric

NEAR = (-2, -1, 1, 2, 3, 1 << 32)  # of a nonce that it knows


class Thief:
    """Reads from every holder of a fabric, when `steal` is called."""

    def __init__(self, fabric: Fabric, rng: random.Random, count: Callable[[str], None]):
        self._fabric = fabric
        self._rng = rng
        self._count = count

    def steal(self) -> None:
        """Ask all holders that there are; fails if one gives what it must not."""
        for holder in list(self._fabric.agents.values()):
            if holder.newer and holder.process.runs and any(holder.words.values):
                self._with_a_lease(holder)
                self._without_one(holder)

    def _with_a_lease(self, holder: Agent) -> None:
        """Its batons are those of the reads under way: each opens its own pages, and says nothing of other leases."""
        for baton in filter(lambda baton: baton.pages, holder.batons_of_reads()):
            shown: Shown = {}
            if self._opens(holder, shown, baton.lease, baton.nonce, baton.pages[0]):
                self._count("path a lease opened its own pages")
            others = set(range(len(holder.pages.cells))) - set(baton.pages)
            for page in sorted(others):
                assert not self._opens(holder, shown, baton.lease, baton.nonce, page), (
                    f"the lease of {baton.rid} opens page {page}, which is not its own"
                )
            for nonce in (baton.nonce + step for step in NEAR):
                for lease in range(len(holder.words)):
                    assert not holder.words.holds({}, lease, nonce), f"a nonce near that of {baton.rid} holds"

    def _without_one(self, holder: Agent) -> None:
        words = holder.words.values
        lease = self._rng.choice([lease for lease, word in enumerate(words) if word])
        shown: Shown = {}
        word = holder.words.tell(shown, lease)  # it says that it is of the version before
        self._count("path a word was told to a thief")
        for connection in (shown, {}):
            for page in range(len(holder.pages.cells)):
                assert not self._opens(holder, connection, lease, word, page), (
                    f"page {page} was read without a lease"
                )

    @staticmethod
    def _opens(holder: Agent, shown: Shown, lease: int, nonce: int, page: int) -> bool:
        return holder.words.pages(shown, lease, nonce, (range(page, page + 1),)) is Verdict.GIVEN
