"""Prompts that decode workers compute by themselves: when, and at which.

    short      those that one of them would have computed sooner than a prefill worker, with the fetch that follows
    fallback   while no prefill worker is up that could compute the prompt
    always     whether or not
    never      not at all

A decode worker computes prompts one after the other beside its streams, and short ones beside a long one. What it has
no turn for soon stays at the router, where tenants take turns. A prompt needs its slot and all its pages at once, like
one whose pages are fetched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Literal

from router.config import RouterConfig
from router.core.fleet import placement
from router.core.fleet.prompt_seconds import PromptSeconds, Ways
from router.core.fleet.worker import Worker
from router.core.fleet.workers import Fleet
from router.core.queueing.backpressure import Backpressure
from router.core.queueing.foresight import Foresight
from router.core.requests.lifecycle import RequestState
from router.core.requests.live_request import LiveRequest
from router.placement_policies import FOUND_SHARE_MIN, Need, Placement, by_rendezvous

# Who computes a prompt: prefill workers, whoever has done it sooner, or decode workers, and why
Way = Literal["prefill", "either", "always", "no_prefill", "sibling"]

WORTH_WAITING = 1.2  # times as long as a worker that has no turn yet: one that takes longer is not worth it
SOONER = 0.8  # of the way by prefill, where a client has the first token before its pages are fetched


class LocalPlacement:
    """Chooses among decode workers that compute prompts. `now` in seconds."""

    def __init__(
        self,
        settings: RouterConfig,
        fleet: Fleet,
        foresight: Foresight,
        backpressure: Backpressure,
        seconds: PromptSeconds,
    ):
        self._settings = settings
        self._fleet = fleet
        self._foresight = foresight
        self._backpressure = backpressure
        self._seconds = seconds
        self._may_have_turn: list[Worker] | None = None  # in this pass, as far as it was asked for

    def begin_pass(self) -> None:
        """Look anew for workers that have turns: each of many waiting prompts asks for one."""
        self._may_have_turn = None

    def way(self, live: LiveRequest, source: Worker | None, now: float) -> Way:
        """Who is to compute the prompt; `source` is the prefill worker that has it from a sibling."""
        if not self._fleet.any_whole(live.need.model_name):
            return "prefill"
        if self._settings.local_prefill == "always" and not live.request.by_prefill:
            return "always" if self._any_could_serve(live) else "prefill"
        by_prefill = any(
            not worker.draining
            and worker.peer not in live.avoided
            and placement.could_prefill(live.need, worker, self._fleet)
            for worker in self._fleet.of_role("prefill")
        )
        if not by_prefill:
            return "no_prefill" if self._any_could_serve(live) else "prefill"
        if self._settings.local_prefill == "fallback" or live.request.by_prefill:
            return "prefill"
        if self.waits_for_sibling(live, now):
            return "sibling"
        return "prefill" if source is not None else "either"

    def place(self, live: LiveRequest, now: float) -> Placement[Worker] | None:
        """The decode worker that computes the prompt and goes on; None while none has room and a turn."""
        group = live.sampling_group
        if group is not None and (source := self._sibling(live, now)) is not None:
            shared = len(live.request.token_ids) if group.is_at_reader else 0
            if not self._may_take(live, source, now):
                return None
            return placement.place_beside_group(
                live.need, source, shared, self._settings, now, whatever_told=True
            )
        return self.place_sooner(live, None, None, now)

    def place_sooner(
        self, live: LiveRequest, at_prefill: Placement[Worker] | None, reader: Worker | None, now: float
    ) -> Placement[Worker] | None:
        """The decode worker that would have computed the prompt sooner than the prefill worker, if there is one.

        Decode has to fetch the pages from that one; `reader` is the decode worker that is foreseen to. Whoever has room
        computes it where the others have none. Where one would have it sooner that has no turn for it yet, it waits for
        that turn until `live.worth_at`: else a prefill worker gets a queue in which prompts stand that others could
        have computed long before. For that it waits only once the whole fleet was asked who has a turn.
        """
        if at_prefill is not None and at_prefill.reason == "spread":
            return None  # that worker is to have the prefix from now on
        with_turn = self._with_turn(live)
        if not with_turn and at_prefill is None:
            return None
        need, bound, there = live.need, inf, 0
        known = self._fleet.prefixes.hits(need.blocks).tokens
        if at_prefill is not None:
            there = self._expected_at_prefill(need, at_prefill)
            here = known(reader.peer) if reader is not None else 0
            bound = self._by_way_of_prefill(live, at_prefill, there, need.tokens - here, now)
        own = self._own(need, known) if at_prefill is None else None
        cached = self._cached(need, known, own)

        def is_sooner(worker: Worker, seconds: float) -> bool:
            return at_prefill is None or seconds < bound * _sooner((cached(worker) - there) / need.tokens)

        for workers in placement.whole_rounds(need, self._fleet, self._settings):
            seconds = self._seconds_at(live, workers, cached, now)
            best = self._soonest(live, seconds, with_turn, cached, now)
            live.ways = ways = self._foreseen(need, best, seconds, at_prefill, bound, cached, there)
            if best is not None and is_sooner(best, seconds[best]):
                hit = min(known(best.peer), need.tokens - 1)
                return Placement(best, str(ways), "sooner", hit, own=best is own)
            if at_prefill is not None:
                soon = [
                    each
                    for worker, each in seconds.items()
                    if worker not in with_turn and is_sooner(worker, each)
                ]
                longer = bound - min(soon, default=inf)
                live.worth_at = _waits_until(live, longer, at_prefill.worker.tokens > 0) if soon else inf
                if not with_turn or (best is not None and not soon):
                    break
        return None

    def _foreseen(
        self,
        need: Need,
        best: Worker | None,
        seconds: Mapping[Worker, float],
        at_prefill: Placement[Worker] | None,
        bound: float,
        cached: Callable[[Worker], int],
        there: int,
    ) -> Ways:
        """The seconds that were compared, without what the prompt costs others."""
        here = inf
        if best is not None:
            here = seconds[best] - self._seconds.weight(best, need.tokens, cached(best))
        if at_prefill is not None:
            bound -= self._seconds.weight(at_prefill.worker, need.tokens, there)
        return Ways(here, bound)

    def _expected_at_prefill(self, need: Need, choice: Placement[Worker]) -> int:
        """Tokens of a prompt that its prefill worker is expected to have.

        A prefix's own worker is expected to have as much of it as such workers had lately: other routers sent it there.
        """
        if choice.reason != "own":
            return choice.hit_tokens
        return int(self._fleet.prefixes.found(need.model_name, "prefill").tokens * need.tokens)

    def _by_way_of_prefill(
        self, live: LiveRequest, choice: Placement[Worker], cached: int, to_fetch: int, now: float
    ) -> float:
        """Seconds until decode has the prompt, of which the prefill worker is expected to have some."""
        need = live.need
        seconds = self._seconds.computed(choice.worker, need.tokens, cached)
        if need.tokens_max - need.tokens > 1:
            seconds += self._seconds.fetched(choice.worker.kv_group, max(0, to_fetch), now)
            seconds += self._backpressure.seconds_before_decode(choice.worker.kv_group, now)
        return seconds

    def _with_turn(self, live: LiveRequest) -> set[Worker]:
        """The decode workers that have a turn for the prompt."""
        if self._may_have_turn is None:
            self._may_have_turn = [each for each in self._fleet.of_role("decode") if each.may_have_turn()]
        tenant, tokens = live.tenant.name, live.need.tokens
        return {worker for worker in self._may_have_turn if worker.has_turn(tenant, tokens)}

    def _seconds_at(
        self, live: LiveRequest, workers: Sequence[Worker], cached: Callable[[Worker], int], now: float
    ) -> dict[Worker, float]:
        """When each of the decode workers that have room for the prompt would have computed it, turn or not."""
        need = live.need
        able = [worker for worker in workers if self._may_have(live, worker, now)]
        able = placement.roomy(need, able, self._settings, now, whatever_told=True)
        return {
            worker: self._seconds.computed(worker, need.tokens, cached(worker))
            for worker in placement.preferred(need, able)
        }

    def _soonest(
        self,
        live: LiveRequest,
        seconds: Mapping[Worker, float],
        with_turn: set[Worker],
        cached: Callable[[Worker], int],
        now: float,
    ) -> Worker | None:
        """The decode worker of these that has a turn and the prompt computed first; None: nobody has.

        One that takes longer than another which has room, too, but no turn yet gets none: that turn is soon. An idle
        one gets it once the prompt has waited as long as it takes longer there, so that a prefix that all prompts have
        does not keep all but one worker idle. One that has others to compute gets none before half of the time is over
        that the prompt may wait: else under load each of them would compute each prefix.
        """
        return min(
            self._worth(live, seconds, with_turn, now),
            key=lambda worker: (
                seconds[worker],
                -cached(worker),  # where nobody has told a rate
                worker.last_chosen,
                worker.arrival,
            ),
            default=None,
        )

    def _worth(
        self, live: LiveRequest, seconds: Mapping[Worker, float], with_turn: set[Worker], now: float
    ) -> list[Worker]:
        """The workers that have a turn for the prompt, and are worth it; sets when it is worth others of them."""
        least = WORTH_WAITING * min(seconds.values(), default=inf)
        worth, live.worth_at = [], inf
        for worker in seconds:
            if worker not in with_turn:
                continue
            longer = seconds[worker] - least if least < inf else 0.0
            waits_until = _waits_until(live, longer, worker.tokens_waiting > 0)
            if longer <= 0 or now >= waits_until:
                worth.append(worker)
            else:
                live.worth_at = min(live.worth_at, waits_until)
        return worth

    def _cached(self, need: Need, known: Callable[[str], int], own: Worker | None) -> Callable[[Worker], int]:
        """Tokens of a prompt that a decode worker is expected to have.

        The own worker of its prefix is expected to have it, if such workers had any prefix lately: other routers sent
        it there, and so all of them agree.
        """
        may_have_it = self._fleet.prefixes.found(need.model_name, "decode").tokens >= FOUND_SHARE_MIN
        expected = (need.tokens - 1) * may_have_it

        def cached(worker: Worker) -> int:
            return expected if worker is own else min(known(worker.peer), need.tokens - 1)

        return cached

    def _own(self, need: Need, known: Callable[[str], int]) -> Worker | None:
        """The own worker of a prefix that nobody is known to have, of those that decode; None: somebody has it."""
        workers = [
            worker
            for worker in self._fleet.of_role("decode")
            if not worker.draining and placement.could_serve(need, worker, self._fleet)
        ]
        if any(known(worker.peer) for worker in workers):
            return None
        return next(iter(by_rendezvous(need, workers)), None)

    def waits_for_sibling(self, live: LiveRequest, now: float) -> bool:
        """Whether it waits for the worker that has its prompt, and not for room anywhere."""
        return self._sibling(live, now) is not None

    def _sibling(self, live: LiveRequest, now: float) -> Worker | None:
        """The decode worker that has computed its prompt for a sibling."""
        worker = live.sampling_group.source_for(now) if live.sampling_group is not None else None
        if worker is None or worker.peer in live.avoided:
            return None
        return worker if placement.could_serve(live.need, worker, self._fleet) else None

    def _may_take(self, live: LiveRequest, worker: Worker, now: float) -> bool:
        """Whether it has a turn for the prompt, beside what else it must have."""
        return worker.has_turn(live.tenant.name, live.need.tokens) and self._may_have(live, worker, now)

    def _may_have(self, live: LiveRequest, worker: Worker, now: float) -> bool:
        """Whether it has pages for the prompt, and no stream that has begun waits longer than it may."""
        if live.output:
            return True
        late = live.tenant.begun[worker.kv_group] and worker.kv_group in self._backpressure.late_lanes(now)
        return not late and self._foresight.has_pages(live, worker)

    def _any_could_serve(self, live: LiveRequest) -> bool:
        return any(
            not worker.draining and placement.could_serve(live.need, worker, self._fleet)
            for worker in self._fleet.of_role("decode")
        )


def _waits_until(live: LiveRequest, longer: float, is_busy: bool) -> float:
    """Until when a prompt waits for a turn elsewhere, rather than go where it takes so many seconds longer.

    A better worker may never have a turn. So it waits no longer than half of the time that it has left.
    """
    waits_since = live.state_since - live.seconds.get(RequestState.WAITING.value, 0.0)
    latest = (live.state_since + live.wait_until) / 2
    return latest if is_busy else min(waits_since + longer, latest)


def _sooner(cached_more: float) -> float:
    """The part of the seconds by way of prefill in which decode must have a prompt to get it.

    By so little the seconds of the two ways say nothing, for rates are measured. So what the prompt costs others
    decides: the more of it, as a share, decode has in its caches beyond what prefill has, the nearer to the same time.
    """
    return SOONER + (1 - SOONER) * max(0.0, cached_more)
