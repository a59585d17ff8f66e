"""The oracle for free places: no request waits at a router while a prefill worker would take it.

It is asked when a router has settled what came, of the first request of each tenant among those that compete for the
same workers. The others have a turn behind it. Such a request may wait while it rests after a loss, while its tenant
runs as many as it may, where no worker of the fleet can ever have it, and while room is kept for one in front of it
that many have gone past.

Who waits, and in which order, the queue says. Whether a worker takes a request is computed here once more, from what
workers report and what lives: neither the fleet's lists nor placement is asked. The rate at which decode takes requests
is the router's own measurement; what follows from it is bounded here from below. So are workers that others could not
read from: they count as full; and when a stream was late last.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from math import inf

from router.config import RouterConfig
from router.core.dispatch import RouterCore
from router.core.fleet.prompt_seconds import STEPS, STREAM_WEIGHT
from router.core.fleet.worker import KvGroup, Worker
from router.core.requests.lifecycle import RequestState
from router.core.requests.live_request import LiveRequest
from router.core.requests.sampling_group import PATIENCE_SECONDS
from router.placement_policies import FOUND_SHARE_MIN
from shared.scheduling.tenant_shares import share_of
from tests.simulation.judges.foresight import surely_allowed
from tests.simulation.judges.waits import STANDING, late_stream

WORTH_WAITING = 1.2  # times as long as one without a turn
CHANGED = 4  # what workers tell of their rates wakes nobody, so a prompt may wait by what they told before
CHANGED_SECONDS = 0.5  # … and at least for so long
STANDING_MIN = 2  # requests that may stand before decode in every kv_group


def prove_nobody_waits_beside_a_free_place(core: RouterCore, now: float) -> int:
    """Returns how many requests were asked about. Nobody is where a deadline is due: its tick is still to come."""
    waiting, deadline = core._requests.reservations.waiting.in_order(), core.next_deadline()
    assert len(waiting) == sum(live.state is RequestState.WAITING for live in core._requests.live.values())
    if not waiting or (deadline is not None and deadline <= now):
        return 0
    places = FreePlaces(core, now)
    asked: set[tuple[object, str]] = set()
    fronts: defaultdict[object, list[LiveRequest]] = defaultdict(list)
    choosing: set[tuple[object, str]] = set()  # those behind them are tried, too
    for live in waiting:
        group, tenant, rivals = live.need.group, live.tenant.name, places.rivals_of(live)
        if not places.is_wanted(live):
            continue
        if (group, tenant) in asked:
            fronts[rivals] += [live] if (group, tenant) in choosing else []
            continue
        place = next(places.open_to(live), None)
        if place is None and places.follows(live):
            continue  # it waits for one worker alone, not for room
        asked.add((group, tenant))
        if place is None:
            fronts[rivals].append(live)
            if places.may_choose(live):
                choosing.add((group, tenant))
        elif not any(places.is_kept_for(front, live) for front in fronts[rivals]):
            raise AssertionError(
                f"{live.rid} waits since {live.state_since:.3f} s, and {place.peer} would take it"
            )
    return len(asked)


class FreePlaces:
    """What each prefill worker of a router would take at a moment, by the rules."""

    def __init__(self, core: RouterCore, now: float):
        self._core = core
        self._settings = core.settings
        self._now = now
        self._running: Counter[str] = Counter()  # by tenant
        self._before_decode: Counter[str] = Counter()  # by tenant, in all kv_groups
        self._standing: defaultdict[KvGroup, Counter[str]] = defaultdict(Counter)  # the same by kv_group
        for live in core._requests.live.values():
            tenant = live.tenant.name
            self._running[tenant] += live.state is not RequestState.WAITING
            if live.state in (RequestState.PREFILLING, RequestState.READY):
                self._before_decode[tenant] += 1
                self._standing[live.kv_group][tenant] += 1
        self._readers: defaultdict[KvGroup, list[str]] = defaultdict(list)
        self._prefill: list[Worker] = []
        self._whole: list[Worker] = []  # decode workers that compute prompts
        for worker in core.fleet.workers.values():
            if worker.hello.role == "prefill":
                self._prefill.append(worker)
            elif not worker.draining:
                self._readers[worker.kv_group].append(worker.peer)
                if core.settings.local_prefill != "never" and worker.hello.limits.extend_tokens:
                    self._whole += [worker] if "Serve" in worker.hello.understands else []

    def is_wanted(self, live: LiveRequest) -> bool:
        """Whether the request could go anywhere, if there were room."""
        running_max = self._settings.tenant_running_max
        may_run = live.output or not running_max or self._running[live.tenant.name] < running_max
        return (
            self._now >= live.rests_until
            and bool(may_run)
            and not self._held_back(live)
            and (any(self._able(live)) or any(self.able_whole(live)))
        )

    def rivals_of(self, live: LiveRequest) -> tuple[str, str]:
        """What competes with it: requests of its model, and if there are several versions, of the same one."""
        name = live.request.model
        hellos = [worker.hello for worker in self._core.fleet.workers.values()]
        is_only = len({hello.model for hello in hellos if hello.model_name == name}) == 1
        return (name, "" if is_only else live.model)

    def open_to(self, live: LiveRequest) -> Iterator[Worker]:
        """The workers that would take the request."""
        by_prefill, whole = self.ways(live)
        if whole:
            yield from self.open_whole(live)
        if by_prefill and not (whole and self._may_wait_for_turn(live)):
            yield from self._open_to_prompt(live)

    def _may_wait_for_turn(self, live: LiveRequest) -> bool:
        """Whether a decode worker has room for its prompt and may have it sooner, and the time for that is not over.

        Nobody is woken when that worker has no room any more: then it waits on as long as it was worth it.
        """
        latest = (live.state_since + live.wait_until) / 2  # half of the time that it has left
        if self._now - CHANGED_SECONDS >= latest:
            return False
        return self._may_wait_on(live) or any(self.whole_with_room(live, at_most=True)[0])

    def _may_wait_on(self, live: LiveRequest) -> bool:
        """Whether it waits for a decode worker that has it sooner, or had room for it when it was last tried."""
        latest = (live.state_since + live.wait_until) / 2
        return self._now - CHANGED_SECONDS < latest and self._now < live.worth_at < inf

    def _open_to_prompt(self, live: LiveRequest) -> Iterator[Worker]:
        """Prefill workers that would take the request."""
        tenant, share_max = live.tenant.name, self._settings.tenant_share_max
        ready_max = self._settings.ready_max
        if not live.output and (
            self._before_decode.total() >= ready_max
            or self._before_decode[tenant] >= share_of(ready_max, share_max)
        ):
            return
        for worker in self._sources(live) or self._able(live):
            places = max(1, int(worker.hello.limits.slots * self._settings.prefilling_per_slot))
            own = sum(each.tenant == tenant for each in worker.assigned.values())
            if (
                worker.load.accepting
                and not worker.draining
                and (worker.doubted is None or (worker.doubted == "tried" and not worker.assigned))
                and self._now >= worker.paused_until
                and len(worker.assigned) < places
                and (not own or own < share_of(places, share_max))
                and (live.output or self._lane_is_open(worker.kv_group, tenant))
                and (live.output or not late_stream(self._core, worker.kv_group, live.tenant, self._now))
                and (live.output or surely_allowed(self._core, live, worker.kv_group))
                and not self._is_cut_off(worker)
            ):
                yield worker

    def ways(self, live: LiveRequest) -> tuple[bool, bool]:
        """Whether a prefill worker may compute its prompt, and whether a decode worker may."""
        whole, way = any(self.able_whole(live)), self._settings.local_prefill
        way = "fallback" if live.request.by_prefill else way
        if not whole or way == "always":
            return not whole, whole
        by_prefill = not all(
            worker.draining or worker.peer in live.avoided or self._lacks_features(live, worker)
            for worker in self._able(live)
        )
        if not by_prefill or way == "fallback":
            return by_prefill, not by_prefill
        followed = bool(self._whole_sources(live)), bool(self._sources(live))
        return (not followed[0], followed[0] or not followed[1])

    def _lacks_features(self, live: LiveRequest, worker: Worker) -> bool:
        return not live.request.params.features <= set(worker.hello.features)

    def able_whole(self, live: LiveRequest) -> Iterator[Worker]:
        """Decode workers that could serve the request from first to last, full or not."""
        tokens = len(live.request.token_ids) + live.request.params.max_new_tokens
        for worker in self._whole:
            limits, hello = worker.hello.limits, worker.hello
            if (
                hello.model_name == live.request.model
                and live.model in ("", hello.model)
                and tokens <= min(limits.context_len, limits.pages * limits.page_size)
                and not self._lacks_features(live, worker)
            ):
                yield worker

    def follows(self, live: LiveRequest) -> bool:
        """Whether it waits for the worker that has computed its prompt for a sibling."""
        by_prefill, whole = self.ways(live)
        return bool((whole and self._whole_sources(live)) or (by_prefill and self._sources(live)))

    def _whole_sources(self, live: LiveRequest) -> list[Worker]:
        group = live.sampling_group
        if group is None or self._now >= group.computed_at + PATIENCE_SECONDS:
            return []
        places = self._places_of_prompt(live)
        return [each for each in self.able_whole(live) if each in places and each.peer not in live.avoided]

    def open_whole(self, live: LiveRequest, *, at_once: bool = False) -> Iterator[Worker]:
        """Decode workers that would take the request with its prompt.

        `at_once`: it is being placed now; else the router may have looked last when they told other rates.
        """
        yield from self._worth_it(live, *self.whole_with_room(live), at_once)

    def may_choose(self, live: LiveRequest) -> bool:
        """Whether it may be that a worker would take its prompt, and it waits for one at decode that has it sooner."""
        return len(self.whole_with_room(live)[0]) > (not self.ways(live)[0])

    def whole_with_room(
        self, live: LiveRequest, *, at_most: bool = False
    ) -> tuple[list[Worker], list[Worker]]:
        """Decode workers that have room for the request with its prompt, and those of them that have a turn.

        `at_most`: also those that accept nothing, which may yet take it from a tenant that has nothing there; and
        without what has been placed there at this moment, which may have come behind the request in the same pass.
        """
        tenant, share_max = live.tenant.name, self._settings.tenant_share_max
        tokens = len(live.request.token_ids) + len(live.output)
        able = list(self.able_whole(live))
        with_room, with_turn = list[Worker](), list[Worker]()
        for worker in self._whole_sources(live) or able:
            limits, load, reserved = worker.hello.limits, worker.load, sum(worker.reserved.values())
            assigned = [
                each for rid, each in worker.assigned.items() if not (at_most and self._placed_now(rid))
            ]
            new = [each for each in assigned if each.load_number == worker.load_number]
            by_tenant = Counter(each.tenant for each in assigned)
            own = by_tenant[tenant]
            pages, given = -(-tokens // limits.page_size), sum(each.pages for each in new) + reserved
            told = max(
                len(worker.assigned) - len(new), load.queued + load.running - worker.ended.requests
            )  # requests, of whatever router
            others = max(1, len({each.tenant for each in worker.assigned.values()}))
            even = limits.pages * limits.page_size / (others + 2)
            is_light = told > 0 and not own and tenant not in worker.refused
            is_light &= len(live.request.token_ids) + live.request.params.max_new_tokens - 1 <= even
            computing = sum(
                len(each.request.token_ids) + len(each.output)
                for each in self._core._requests.live.values()
                if each.worker is worker and each.state is RequestState.EXTENDING
            )
            if (
                (load.accepting or (at_most and not own))
                and (worker.doubted is None or (worker.doubted == "tried" and not worker.assigned))
                and (self._now >= worker.paused_until or pages < worker.paused_pages)
                and load.slots_free > len(new) + len(worker.reserved)
                and (
                    load.slots_for_new < 0
                    or load.slots_for_new + worker.ended.requests > len(new) + len(worker.reserved)
                    or not (load.queued or load.running or assigned)
                    or (own < max(by_tenant.values(), default=1) and tenant not in worker.refused)
                )
                and len(assigned) + len(worker.reserved) < limits.slots
                and load.free_pages - given >= pages
                and (not own or own < share_of(limits.slots, share_max))
                and (live.output or not late_stream(self._core, worker.kv_group, live.tenant, self._now))
                and (
                    live.output
                    or load.pages_for_new < 0
                    or (load.free_pages if is_light else load.pages_for_new) - given - _begun_for(worker)
                    >= pages
                )
            ):
                with_room.append(worker)
                with_turn += [worker] if computing + load.queued_tokens < 2 * limits.extend_tokens else []
        return with_room, with_turn

    def _placed_now(self, rid: str) -> bool:
        live = self._core._requests.live.get(rid)
        return live is not None and live.state_since == self._now

    def _worth_it(
        self, live: LiveRequest, with_room: list[Worker], with_turn: list[Worker], at_once: bool
    ) -> list[Worker]:
        """Those that a prompt surely goes to: none where another one that has no turn yet may be worth waiting for."""
        if live.avoided:
            return []  # nobody is woken when another one, which had room, has none any more
        if len(with_room) < 2:
            # … nor when that is the better one that it waits for
            return [] if self._may_wait_on(live) else with_turn
        if live.output:
            return []
        cached = self.expected(live, own=not self.ways(live)[0])
        tokens = len(live.request.token_ids)
        costs = {each: cost_at(self._settings, each, tokens, cached(each)) for each in with_room}
        if inf in costs.values():
            return []
        waited = self._now - live.state_since + live.seconds.get(RequestState.WAITING.value, 0.0)
        latest = (live.state_since + live.wait_until) / 2  # half of the time that it has left
        if at_once:
            least = WORTH_WAITING * min(costs.values())
            return [
                each
                for each in with_turn
                if costs[each] <= least + (0 if each.tokens_waiting else waited) or self._now >= latest
            ]
        waited -= CHANGED_SECONDS
        return [
            each
            for each in with_turn
            if (not each.tokens_waiting and waited >= CHANGED * costs[each])
            or self._now - CHANGED_SECONDS >= latest
        ]

    def expected(self, live: LiveRequest, *, own: bool) -> Callable[[Worker], int]:
        """Tokens of its prompt that a decode worker is expected to have; where prefill has no way, `own` ones, too."""
        index, most = self._core.fleet.prefixes, len(live.request.token_ids) + len(live.output) - 1
        known = {
            worker: min(index.hits(live.need.blocks).tokens(worker.peer), most) for worker in self._whole
        }
        able = list(self.able_whole(live))
        agreed = index.found(live.request.model, "decode").tokens >= FOUND_SHARE_MIN
        if (
            own
            and agreed
            and able
            and len(live.need.blocks) > 1
            and not any(known[worker] for worker in able)
        ):
            early = int.from_bytes(live.need.blocks[1])
            known[max(able, key=lambda each: (early * each.salt % 2**64, each.peer))] = most
        return lambda worker: known.get(worker, 0)

    def is_kept_for(self, front: LiveRequest, live: LiveRequest) -> bool:
        """Whether the room that comes is kept for `front`, which others have gone past, and not for `live`."""
        kept = front.backfilled >= self._settings.backfill_max
        return kept and self._running[live.tenant.name] >= self._running[front.tenant.name]

    def _held_back(self, live: LiveRequest) -> bool:
        """Whether a sibling computes its prompt, which no worker that takes requests has computed before."""
        first = live.sampling_group._computing if live.sampling_group is not None else None
        if first is None or first is live or self._places_of_prompt(live):
            return False
        return first.rid in self._core._requests.live and first.state in (
            RequestState.PREFILLING,
            RequestState.EXTENDING,
        )

    def _sources(self, live: LiveRequest) -> list[Worker]:
        """The worker that it waits for, because it has computed the prompt just now."""
        group = live.sampling_group
        if group is None or self._now >= group.computed_at + PATIENCE_SECONDS:
            return []
        return [
            worker
            for worker in self._able(live)
            if worker in self._places_of_prompt(live)
            and worker.peer not in live.avoided
            and not self._core._unreachable_pairs.cut_off(worker, self._core.fleet, self._now)
        ]

    def _places_of_prompt(self, live: LiveRequest) -> list[Worker]:
        worker = live.sampling_group._source if live.sampling_group is not None else None
        return [worker] if worker is not None and worker.up and not worker.draining else []

    def _able(self, live: LiveRequest) -> Iterator[Worker]:
        """Workers that could compute its prompt, with a decode worker that could go on with it, full or not."""
        request, tokens = live.request, len(live.request.token_ids) + len(live.output)
        more_than_one = request.params.max_new_tokens - len(live.output) > 1
        at_most = len(request.token_ids) + request.params.max_new_tokens
        for worker in self._prefill:
            limits, hello = worker.hello.limits, worker.hello
            capacity = [n for n in (limits.context_len, limits.pages * limits.page_size) if n]
            if (
                hello.model_name == request.model
                and live.model in ("", hello.model)
                and all(tokens <= most for most in capacity)
                and (not more_than_one or self._holds(worker.kv_group, at_most, request.params.features))
            ):
                yield worker

    def _holds(self, kv_group: KvGroup, tokens: int, features: frozenset[str]) -> bool:
        """Whether a decode worker that reads these pages has so large a context and pool, and knows the sampling."""
        for worker in map(self._core.fleet.workers.__getitem__, self._readers[kv_group]):
            limits = worker.hello.limits
            capacity = [n for n in (limits.context_len, limits.pages * limits.page_size) if n]
            if all(tokens <= most for most in capacity) and features <= set(worker.hello.features):
                return True
        return False

    def _lane_is_open(self, kv_group: KvGroup, tenant: str) -> bool:
        """Whether less of the tenant stands before decode than decode surely takes in 0.75 of `ready_seconds`."""
        rate = self._core._backpressure._kv_groups.get(kv_group)
        was_late = kv_group in self._core._backpressure._late_at
        if rate is None or not (rate.blocked or was_late):
            return True
        seconds = self._settings.ready_seconds
        per_second = rate.per_second(self._now, seconds)
        if per_second is None:
            return True
        bound = max(STANDING_MIN, len(self._readers[kv_group]), int(per_second * STANDING * seconds))
        standing = self._standing[kv_group]
        if not standing[tenant]:
            return len(standing) < bound
        share = share_of(bound, self._settings.tenant_share_max)
        return standing.total() < bound and standing[tenant] < share

    def _is_cut_off(self, worker: Worker) -> bool:
        failed = self._core._unreachable_pairs._until.get(worker.peer, {})
        return any(until > self._now for until in failed.values())


def cost_at(settings: RouterConfig, worker: Worker, tokens: int, cached: int) -> float:
    """Seconds until the worker has computed the prompt behind what it has to; what is not cached counts for more."""
    load = worker.load
    if not load.extend_rate:
        return inf
    per_second = worker.rates.rate(
        worker.hello, load
    ).tokens_per_second  # no more than a few times the others'
    new = [rid for rid, each in worker.assigned.items() if each.load_number == worker.load_number]
    beside = 0.0
    if worker.hello.role == "decode":
        told = max(0, load.queued_tokens - worker.extended_since)
        queued = float(told + sum(worker.extending.get(rid, 0) for rid in new))
        # what has ended since is no stream any more, and what has not begun is none yet
        count = max(len(worker.assigned), load.queued + load.running + len(new) - worker.ended.requests)
        if running := min(load.running, max(0, count - len(worker.extending))):
            others = running * (tokens - cached) / (load.extend_rate_alone or per_second)
            beside = STEPS * load.step_seconds + STREAM_WEIGHT * others
    else:
        own = sum(each.tokens for each in worker.assigned.values())
        told = load.queued_tokens + sum(worker.assigned[rid].tokens for rid in new) - worker.ended.tokens
        queued = float(max(own, told))
    missing = settings.cache_miss_weight * (tokens - cached)
    seconds = (queued + missing) / per_second + load.position_seconds * sum(range(cached, tokens))
    return seconds + beside


def _begun_for(worker: Worker) -> int:
    """Pages of what this router has begun for a decode worker, and others, as far as it has heard."""
    return sum(worker.foreseen.values()) + max(0, worker.load.pages_foreseen)
