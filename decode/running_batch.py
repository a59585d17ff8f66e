"""The requests in slots whose KV is here, and the steps made of them.

    join ─► joining ─► start_joining ─► running ─► DECODE, DECODE, … ─► remove

The first DECODE step of a request carries its join, so a join costs the others nothing. A PREBUILT step carries joins
when no request can decode: then the device has nothing else to do. A step is planned before the one in flight has
settled. So a row may run one step past its end, and rows that are certain to end by length in the step in flight are
not planned again. A row whose grammar's mask a step had no time for has sat it out, which shows when the step settles:
the row in flight behind it has computed the same once more. A slot may be taken as soon as it is free: the device
applies joins in the order of the steps. It knows nothing of routers, fetches or why a request is removed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection

from decode.counters import DecodeCounters
from decode.lifecycle import DecodeEvent, DecodeState
from shared.batch.req import Req
from shared.batch.schedule_batch import ExtendRow, ForwardMode, PageGrant, ScheduleBatch, SlotJoin
from shared.kv.kv_memory import KvMemory
from shared.scheduling.request_states import RequestStates

# Of a step's number and its rows that decode: what it computes beside them.
PlanExtends = Callable[[int, int], tuple[tuple[SlotJoin, ...], tuple[ExtendRow, ...]]]


class RunningBatch:
    """Joining and running requests, their slots, and the rows of every step that has not settled."""

    def __init__(
        self,
        memory: KvMemory,
        states: RequestStates[DecodeState, DecodeEvent],
        counters: DecodeCounters,
        slots: int,
    ):
        self.joining: list[Req] = []
        self.running: dict[str, Req] = {}
        self._memory = memory
        self._states = states
        self._counters = counters
        self._slots = slots
        self._free_slots = deque(range(slots))
        self._starting: list[Req] = []  # running, but no step has carried their join
        self._planned: dict[int, list[Req]] = {}  # rows of the steps launched and not settled

    @property
    def reqs(self) -> list[Req]:
        """All requests whose KV is here."""
        return [*self.running.values(), *self.joining]

    @property
    def free_slots(self) -> int:
        """Slots that can be taken."""
        return len(self._free_slots)

    @property
    def slots_used(self) -> int:
        """Requests in slots, those whose pages are on their way included."""
        return self._slots - len(self._free_slots)

    @property
    def in_flight(self) -> bool:
        """Whether a step has not settled."""
        return bool(self._planned)

    def take_slot(self, req: Req) -> None:
        """Give the request a free slot."""
        req.slot = self._free_slots.popleft()

    def join(self, req: Req) -> None:
        """Make a request that is in a slot part of the next step."""
        self.joining.append(req)

    def remove(self, req: Req) -> None:
        """Take the request out and free its slot, if it has one. It may still have a row in the step in flight."""
        if self.running.get(req.rid) is req:
            del self.running[req.rid]
        if req in self.joining:
            self.joining.remove(req)
        if req.slot is not None:
            self._free_slots.append(req.slot)
            req.slot = None

    def start_joining(self) -> None:
        """Let the joining requests run. The next step carries the joins of those that still do."""
        for req in self.joining:
            req.launched_len = req.kv_len
            self._look_ahead(req)
            self.running[req.rid] = req
            self._states.advance(req, DecodeEvent.JOINED)
        self._starting += self.joining
        self.joining = []

    def next_step(self, plan_extends: PlanExtends) -> ScheduleBatch | None:
        """One token for every request that has a page for it, and beside them what `plan_extends` says.

        Those that end by length with the step in flight have no row. None: there is neither a row nor a join.
        """
        joins = self._joins()  # their pages as they are before this step's grants
        at_bound = [req for req in self.running.values() if req.launched_len >= req.launched_max]
        growing = [req for req in at_bound if req.launched_len < req.final_kv_len]
        grants = self._grant_pages(growing)
        going = self.running.copy()
        for req in at_bound:
            if req.launched_len >= req.launched_max:
                del going[req.rid]
        rows = [*going.values()]
        for req in rows:
            req.launched_len += 1
        extend_joins, extends = plan_extends(self._memory.launched_step + 1, len(rows))
        if not (rows or joins or extends):
            return None
        return self._step(rows, joins + extend_joins, tuple(grants), extends)

    def settle(self, step: int, sat_out: Collection[int] = ()) -> list[Req]:
        """The rows of a step that has settled, in their order; those that `sat_out` have not got the step's token."""
        rows = self._planned.pop(step)
        for row in sat_out:
            rows[row].launched_len -= 1
        self._counters.rows_without_mask += len(sat_out)
        return rows

    def _joins(self) -> tuple[SlotJoin, ...]:
        starting, self._starting = self._starting, []
        return tuple(req.join(last_token=req.token_ids[-1]) for req in starting if req.slot is not None)

    def _grant_pages(self, growing: list[Req]) -> list[PageGrant]:
        """One more page for each, as far as there are any."""
        granted = self._memory.allocate_one_each(growing)
        self._counters.rows_without_page += len(growing) - granted
        grants = []
        for req in growing[:granted]:
            assert req.slot is not None
            grants.append(PageGrant(req.slot, (req.pages[-1],)))
            self._look_ahead(req)
        return grants

    def _look_ahead(self, req: Req) -> None:
        """Find out how far its steps go as they are: until then they need no look at pages or its end."""
        req.launched_max = min(len(req.pages) * self._memory.page_size, req.final_kv_len)

    def _step(
        self,
        rows: list[Req],
        joins: tuple[SlotJoin, ...],
        grants: tuple[PageGrant, ...],
        extends: tuple[ExtendRow, ...],
    ) -> ScheduleBatch:
        if rows:
            mode = ForwardMode.MIXED if extends else ForwardMode.DECODE
        else:
            mode = ForwardMode.EXTEND if extends else ForwardMode.PREBUILT
        self._counters.count_step(mode)
        self._memory.launched_step += 1
        self._planned[self._memory.launched_step] = rows
        slots = [req.slot for req in rows if req.slot is not None]
        return ScheduleBatch(self._memory.launched_step, mode, joins, grants, extends, slots)
