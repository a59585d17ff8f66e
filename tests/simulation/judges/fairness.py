"""The oracle for turns: the real cores, and each admission is judged as it happens.

What decision 11 promises is exact in admissions, whatever the time and whatever fails:

- At a router no request is placed while another one, whose turn is before, would find room. Requests that migrate come
  before all others, streams that were cut before new prompts, and nothing new is placed on a decode worker while a
  request of a draining one finds room.
- One that leaves a place to those behind it, since a better one comes sooner, has chosen so for the whole pass: what
  they take may change what is best, and the next pass asks it first.
- When it has settled what came, no first request of a tenant waits that a prefill worker would take (`places`).
- What holds at a prefill worker stands in `prompts`, what holds at a decode worker in `admissions`.
- Pages that one decode worker could not fetch are kept for another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

from router.config import RouterConfig
from router.core.dispatch import RouterCore
from router.core.effects import ClientRequest
from router.core.fleet import placement
from router.core.fleet.worker import KvGroup, Worker
from router.core.queueing.backfill import PlacementPass
from router.core.requests.lifecycle import RequestState
from router.core.requests.live_request import LiveRequest
from router.core.requests.request_queue import RequestQueue
from router.core.requests.tenants import Tenant
from router.core.worker_events import books
from router.placement_policies import Placement
from shared.links.events import LinkEvent
from shared.wire.messages import Message, Migrating
from tests.doubles.breaking import BrokenOffError, broken_off_at
from tests.simulation.judges import waits
from tests.simulation.judges.balance import BalanceJudge
from tests.simulation.judges.caches import JudgedCaches
from tests.simulation.judges.fetches import first_unread, prove_kept
from tests.simulation.judges.foreseen import ForeseenJudge
from tests.simulation.judges.foresight import prove_foreseen
from tests.simulation.judges.free_pages import FreePagesJudge
from tests.simulation.judges.moves import JudgedMigrations
from tests.simulation.judges.places import FreePlaces, prove_nobody_waits_beside_a_free_place
from tests.simulation.judges.ways import (
    prove_no_room_kept,
    prove_packed_in_time,
    prove_shorter,
    prove_waits_for_turn,
    seconds_by_way,
)


class JudgedRouterCore(JudgedCaches):
    """A router's core. Each placement is judged by the requests that wait in the same queue."""

    def __init__(self, settings: RouterConfig, now: float):
        super().__init__(settings, now)
        self._waits_for_better: set[str] = set()  # in this pass
        self._balance_judge = BalanceJudge(self, self.judged)
        self._migrations = self._judged_migrations = JudgedMigrations(self, self._balance_judge, self.judged)
        self._free_pages_judge = FreePagesJudge(self)
        self._foreseen_judge = ForeseenJudge(self)
        self.stranded: set[str] = set()  # streams that had begun, and that no worker could continue
        self.fails_at = 0  # the line at which it fails at the next message of a liar; 0: it does not

    def link(self, event: LinkEvent, now: float) -> None:
        """What an honest worker says may not fail: without the guard, so that every error is a finding."""
        if event.peer not in self.liars:
            self._link(event, now)
        elif self.fails_at:
            try:
                broken = broken_off_at(self.fails_at, lambda: RouterCore.link(self, event, now))
            except BrokenOffError:
                raise AssertionError(f"a message of {event.peer} ended a router") from None
            self.judged["a worker was dropped"] += broken
            books.check(self._requests, self.fleet)
        else:
            super().link(event, now)

    def _place_pending(self, now: float) -> None:
        super()._place_pending(now)
        self.judged["a worker is told what is begun for it"] += self._foreseen_judge.settled()

    def settle(self, now: float) -> None:
        super().settle(now)
        self._judge_waiting(now)

    def tick(self, now: float) -> None:
        super().tick(now)
        waits.prove_dropped(self, now)  # not before: a loop that hung ticks late
        self._judge_waiting(now)

    def _judge_waiting(self, now: float) -> None:
        self.judged["nobody waits beside a free place"] += prove_nobody_waits_beside_a_free_place(self, now)

    def _serve(
        self,
        queue: list[LiveRequest],
        place: Callable[[LiveRequest, float], bool | None],
        attempts: PlacementPass,
        now: float,
    ) -> bool:
        backfilled = {each.rid: each.backfilled for each in queue}
        self._waits_for_better.clear()
        anew = super()._serve(queue, place, attempts, now)
        self.judged["a prompt lets in those in front of it"] += anew
        choosing = prove_no_room_kept(queue, backfilled, now)
        self.judged["a prompt that waits for a better worker keeps no room"] += choosing
        return anew

    def _begin(self, live: LiveRequest, now: float) -> bool | None:
        self._judge(
            live,
            self._requests.reservations.waiting,
            RequestState.WAITING,
            lambda other: (
                other.rid not in self._waits_for_better
                and (self._serves(other, now) or self._takes(other, now))
            ),
        )
        placed = super()._begin(live, now)
        if placed is False and now < live.worth_at < inf:
            self._waits_for_better.add(live.rid)
        return placed

    def _to_serve(self, live: LiveRequest, choice: Placement[Worker], why: str, now: float) -> bool:
        self.judged[f"a prompt is computed at decode: {why}"] += 1
        if live.request.by_prefill:
            self.judged["a prompt that is for prefill goes to decode"] += 1
            by_prefill, _ = FreePlaces(self, now).ways(live)
            assert not by_prefill, f"{live.rid} is for a prefill worker, and some are up"
        light = self._free_pages_judge.prove_given(live, choice.worker)
        self.judged["a prompt gets pages that others may grow into"] += light
        return super()._to_serve(live, choice, why, now)

    def _to_prefill(self, live: LiveRequest, now: float, *, or_decode: bool) -> bool | None:
        everyone = len(self.fleet.of_role("decode")) <= self.settings.candidates_max
        compared = or_decode and everyone and not live.output and not live.avoided
        ways = seconds_by_way(self, live, now) if compared else None
        placed = super()._to_prefill(live, now, or_decode=or_decode)
        if ways is not None:
            self.judged["a prompt waits for a turn at decode"] += prove_waits_for_turn(live, ways)
        if placed and ways is not None:
            self.judged["a prompt goes the shorter way"] += prove_shorter(live, ways)
        if live.state is RequestState.EXTENDING:
            return placed
        if placed and live.output:
            self.judged["a stream that was cut goes on past all bounds"] += 1
        elif placed:
            waits.prove_in_time(self, live, now)
            self.judged["a prompt with a target is begun"] += bool(live.target_seconds)
            self.judged["a prompt is begun where pages are foreseen"] += live.foreseen_at is not None
            prove_foreseen(self, live)
            waits.prove_nobody_late(self, live, now)
        if placed and not live.output and waits.is_bounded(self, live.kv_group, now):
            self.judged["no more is computed than decode takes"] += 1
            waits.prove_needed(self, live, now)
        return placed

    def _received(self, peer: str, message: Message, now: float) -> None:
        live = self._requests.live.get(message.rid) if isinstance(message, Migrating) else None
        moved = len(live.moved_from) if live is not None else 0
        unread = first_unread(self, peer, message) if peer not in self.liars else None
        self._free_pages_judge.received(peer, message)
        super()._received(peer, message, now)
        self.judged["pages that one could not fetch are kept"] += prove_kept(unread)
        if live is not None and len(live.moved_from) > moved:
            self._balance_judge.leased(live, peer, now)

    def _expire(self, live: LiveRequest, kind: str, now: float) -> None:
        """A stream that has begun ends for lack of a worker only where none could continue it."""
        if live.output and kind != "request":
            waits.prove_stranded(self, live)
            self.judged["no worker could continue a stream"] += 1
            self.stranded.add(live.rid)
        self.judged["a prompt is dropped for its target"] += kind == "wait" and waits.is_too_late(
            self, live, now
        )
        super()._expire(live, kind, now)

    def submit(self, request: ClientRequest, now: float) -> None:
        before = waits.standing_before(self, request)
        super().submit(request, now)
        if waits.was_refused(self):
            self.judged["a wait would be too long"] += 1
            waits.prove_refusal(self, request, before)

    def _to_begin_at(
        self, live: LiveRequest, workers: Sequence[Worker], now: float
    ) -> tuple[Sequence[Worker], dict[KvGroup, Worker | None]]:
        may_begin, readers = super()._to_begin_at(live, workers, now)
        if not live.output and len(may_begin) < len(self._in_open_lanes(workers, live.tenant, now)):
            self.judged["a prompt waits for pages to be foreseen"] += 1
            decode = self.fleet.of_role("decode")
            self.judged["a prompt waits while links are busy"] += any(
                worker.seconds_to_fetch() > self.settings.ready_seconds for worker in decode
            )
        return may_begin, readers

    def _in_open_lanes(self, workers: Sequence[Worker], tenant: Tenant, now: float) -> Sequence[Worker]:
        for kv_group in self._backpressure.full_lanes(tenant, now):
            self.judged["enough stands before decode"] += 1
            self.judged["a late stream comes first"] += kv_group in self._backpressure.late_lanes(now)
            waits.prove_not_shut(self, kv_group, tenant, now)
        return super()._in_open_lanes(workers, tenant, now)

    def _to_decode(self, live: LiveRequest, now: float) -> bool | None:
        self._judge(
            live,
            self._requests.reservations.ready,
            RequestState.READY,
            lambda other: self._fetches(other, now),
        )
        if not live.migrating and self._fetches(live, now):
            self._judge_migrations(live, now)
        failed = live.unread_by
        placed = super()._to_decode(live, now)
        if placed:
            self._balance_judge.placed(live, now)
            if live.worker is live.holder and live.migration_cause == "packed":
                self.judged["a stream that was to make room is put back"] += 1
                self._judged_migrations.put_back(live)
        if placed and failed:
            self.judged["pages are fetched by another worker"] += 1
            assert live.worker is not None
            assert live.worker.peer not in failed, (
                f"{live.worker.peer} is asked for the pages of {live.rid} again"
            )
        return placed

    def _reader(self, live: LiveRequest, now: float) -> tuple[Placement[Worker] | None, bool]:
        choice, some_fit = super()._reader(live, now)
        if choice is not None and choice.reason == "packed" and live.waits_on is not None:
            self.judged["a stream is packed onto the worker with most of them"] += 1
            prove_packed_in_time(self, live, live.waits_on.kv_group)
        return choice, some_fit

    def _judge(
        self,
        live: LiveRequest,
        queue: RequestQueue,
        state: RequestState,
        finds_room: Callable[[LiveRequest], bool],
    ) -> None:
        """No request that is its tenant's first, with a turn before `live`, finds room and waits all the same.

        Where the tenant has more running than that of `live`, it may have to: room is kept for one in front of it. So
        may one that has begun, of several versions: new prompts go past what is kept for such.
        """

        def turn(each: LiveRequest) -> tuple[bool, bool, int, float, int]:
            return (
                not each.migrating,
                not each.output,
                -each.request.priority,
                each.starts[state],
                each.arrival,
            )

        if not finds_room(live):
            return
        firsts: dict[str, LiveRequest] = {}
        in_turn = sorted(queue.in_order(), key=turn)
        begun = next(
            (
                each
                for each in in_turn
                if each.output
                and each.request.model == live.request.model
                and not _may_return(each, state)
                and each.tenant.running <= live.tenant.running
                and not self._is_kept_out(each, in_turn)
            ),
            None,
        )
        if begun is not None and not live.output:
            self.judged["a stream that was cut comes first"] += 1
            assert not finds_room(begun), (
                f"{begun.rid} has begun and is passed over by {live.rid}, which is new"
            )
        for other in in_turn:
            if other.need.group == live.need.group:
                firsts.setdefault(other.tenant.name, other)
        for other in firsts.values():
            if turn(other) >= turn(live) or other.tenant.running > live.tenant.running:
                continue
            if _may_return(other, state):
                continue
            self.judged["a turn was before"] += 1
            assert not finds_room(other), f"{other.rid} is passed over by {live.rid}, whose turn is later"

    def _is_kept_out(self, live: LiveRequest, in_turn: list[LiveRequest]) -> bool:
        """Whether room may be kept for one before it that has to go on in the same version of several."""
        before = in_turn[: in_turn.index(live)]
        return live.request.model not in self.fleet.only_versions and any(
            each.need.group == live.need.group
            and each.backfilled >= self.settings.backfill_max
            and each.tenant.running <= live.tenant.running
            for each in before
        )

    def _judge_migrations(self, live: LiveRequest, now: float) -> None:
        """No request of a draining decode worker could migrate to where `live` is about to go."""
        draining = [worker for worker in self.fleet.of_role("decode") if worker.draining]
        for other in [self._requests.live[rid] for worker in draining for rid in worker.assigned]:
            if other.joined and other.target is None and not self._is_light(other):
                self.judged["a stream could not migrate"] += 1
                assert not self._fetches(other, now), (
                    f"{live.rid} takes the room that {other.rid} could migrate to"
                )

    def _serves(self, live: LiveRequest, now: float) -> bool:
        """Whether a decode worker takes the request with its prompt; or either kind of worker, if both may have it."""
        way = self._local_prompts.way(live, self._with_group(live, now), now)
        if way == "prefill" or not self._may_begin(live, now):
            return False
        if way != "either":
            return self._local_prompts.place(live, now) is not None
        before, live.worth_at = live.worth_at, inf
        choice, reader, _ = self._at_prefill(live, None, now)
        at_decode = self._local_prompts.place_sooner(live, choice, reader, now) is not None
        waits_for_turn, live.worth_at = now < live.worth_at < inf, before
        return at_decode or (choice is not None and not waits_for_turn)

    def _is_light(self, live: LiveRequest) -> bool:
        """Whether its tenant has nothing at some decode worker where others have: room is kept there for such."""
        return any(
            worker.assigned and not worker.by_tenant[live.tenant.name]
            for worker in self.fleet.of_role("decode")
        )

    def _may_begin(self, live: LiveRequest, now: float) -> bool:
        running_max = self.settings.tenant_running_max
        if running_max and live.tenant.running >= running_max and not live.output:
            return False
        held_back = live.sampling_group is not None and live.sampling_group.holds_back(live)
        dropped = live.sampling_group is None and not live.output and waits.is_too_late(self, live, now)
        return now >= live.rests_until and not held_back and not dropped

    def _takes(self, live: LiveRequest, now: float) -> bool:
        """Whether a prefill worker takes the request."""
        source = self._with_group(live, now)
        if not self._may_begin(live, now) or self._local_prompts.way(live, source, now) != "prefill":
            return False
        able = [source] if source else placement.prefill_workers(live.need, self.fleet)
        workers, _ = self._to_begin_at(live, able, now)
        may_take = self._unreachable_pairs.holders(workers, self.fleet, now)
        return (
            placement.place_prefill(live.need, may_take, self.fleet.prefixes, self.settings, now) is not None
        )

    def _fetches(self, live: LiveRequest, now: float) -> bool:
        """Whether a decode worker has room for the request."""
        if now < live.rests_until:
            return False
        workers = self._migrations.untried(live, placement.decode_workers(live.need, self.fleet), now)
        return placement.place_decode(live.need, workers, self.fleet.prefixes, self.settings, now) is not None


def _may_return(live: LiveRequest, state: RequestState) -> bool:
    """Whether it waits by choice: a worker that has failed it may take it, once another one with room has none."""
    return bool(live.avoided) and state is RequestState.WAITING
