"""The router's core: what each input means, and who waits for which worker.

Takes requests of clients, events of links and the time; gives effects. It has no clock, I/O, threads or randomness:
the same inputs give the same effects. The steps of a request are in `request_table`, the choice of a worker in
`placement`, the table of states in `lifecycle`, what a worker's message about a request means in `worker_replies`.

Every input ends with a placement pass if it may have freed room or brought work, events of links with one a batch:
first requests that migrate, because clients read them; then other ready requests, because they tie up pages; then
waiting ones, streams that were cut before new prompts. One that is placed may let in others that found no room before
it: then the pass begins anew. A stream that has begun waits for room as long as it takes (`stranded_streams`). Tenants
take turns in the queues (`VirtualTime`), and smaller requests go past one that finds no room for a while (`backfill`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from router.config import RouterConfig
from router.core.counters import RouterCounters
from router.core.effects import ClientRequest, RequestAborted, RequestCompleted, RouterEffect
from router.core.fleet import placement
from router.core.fleet.prefix_index import PrefixIndex
from router.core.fleet.prompt_seconds import PromptSeconds
from router.core.fleet.unreachable_pairs import UnreachablePairs
from router.core.fleet.worker import KvGroup, Worker
from router.core.fleet.workers import Fleet
from router.core.queueing.admission import (
    refusal,
    target_of,
    target_refusal,
    tenant_refusal,
    timed_out,
    wait_refusal,
)
from router.core.queueing.backfill import PlacementPass
from router.core.queueing.backpressure import Backpressure
from router.core.queueing.balance import Balance
from router.core.queueing.foresight import Foresight
from router.core.queueing.local_prompts import LocalPlacement
from router.core.queueing.migrations import StreamMigrations
from router.core.queueing.stranded_streams import StrandedStreams
from router.core.queueing.stream_packing import StreamPacking
from router.core.requests.lifecycle import TRANSITIONS, RequestEvent, RequestState
from router.core.requests.live_request import LiveRequest
from router.core.requests.request_table import RequestTable
from router.core.requests.reservations import Reservations
from router.core.requests.tenants import Tenant
from router.core.worker_events.membership import Membership
from router.core.worker_events.silent_workers import SilentWorkers
from router.core.worker_events.worker_faults import WorkerFaults
from router.core.worker_events.worker_replies import AboutRequest, WorkerReplies
from router.placement_policies import Placement
from shared.links.events import LinkEvent, PeerDown, PeerUp, Received
from shared.scheduling.tenant_shares import share_of
from shared.wire import messages
from shared.wire.messages import Message


class RouterCore:
    """Requests in, effects out; see the head of this file. `now` never decreases, in seconds."""

    def __init__(self, settings: RouterConfig, now: float):
        self.settings = settings
        self.counters = RouterCounters()
        prefixes = PrefixIndex(settings.prefix_blocks_max)
        self.fleet = Fleet(
            prefixes,
            (settings.model_name,),
            settings.indexed_roles,
            settings.prefilling_per_slot,
            local_prefill=settings.local_prefill,
        )
        self._effects: list[RouterEffect] = []
        self._reservations = Reservations(settings, prefixes, self._effects)
        self._requests = RequestTable(settings, self.counters, self._reservations, self._effects)
        self._backpressure = Backpressure(settings, self.fleet, self._requests.before_decode)
        self._foresight = Foresight(settings, self.fleet, self._backpressure)
        costs = PromptSeconds(settings.cache_miss_weight)
        self._local_prompts = LocalPlacement(settings, self.fleet, self._foresight, self._backpressure, costs)
        self._balance = Balance(settings, self.fleet, self._requests.live)
        self._stream_packing = StreamPacking(
            settings, self.fleet, costs, self._balance, self._backpressure, self._reservations
        )
        self._stranded_streams = StrandedStreams(settings, self.fleet, self._reservations)
        self._unreachable_pairs = UnreachablePairs(settings.unreachable_seconds)
        self._migrations = StreamMigrations(
            settings,
            self.fleet,
            self._requests,
            self._backpressure,
            self._balance,
            self._stream_packing,
            self._unreachable_pairs,
        )
        self._silent_workers = SilentWorkers(
            settings, self.fleet, self._requests, self._reservations, self.counters, self._effects
        )
        self._replies = WorkerReplies(
            settings,
            self._requests,
            self._reservations,
            self._backpressure,
            self._unreachable_pairs,
            self._silent_workers,
            costs,
            self.counters,
        )
        self._membership = Membership(
            self.fleet,
            self._requests,
            self._reservations,
            self._unreachable_pairs,
            self.counters,
            self._effects,
        )
        self._worker_faults = WorkerFaults(
            self.fleet, self._requests, self._membership, self.counters, self._effects
        )
        self._now = now
        self._placeable = False  # something happened that may let a request be placed

    # ---- inputs ------------------------------------------------------------------------------------------------

    def submit(self, request: ClientRequest, now: float) -> None:
        """A client's request; the answer, also a refusal, comes as effects."""
        tenant = self._requests.find_tenant(request.tenant, now)
        failed = refusal(request, self.fleet, len(self._reservations.waiting), self.settings)
        failed = failed or tenant_refusal(request, tenant, self.settings, now)
        target, seconds = target_of(request, self.settings), 0.0
        if failed is None:
            seconds = self._backpressure.seconds_to_wait(self._reservations.waiting, request, tenant, now)
            failed = wait_refusal(seconds, self.settings)
        if seconds:
            seconds += self._backpressure.first_token_seconds
        if failed is None and (failed := target_refusal(seconds, target, self.settings)) is not None:
            self.counters.targets["refused"] += 1
        if failed is not None:
            self._requests.refuse(request, failed)
            return
        self._requests.admit(request, now, target, seconds)
        self._placeable = True
        self._place_pending(now)

    def cancel(self, rid: str, now: float) -> None:
        """The client has gone."""
        live = self._requests.live.get(rid)
        if live is not None:
            self._requests.end(live, RequestEvent.CANCELLED, RequestAborted(), now)
            self._placeable = True
        self._place_pending(now)

    def stop(self, rid: str, now: float) -> None:
        """A stop string was found in the text: the request is complete."""
        live = self._requests.live.get(rid)
        if live is not None:
            self._requests.end(live, RequestEvent.STOPPED, RequestCompleted("stop", live.usage), now)
            self._placeable = True
        self._place_pending(now)

    def link(self, event: LinkEvent, now: float) -> None:
        """A worker came, went or sent a message. `settle` follows, once after a batch of such events.

        An error on the way costs the worker its session; see `worker_faults`.
        """
        self._replies.recipient = None
        try:
            self._link(event, now)
        except Exception as error:
            said = type(event.message if isinstance(event, Received) else event).__name__
            self._worker_faults.drop(event.peer, said, self._replies.recipient, error, now)
            self._placeable = True

    def _link(self, event: LinkEvent, now: float) -> None:
        match event:
            case Received():
                self._received(event.peer, event.message, now)
            case PeerUp():
                self._membership.down(event.peer, now)
                self._membership.up(event)
                self._placeable = True
            case PeerDown():
                self._membership.down(event.peer, now)
                self._placeable = True

    def settle(self, now: float) -> None:
        """Place what can be placed after the events since the last call; one pass costs as much as for one event."""
        self._place_pending(now)

    def start_draining(self) -> None:
        """This router ends soon: from now on no role counts as missing."""
        self._membership.router_drains = True

    def tick(self, now: float) -> None:
        """Time has passed: act on every deadline that is due."""
        for kind, name in self._reservations.deadlines.due(now):
            if kind in ("pause", "patience", "rest", "late"):
                self._placeable = True
            elif kind == "renew":
                self._reservations.renew(self._requests.live[name], now)
            elif kind in ("stall", "silent", "trial"):
                self._placeable |= self._silent_workers.due(kind, name, now)
            else:
                self._expire(self._requests.live[name], kind, now)
        self._place_pending(now)

    def next_deadline(self) -> float | None:
        """When `tick` has something to do at the latest; None: nothing."""
        return self._reservations.deadlines.next()

    # ---- outputs -----------------------------------------------------------------------------------------------

    def take_effects(self) -> list[RouterEffect]:
        """The effects since the last call, to be carried out in order."""
        effects = self._effects.copy()
        self._effects.clear()
        return effects

    def debug(self, rid: str) -> dict[str, object] | None:
        """What became of a request, live or lately ended; None: not known (any more)."""
        live = self._requests.live.get(rid)
        return live.debug() if live is not None else self._requests.find_ended(rid)

    @property
    def requests(self) -> Mapping[str, LiveRequest]:
        """The live requests by rid, in the order they came; to look at only."""
        return self._requests.live

    @property
    def requests_by_state(self) -> dict[str, int]:
        """How many live requests are in each state."""
        return {
            state.value: self._requests.by_state[state]
            for state in RequestState
            if state not in TRANSITIONS.ended
        }

    def oldest_by_state(self, now: float) -> dict[str, float]:
        """How many seconds, in each state, the request waits that has waited longest for a token or another state."""
        oldest = self._requests.oldest_seconds(now)
        return {state: oldest.get(RequestState(state), 0.0) for state in self.requests_by_state}

    # ---- messages ----------------------------------------------------------------------------------------------

    def _received(self, peer: str, message: Message, now: float) -> None:
        worker = self.fleet.workers.get(peer)
        if worker is None:
            self.counters.dropped_messages["unknown_worker"] += 1
        elif isinstance(message, messages.Load):
            self._placeable |= worker.report(message) or self._balance.is_pressed(worker)
            self._reservations.look_at_foreseen(worker)
        elif isinstance(message, messages.Draining):
            self._membership.drain(worker, now)
            self._placeable = True
        elif isinstance(message, messages.Generated):
            for row in message.rows:
                self._placeable |= self._replies.take(worker, row, now)
        elif isinstance(message, messages.Paused):
            self._replies.paused(worker, message, now)
        elif isinstance(message, AboutRequest):
            self._placeable |= self._replies.take(worker, message, now)
        else:
            self.counters.dropped_messages["unexpected"] += 1

    # ---- time --------------------------------------------------------------------------------------------------

    def _expire(self, live: LiveRequest, kind: str, now: float) -> None:
        if kind == "wait" and (until := self._waits_for_group(live, now)) > now:
            self._reservations.deadlines.set(("wait", live.rid), until)
        else:
            said = "target" if kind == "wait" and live.is_past_target(now) else kind
            self.counters.targets["dropped"] += said == "target"
            waited, target = now - live.state_since, live.target_seconds
            failed = timed_out(said, waited, target, self.fleet, self.settings)
            self._requests.end(live, RequestEvent.EXPIRED, failed, now, cause=kind)
        self._placeable = True

    # ---- placement ---------------------------------------------------------------------------------------------

    def _place_pending(self, now: float) -> None:
        assert now >= self._now, (now, self._now)
        self._now = now
        if self._placeable:
            self._placeable = False
            attempts = PlacementPass(self.settings.backfill_max, self.fleet.only_versions)
            while self._place_ready(now) or self._place_waiting(attempts, now):
                attempts.begin_anew()
            self._placeable |= attempts.look_again
            self._backpressure.waiting_passed(attempts, now)
            self._stranded_streams.look(now)
        self._reservations.tell_foreseen()

    def _place_waiting(self, attempts: PlacementPass, now: float) -> bool:
        """Place requests that wait for prefill; returns whether to begin anew, see `_serve`."""
        return self._serve(self._reservations.waiting.in_order(), self._begin, attempts, now)

    def _place_ready(self, now: float) -> bool:
        """Place requests that have left a worker, then those that can leave one (drain, balance), then those not begun.

        In another order a draining worker at saturation would keep its streams until it ends: new requests would take
        each slot that falls free, or the room that a migration had reserved. Returns whether to begin anew.
        """
        self._stream_packing.begin_pass()
        self._local_prompts.begin_pass()
        self._foresight.begin_pass()
        ready = self._reservations.ready.in_order()
        migrating = [live for live in ready if live.migrating]
        others = [live for live in ready if not live.migrating]
        attempts = PlacementPass(self.settings.backfill_max, self.fleet.only_versions)
        anew = self._serve(migrating, self._to_decode, attempts, now)
        if not anew:
            self._migrations.leave_draining(self._reader, now)
            self._migrations.rebalance(now)
            self._migrations.pack_begun(now)
            self._migrations.gather_streams(now)
            anew = self._serve(others, self._to_decode, attempts, now)
        self._backpressure.ready_passed(attempts, self._reservations.ready.in_order(), now)
        return anew

    def _serve(
        self,
        queue: list[LiveRequest],
        place: Callable[[LiveRequest, float], bool | None],
        attempts: PlacementPass,
        now: float,
    ) -> bool:
        """Place requests in order. One that finds no room waits, and smaller ones may go past it.

        `place` says whether it was placed; None: it waits for something else than room. Returns whether the walk ended
        with one that lets in others, whose turn is before those that are left.
        """
        for live in queue:
            if now < live.rests_until or not attempts.may_try(live):
                continue
            live.worth_at, group = math.inf, attempts.group_of(live.need)
            placed = place(live, now)
            if placed:
                attempts.placed(live, group)
                if attempts.lets_in_others:
                    return True
            elif placed is False and now < live.worth_at < math.inf:
                attempts.waits_for_better(live)
                self._reservations.deadlines.set(("patience", live.rid), live.worth_at)
            elif placed is False:
                has_failed_it = any(peer in self.fleet.workers for peer in live.avoided)
                attempts.found_no_room(live, is_choosy=has_failed_it)
            else:
                attempts.waits_apart(live)
        return False

    def _begin(self, live: LiveRequest, now: float) -> bool | None:
        if not live.may_begin(self.settings.tenant_running_max, now):
            return None
        live.ways = None
        way = self._local_prompts.way(live, self._with_group(live, now), now)
        if way in ("prefill", "either"):
            return self._to_prefill(live, now, or_decode=way == "either")
        choice = self._local_prompts.place(live, now)
        if choice is None:
            return None if self._local_prompts.waits_for_sibling(live, now) else False
        return self._to_serve(live, choice, way, now)

    def _to_serve(self, live: LiveRequest, choice: Placement[Worker], why: str, now: float) -> bool:
        """To a decode worker, prompt and all."""
        self.counters.local_prompts[why] += 1
        self.fleet.mark_chosen(choice.worker)
        packs = self._stream_packing.is_wanted(choice.worker.kv_group, now, besides=live)
        self._requests.serve(live, choice, now)
        self._stream_packing.begun(choice.worker)
        if packs:
            self._migrations.ask_to_leave(live, now)
        return True

    def _to_prefill(self, live: LiveRequest, now: float, *, or_decode: bool) -> bool | None:
        """To a prefill worker; or to a decode worker, prompt and all, if that has computed it sooner."""
        source = self._with_group(live, now)
        choice, reader, some_fit = self._at_prefill(live, source, now)
        if or_decode and (sooner := self._local_prompts.place_sooner(live, choice, reader, now)) is not None:
            return self._to_serve(live, sooner, "sooner", now)
        if choice is None or now < live.worth_at < math.inf:
            return False if some_fit and source is None else None
        if live.ways is not None:
            choice = replace(choice, why=f"{choice.why}; {live.ways}")
        self.fleet.mark_chosen(choice.worker)
        self._requests.prefill(live, choice, now, reader)
        return True

    def _at_prefill(
        self, live: LiveRequest, source: Worker | None, now: float
    ) -> tuple[Placement[Worker] | None, Worker | None, bool]:
        """The prefill worker for a request and the decode worker foreseen; and whether any fits it, full or not."""
        workers: Sequence[Worker] = []
        rounds = [[source]] if source else placement.prefill_rounds(live.need, self.fleet, self.settings)
        for workers in rounds:
            may_begin, readers = self._to_begin_at(live, workers, now)
            may_take = self._unreachable_pairs.holders(may_begin, self.fleet, now)
            choice = placement.place_prefill(live.need, may_take, self.fleet.prefixes, self.settings, now)
            if choice is not None:
                return choice, readers[choice.worker.kv_group], True
        return None, None, bool(workers)

    def _with_group(self, live: LiveRequest, now: float) -> Worker | None:
        """The prefill worker that has its prompt from a sibling, and that it waits for; None: any will do."""
        worker = live.sampling_group.source_for(now) if live.sampling_group is not None else None
        if (
            worker is None
            or worker.hello.role != "prefill"
            or worker.peer in live.avoided
            or self._unreachable_pairs.cut_off(worker, self.fleet, now)
        ):
            return None
        return worker if placement.could_prefill(live.need, worker, self.fleet) else None

    def _waits_for_group(self, live: LiveRequest, now: float) -> float:
        """Until when it may wait for a worker, since a sibling computes or has just computed its prompt."""
        if live.sampling_group is None:
            return now
        since = now if live.sampling_group.holds_back(live) else live.sampling_group.computed_at
        return since + self.settings.waiting_seconds_max

    def _to_begin_at(
        self, live: LiveRequest, workers: Sequence[Worker], now: float
    ) -> tuple[Sequence[Worker], dict[KvGroup, Worker | None]]:
        """The prefill workers that may begin the request, and by KV group the decode worker that will have room."""
        in_open_lanes = workers if live.output else self._in_open_lanes(workers, live.tenant, now)
        readers = self._foresight.readers(live, {worker.kv_group for worker in in_open_lanes})
        return [worker for worker in in_open_lanes if worker.kv_group in readers], readers

    def _in_open_lanes(self, workers: Sequence[Worker], tenant: Tenant, now: float) -> Sequence[Worker]:
        """The prefill workers that one more request of this tenant may go to: decode takes soon what they compute."""
        ready_max = self.settings.ready_max
        share = share_of(ready_max, self.settings.tenant_share_max)
        standing = self._requests.count_before_decode()
        if standing >= ready_max or tenant.before_decode >= share:
            return []
        full = self._backpressure.full_lanes(tenant, now)
        return [worker for worker in workers if worker.kv_group not in full] if full else workers

    def _to_decode(self, live: LiveRequest, now: float) -> bool | None:
        choice, some_fit = self._reader(live, now)
        if choice is not None:
            self.fleet.mark_chosen(choice.worker)
            self._requests.decode(live, choice, now)
            return True
        if cause := self._migrations.cornered(live, now):
            event, peer = RequestEvent.LEASE_ENDED, live.holder.peer if live.holder is not None else ""
            self._requests.try_again(live, event, now, peer=peer, cause=cause, counts=False)
            return None
        if not live.unread_by:
            return False if some_fit else None
        if self._better_elsewhere(live, now):
            self._requests.reroute(live, RequestEvent.LEASE_ENDED, now, peer=live.unread_by[-1])
        return None  # it waits for other workers than the requests behind it

    def _reader(self, live: LiveRequest, now: float) -> tuple[Placement[Worker] | None, bool]:
        """A decode worker that has room and has not failed to fetch its pages, and whether there is any, full or not.

        One that could not read from their holder lately is asked only where no other has room.
        """
        assert live.waits_on is not None, live.rid
        if (choice := self._beside_group(live, live.waits_on, now)) is not None:
            return choice, True
        some_fit, is_late = False, now >= self._reservations.late_at(live)
        packs = self._stream_packing.is_wanted(live.waits_on.kv_group, now)
        for workers in placement.decode_rounds(live.need, self.fleet, self.settings):
            untried = self._migrations.untried(live, workers, now)
            some_fit |= bool(untried)
            for readers in self._unreachable_pairs.readers(live.waits_on, untried, now):
                choice = self._stream_packing.place(live, readers, now) if packs else None
                if choice is None and live.migrating and live.migration_cause == "balance":
                    choice = self._balance.place(live, readers, 1.0, now, evens=False)
                choice = choice or placement.place_decode(
                    live.need,
                    readers,
                    self.fleet.prefixes,
                    self.settings,
                    now,
                    is_late=is_late,
                    only=live.tenant.running == 1,
                )
                if choice is not None:
                    return choice, True
        return None, some_fit

    def _beside_group(self, live: LiveRequest, holder: Worker, now: float) -> Placement[Worker] | None:
        """The decode worker that has the prompt from a sibling, if it has room and can fetch the rest."""
        reader = live.sampling_group.reader if live.sampling_group is not None else None
        if (
            live.sampling_group is None
            or reader is None
            or not placement.could_decode(live.need, reader, self.fleet)
        ):
            return None
        if reader.peer in live.unread_by or not next(self._unreachable_pairs.readers(holder, [reader], now)):
            return None
        shared = len(live.request.token_ids) if live.sampling_group.is_at_reader else 0
        return placement.place_beside_group(live.need, reader, shared, self.settings, now)

    def _better_elsewhere(self, live: LiveRequest, now: float) -> bool:
        """Whether to compute a request anew whose pages could not be fetched.

        If no other decode worker will ever fetch them; or, once, if the others are full while one that failed has room
        and another prefill worker is there.
        """
        workers = placement.decode_workers(live.need, self.fleet)
        if all(worker.draining for worker in self._migrations.untried(live, workers, now)):
            return True
        if live.rerouted:
            return False
        tried = (*live.avoided, live.waits_on.peer if live.waits_on else "")
        elsewhere = any(
            not worker.draining and worker.peer not in tried
            for worker in placement.prefill_workers(live.need, self.fleet)
        )
        prefixes = self.fleet.prefixes
        return (
            elsewhere and placement.place_decode(live.need, workers, prefixes, self.settings, now) is not None
        )
