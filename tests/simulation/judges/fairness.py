"""The oracle for turns: the real cores, and each admission is judged as it happens.

What decision 11 promises is exact in admissions, whatever the time and whatever fails:

- At a router no request is placed while another one, whose turn is before, would find room. Requests that migrate come
  before all others, streams that were cut before new prompts, and nothing new is placed on a decode worker while a
  request of a draining one finds room.
- One that leaves a place to those behind it, since a better one comes sooner, has chosen so for the whole pass: what
  they take may change what is best, and the next pass asks it first.
- When it has settled what came, no first request of a tenant waits that a prefill worker would take (`places`).
- What holds at a prefill worker stands in `prompts`.
- Beside a prompt of several steps at a decode worker short ones take their share of its steps, no more and no less.
- At a decode worker only requests below their tenant's share take what is kept for them; those that resume do not.
- A request below its share waits, or is refused, only where it finds no place at all.
- At a decode worker pages that arrive leave the largest request what it can want until they have landed.
- At a decode worker a request that comes in leaves room for the next steps of all, once lengths of outputs are known.
- Pages that one decode worker could not fetch are kept for another.
- At a decode worker no row misses a step for a page while the cache could give one.

Bounds of few places keep nothing (`share_of` rounds to whole places), so there a request below its share waits for the
next place that comes free, and only its turn is judged. Which request is below its share is computed here once more,
not asked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from decode.admission import BACKFILL_MAX
from decode.config import DecodeConfig
from decode.local_prompts import SHORT_SHARE
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
from shared.batch.req import Req
from shared.batch.schedule_batch import ExtendRow, ScheduleBatch
from shared.kv.page_pool import PageState
from shared.links.events import LinkEvent
from shared.scheduling.tenant_shares import share_of, tokens_by_tenant
from shared.wire.baton import Baton
from shared.wire.messages import Message, Migrating
from tests.doubles.breaking import BrokenOffError, broken_off_at
from tests.simulation.judges import waits
from tests.simulation.judges.balance import BalanceJudge
from tests.simulation.judges.caches import JudgedCaches
from tests.simulation.judges.fetches import first_unread, prove_kept
from tests.simulation.judges.foreseen import ForeseenJudge, JudgedForeseen
from tests.simulation.judges.foresight import prove_foreseen
from tests.simulation.judges.free_pages import FreePagesJudge
from tests.simulation.judges.moves import JudgedMigrations
from tests.simulation.judges.places import FreePlaces, prove_nobody_waits_beside_a_free_place
from tests.simulation.judges.prompts import is_below_share
from tests.simulation.judges.turns import TurnJudge
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


class JudgedDecode(JudgedForeseen):
    """The core of a decode worker. Each admission, refusal and resume is judged."""

    def __init__(self, config: DecodeConfig, *, pages: int, **rest: Any):
        super().__init__(config, pages=pages, **rest)
        slots, share = config.max_running_requests, config.tenant_share_max
        self._slots_below_share = slots - share_of(slots, share)
        self._retract_steps = config.retract_steps
        self._local_tokens_max = config.local_tokens_max
        self._saved = 0.0  # tokens that steps which cut a prompt have left to short ones so far
        self._pages_below_share = pages - share_of(pages, share)
        self._turns, self._planned_at = TurnJudge(config.turn_seconds, self.judged), 0.0

    def _admit(self, req: Req, baton: Baton, now: float) -> None:
        present = [*self._with_pages, *self._transfer_queue.transferring]
        held = tokens_by_tenant(present)
        largest = self._pages_of_largest()
        super()._admit(req, baton, now)
        if req in self._transfer_queue.transferring:
            self._judge_arriving(req, largest)
        self._judge_admission(req, baton.kv_len, present, held)

    def _start_prompt(self, req: Req) -> None:
        present = [*self._with_pages, *self._transfer_queue.transferring]
        held, retracted = tokens_by_tenant(present), self._retraction.active
        super()._start_prompt(req)
        self.judged["a prompt is begun at decode"] += req.slot is not None
        if req.slot is not None and retracted:
            assert self._is_below_share(req, held), f"{req.rid} is begun while streams are retracted"
        self._judge_admission(req, len(req.token_ids), present, held)

    def _retract_until_fits(self) -> bool:
        before, running = self._prompts.served, bool(self._batch.running)
        present = [*self._with_pages, *self._transfer_queue.transferring] if before else []
        retracted = super()._retract_until_fits()
        kept = self._prompts.served
        put_back = [req for req in before if req not in kept]
        self.judged["a prompt is put back for a stream"] += len(put_back)
        assert running or not put_back, f"{[req.rid for req in put_back]} are put back, and nobody runs"
        if retracted:
            there = [each for each in present if each not in put_back]
            held = {req: tokens_by_tenant(each for each in there if each is not req) for req in kept}
            above = [req.rid for req in kept if not self._is_below_share(req, held[req])]
            assert not above, f"streams are retracted beside the prompts {above}"
        return retracted

    def _judge_admission(self, req: Req, tokens: int, present: list[Req], held: Counter[str]) -> None:
        """A request with so many tokens has come in beside those that were present, or was refused."""
        if req.slot is None:
            self._judge_refusal(req, tokens, held)
        elif self._is_below_share(req, held):
            self.judged["below its share into what is kept"] += (
                self._batch.free_slots < self._slots_below_share
            )
        elif present:
            self._judge_slots(req)
            self._judge_pages(req)
            self._judge_growth([*present, req])

    def on_copy(self, copy_id: int, now: float) -> None:
        super().on_copy(copy_id, now)
        self._turns.came_in_line(self.requests)

    def _back_up_settled(self) -> None:
        settling = list(self._retraction.settling)  # in the order in which they left
        super()._back_up_settled()
        self._turns.came_in_line(settling)

    def _take_turns(self) -> bool:
        running, now = [*self._batch.running.values()], self._planned_at
        self._turns.look(
            running, [req.state for req in self.requests if req not in self._prompts.served], now
        )
        any_left = super()._take_turns()
        leaving = [req for req in running if req not in self._batch.running.values()]
        pool = self.memory.pool
        if any_left:
            staying = [req for req in self.requests if req.slot is not None]
            self._turns.left(leaving, staying, self.memory, now)
        elif not (
            self._transfer_queue.in_flight
            or self._retraction.copying
            or self._retraction.settling
            or self._prompts.extending
            or self._batch.joining
            or self._migrations.settling
            or pool.count(PageState.RETIRING)
            or pool.count(PageState.QUARANTINED)
            or len(self.leases)
        ):
            self._turns.nobody_left(running, self._retraction, now)
        return any_left

    def plan(self, now: float) -> ScheduleBatch | None:
        self._planned_at = self._retraction.turns.now = now
        self._judge_resumed()
        without_page, there = self.counters.rows_without_page, self._prompts.extending
        batch = super().plan(now)
        if batch is not None and batch.extend:
            tokens, page = sum(len(row.token_ids) for row in batch.extend), self.memory.page_size
            assert tokens <= max(self._local_tokens_max, page), (
                f"step {batch.step} computes {tokens} tokens again"
            )
            self.judged["tokens are computed again beside streams"] += bool(batch.decode_slots)
            self._judge_short(batch.extend, there)
        if batch is not None and self.counters.rows_without_page > without_page:
            left = self.memory.cache.evictable
            self.judged["a row misses a step"] += 1
            assert not left, f"a row misses a step, but {left} pages could be evicted"
        return batch

    def _judge_short(self, rows: Sequence[ExtendRow], there: list[Req]) -> None:
        """Those that go past the first get no more than was saved for them, and each that fits what is left does."""
        computed = {row.slot: len(row.token_ids) for row in rows}
        tokens = {
            each.req: each.end - each.req.launched_len + computed.get(each.req.slot or 0, 0)
            for each in self._prompts.in_order
        }
        first = next(req for req, count in tokens.items() if count)
        slots = [row.slot for row in rows]
        place = slots.index(first.slot or 0) if first.slot in computed else len(slots)
        past = sum(computed[slot] for slot in slots[:place])
        self._saved -= past
        assert self._saved >= 0, f"{-self._saved} tokens too many go past {first.rid}"
        self.judged["short past a long one at decode"] += past > 0
        if place < len(slots):
            held_up = [
                req.rid
                for req, count in tokens.items()
                if req in there
                and req.slot not in computed
                and 0 < count < tokens[first]
                and count <= self._saved
            ]
            assert not held_up, f"{held_up} would fit the steps of {first.rid}"
        last = next(req for req in tokens if req.slot == slots[-1])
        if tokens[last] > computed[slots[-1]]:
            self._saved = min(self._saved + SHORT_SHARE * sum(computed.values()), self._local_tokens_max)

    def _judge_resumed(self) -> None:
        """Resume requests, as `plan` does first, and judge what is left."""
        beside = self._with_pages
        slots_used = self._batch.slots_used
        self._resume_retracted()
        self._turns.resumed()
        resumed = self._batch.slots_used - slots_used
        if resumed and self._batch.slots_used > 1:
            self._judge_slots("a retracted request")
        if resumed and beside:
            self._judge_pages("a retracted request")

    def _is_below_share(self, req: Req, held: Counter[str]) -> bool:
        return is_below_share(req, held, req.final_kv_len, self.memory.pool.total * self.memory.page_size)

    def _judge_slots(self, who: Req | str) -> None:
        left, kept = self._batch.free_slots, self._slots_below_share
        self.judged["no more than a share"] += left == kept
        assert left >= kept, f"{_name(who)} comes in and leaves {left} slots; {kept} are kept"

    def _judge_pages(self, who: Req | str) -> None:
        left, kept = self.memory.available_pages, self._pages_below_share
        assert left >= kept, f"{_name(who)} comes in and leaves {left} pages; {kept} are kept"

    def _judge_arriving(self, req: Req, largest: int) -> None:
        """What arrives leaves the largest running request the pages that it can want until then."""
        pool = self.memory.pool
        arriving = {page for other in self._transfer_queue.transferring for page in other.pages}
        left = pool.total - pool.count(PageState.QUARANTINED) - len(arriving)
        self.judged["the largest keeps its pages"] += left < largest + len(arriving)
        assert left >= largest, f"{req.rid} arrives and leaves {left} pages; the largest can want {largest}"

    def _pages_of_largest(self) -> int:
        """Pages that the largest request can hold when what arrives has landed or is given up."""
        steps = self._admission.steps_until_landed
        lengths = [min(other.final_kv_len, other.growing_from + steps) for other in self._with_pages]
        return max(map(self.memory.pages_for, lengths), default=0)

    def _judge_growth(self, present: list[Req]) -> None:
        """A new request leaves the pages that the next steps of all take, so that it causes no retraction at once."""
        if not self._admission.lengths.known:
            return
        tokens = sum(min(req.remaining_new_tokens, self._retract_steps) for req in present)
        left, wanted = self.memory.available_pages, self.memory.pages_for(tokens)
        self.judged["room by lengths seen"] += 1
        assert left >= wanted, f"{present[-1].rid} leaves {left} pages; the next steps of all take {wanted}"

    def _judge_refusal(self, req: Req, tokens: int, held: Counter[str]) -> None:
        """A request below its share finds no slot, or not the pages that it needs now beside the largest request's."""
        memory = self.memory
        if not self._is_below_share(req, held):
            return
        self.judged["below its share refused"] += 1
        if not self._batch.free_slots or self._retraction.backfilled >= BACKFILL_MAX:
            return
        pool = memory.pool
        usable = pool.total - pool.count(PageState.QUARANTINED)
        arriving = {page for other in self._transfer_queue.transferring for page in other.pages}
        room = min(memory.available_pages, usable - self._pages_of_largest() - len(arriving))
        if memory.pages_for(req.final_kv_len) <= usable and not pool.count(PageState.RETIRING):
            assert memory.pages_for(tokens) > room, (
                f"{req.rid} is below its share and refused for {room} pages"
            )


def _may_return(live: LiveRequest, state: RequestState) -> bool:
    """Whether it waits by choice: a worker that has failed it may take it, once another one with room has none."""
    return bool(live.avoided) and state is RequestState.WAITING


def _name(who: Req | str) -> str:
    return who if isinstance(who, str) else f"{who.rid} of {who.tenant}"
