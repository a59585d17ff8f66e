"""How long a step computes masks of grammars for rows that decode, and for whom: a budget a tenant.

Masks are computed one after the other on the thread that all streams share. A row whose tenant has used its time sits
this step out: it gets no token, its cache stays as long as it was, and a later step computes the same again. Sampling
depends on the request alone, so no token changes, only when it comes.

    step 1   a1 a2 a3 │ a4 a5 a6 sit out      the row whose last mask is oldest goes first
    step 2   a4 a5 a6 │ a1 a2 a3 sit out

A mask that has begun is not stopped, but what it takes beyond the budget is taken from the next steps. In seconds of
the thread, so a machine that is busy with other things makes nobody wait longer. Nothing here knows grammars or tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from shared.engine.sampling.grammars import Clock

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
        if not rows and not self._owed and not self._all_owed:
            return MaskShares()  # as nearly always: no row of a step without grammars costs anything
        tenants = {self._tenants.get(slot, "") for slot in slots}
        each = TENANT_SECONDS if len(tenants) > 1 else ALONE_SECONDS
        left = {tenant: each - self._owed.get(tenant, 0.0) for tenant in tenants}
        left_of_all = (ALL_SECONDS if len(tenants) > 1 else ALONE_SECONDS) - self._all_owed
        shares = MaskShares()
        for row in sorted(rows, key=lambda row: self._turn.get(slots[row], 0)):
            slot = slots[row]
            tenant = self._tenants.get(slot, "")
            seconds = min(left[tenant], left_of_all)
            began_at = self.clock()
            if bounded is not None and row >= bounded:
                compute(row, float("inf"))
            elif seconds <= 0 or not compute(row, seconds):
                shares.sat_out.add(row)
            spent = self.clock() - began_at
            left[tenant] -= spent
            left_of_all -= spent
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
