"""The oracle for masks: the real budget of a worker, and each step's masks are judged as they are computed.

- What a tenant takes of the steps that others have a row in too, beyond its time in each, is never more than one call,
  but for the first tokens of prompts.
- Of a tenant's rows those whose last masks are oldest get theirs first, so that none starves.
- A tenant that owes nothing gets at least one call, unless all tenants together have used the step's time.

What is owed and since when a row waits is counted here once more, not asked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence

from shared.engine.sampling.masks import (
    ALL_SECONDS,
    ALONE_SECONDS,
    TENANT_SECONDS,
    MaskBudget,
    MaskShares,
)
from tests.simulation.oracle.toy_grammar import SLOWEST_SECONDS

ROUNDING_SECONDS = 1e-6


class JudgedBudget(MaskBudget):
    """A worker's budget, and what was judged of it."""

    def __init__(self, clock: Callable[[], float]):
        super().__init__(clock)
        self.judged: Counter[str] = Counter()
        self._tenant_of: dict[int, str] = {}
        self._steps = 0
        self._since: dict[int, int] = {}  # the step of its last mask, or before which it joined, by slot
        self._beyond: dict[str, float] = {}  # seconds that a tenant has taken in advance

    def join(self, slot: int, tenant: str) -> None:
        super().join(slot, tenant)
        self._tenant_of[slot] = tenant
        self._since[slot] = self._steps

    def share(
        self,
        slots: Sequence[int],
        rows: Collection[int],
        compute: Callable[[int, float], bool],
        *,
        bounded: int | None = None,
    ) -> MaskShares:
        shares = super().share(slots, rows, compute, bounded=bounded)
        self._steps += 1
        judged = [row for row in rows if bounded is None or row < bounded]
        self._judge(slots, judged, shares)
        return shares

    def _judge(self, slots: Sequence[int], rows: Collection[int], shares: MaskShares) -> None:
        present = {self._tenant_of[slot] for slot in slots}
        for tenant in present:
            own = [row for row in rows if self._tenant_of[slots[row]] == tenant]
            self._judge_turns(slots, own, shares)
            asked = [row for row in own if row in shares.seconds or row not in shares.sat_out]
            owed = self._beyond.get(tenant, 0.0)
            if own and not asked and owed < TENANT_SECONDS - ROUNDING_SECONDS:
                every = sum(shares.seconds.values())
                assert every + ROUNDING_SECONDS > ALL_SECONDS - SLOWEST_SECONDS, (
                    f"{tenant} owes {owed} s of masks, and none of its {len(own)} rows has one"
                )
        self._judge_seconds(slots, present, shares, rows)
        self._since |= {slots[row]: self._steps for row in rows if row not in shares.sat_out}

    def _judge_turns(self, slots: Sequence[int], own: list[int], shares: MaskShares) -> None:
        passed_over = [row for row in own if row in shares.sat_out and row not in shares.seconds]
        waiting = [self._since[slots[row]] for row in passed_over]
        served = [self._since[slots[row]] for row in own if row in shares.seconds]
        if waiting and served:
            self.judged["rows that waited longest have masks first"] += 1
            assert max(served) <= min(waiting), (
                f"a row waits since step {min(waiting)}, and one of step {max(served)} has its mask"
            )

    def _judge_seconds(
        self, slots: Sequence[int], present: set[str], shares: MaskShares, bounded: Collection[int]
    ) -> None:
        """Rows that are not `bounded` end a prompt: they have their masks whatever is owed, and later steps pay."""
        each = TENANT_SECONDS if len(present) > 1 else ALONE_SECONDS
        taken: Counter[str] = Counter()
        of_prompts: Counter[str] = Counter()
        for row, seconds in shares.seconds.items():
            taken[self._tenant_of[slots[row]]] += seconds  # type: ignore[assignment]
            if row not in bounded:
                of_prompts[self._tenant_of[slots[row]]] += seconds  # type: ignore[assignment]
        for tenant in present | self._beyond.keys():
            free = each if tenant in present else TENANT_SECONDS
            before = self._beyond.get(tenant, 0.0)
            beyond = max(0.0, before + taken[tenant] - free)
            most = max(before, SLOWEST_SECONDS) + of_prompts[tenant]
            assert beyond <= most + ROUNDING_SECONDS, f"{tenant} is {beyond} s of masks ahead"
            self._beyond[tenant] = beyond
            if taken[tenant] > free:
                self.judged["a tenant has used its time for masks"] += 1
