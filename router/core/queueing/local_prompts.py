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

from math import inf
from typing import Literal

from router.config import RouterConfig
from router.core.fleet import placement
from router.core.fleet.prompt_seconds import PromptSeconds
from router.core.fleet.workers import Fleet, Worker
from router.core.queueing.backpressure import Backpressure
from router.core.queueing.foresight import Foresight
from router.core.requests.live_request import LiveRequest
from router.placement_policies import Placement

# Who computes a prompt: prefill workers, whoever has done it sooner, or decode workers, and why
Way = Literal["prefill", "either", "always", "no_prefill", "sibling"]


# Times as long as a worker that has no turn yet: one that takes longer is not worth it, unless it is idle.
WORTH_WAITING, WORTH_IDLE = 1.2, 3
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

    def way(self, live: LiveRequest, now: float) -> Way:
        """Who is to compute the prompt."""
        if not self._fleet.any_whole(live.need.model_name):
            return "prefill"
        if self._settings.local_prefill == "always":
            return "always" if self._any_could_serve(live) else "prefill"
        by_prefill = any(
            not worker.draining
            and worker.peer not in live.avoided
            and placement.could_prefill(live.need, worker, self._fleet)
            for worker in self._fleet.of_role("prefill")
        )
        if not by_prefill:
            return "no_prefill" if self._any_could_serve(live) else "prefill"
        if self._settings.local_prefill == "fallback":
            return "prefill"
        if self.waits_for_sibling(live, now):
            return "sibling"
        group = live.sampling_group
        return "prefill" if group is not None and group.source_for(now) is not None else "either"

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
        if self._settings.local_prefill == "short":
            return self.place_sooner(live, None, None, now)
        for workers in placement.whole_rounds(live.need, self._fleet, self._settings):
            able = [worker for worker in workers if self._may_take(live, worker, now)]
            choice = placement.place_whole(live.need, able, self._fleet.prefixes, self._settings, now)
            if choice is not None:
                return choice
        return None

    def place_sooner(
        self, live: LiveRequest, at_prefill: Placement[Worker] | None, reader: Worker | None, now: float
    ) -> Placement[Worker] | None:
        """The decode worker that would have computed the prompt sooner than the prefill worker, if there is one.

        Decode has to fetch the pages from that one; `reader` is the decode worker that is foreseen to. Whoever has room
        computes it where the others have none.
        """
        if at_prefill is not None and at_prefill.reason == "spread":
            return None  # that worker is to have the prefix from now on
        bound = inf if at_prefill is None else self._by_way_of_prefill(live, at_prefill, reader, now)
        best, seconds = self._soonest(live, now)
        if best is None or (at_prefill is not None and seconds >= SOONER * bound):
            return None
        why = f"{seconds:.3f} s until it has computed it, {bound:.3f} s by way of prefill"
        hit = self._fleet.prefixes.hits(live.need.blocks).tokens(best.peer)
        return Placement(best, why, "sooner", min(hit, live.need.tokens - 1))

    def _by_way_of_prefill(
        self, live: LiveRequest, choice: Placement[Worker], reader: Worker | None, now: float
    ) -> float:
        """Seconds until decode has the prompt.

        A prefix's own worker is expected to have as much of it as such workers had lately: other routers sent it there.
        """
        need, prefixes, hit = live.need, self._fleet.prefixes, choice.hit_tokens
        if choice.reason == "own":
            hit = int(prefixes.found_tokens_share * need.tokens)
        seconds = self._seconds.computed(choice.worker, need.tokens, hit)
        if need.tokens_max - need.tokens > 1:
            here = prefixes.hits(need.blocks).tokens(reader.peer) if reader is not None else 0
            seconds += self._seconds.fetched(choice.worker.kv_group, max(0, need.tokens - here), now)
            seconds += self._backpressure.seconds_before_decode(choice.worker.kv_group, now)
        return seconds

    def _soonest(self, live: LiveRequest, now: float) -> tuple[Worker | None, float]:
        """The decode worker that has room, a turn and the prompt computed first, and when; None: nobody has.

        One that takes longer than another which has room, too, but no turn yet gets none: that turn is soon. An idle
        one may take far longer, so that a prefix that all prompts have does not keep all but one idle.
        """
        cached, need = self._fleet.prefixes.hits(live.need.blocks).tokens, live.need
        for workers in placement.whole_rounds(need, self._fleet, self._settings):
            able = [worker for worker in workers if self._may_have(live, worker, now)]
            able = list(
                placement.preferred(
                    need, placement.roomy(need, able, self._settings, now, whatever_told=True)
                )
            )
            seconds = {
                worker: self._seconds.computed(worker, need.tokens, min(cached(worker.peer), need.tokens - 1))
                for worker in able
            }
            least = min(seconds.values(), default=inf)
            able = [w for w in able if w.has_turn(live.tenant.name, need.tokens)]
            able = [
                w for w in able if seconds[w] <= (WORTH_WAITING if w.tokens_waiting else WORTH_IDLE) * least
            ]
            if able:
                best = min(
                    able,
                    key=lambda worker: (
                        seconds[worker],
                        -cached(worker.peer),  # where nobody has told a rate
                        worker.last_chosen,
                        worker.arrival,
                    ),
                )
                return best, seconds[best]
        return None, inf

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
        late = live.tenant.before_decode and worker.kv_group in self._backpressure.late_lanes(now)
        return not late and self._foresight.has_pages(live, worker)

    def _any_could_serve(self, live: LiveRequest) -> bool:
        return any(
            not worker.draining and placement.could_serve(live.need, worker, self._fleet)
            for worker in self._fleet.of_role("decode")
        )
