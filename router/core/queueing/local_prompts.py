"""Prompts that decode workers compute by themselves: when, and at which.

    fallback   while no prefill worker is up that could compute the prompt
    always     whether or not
    never      not at all

A decode worker computes prompts one after the other beside its streams. What it has no turn for soon stays at the
router, where tenants take turns. A prompt needs its slot and all its pages at once, like one whose pages are fetched.
"""

from __future__ import annotations

from typing import Literal

from router.config import RouterConfig
from router.core.fleet import placement
from router.core.fleet.workers import Fleet, Worker
from router.core.queueing.foresight import Foresight
from router.core.requests.live_request import LiveRequest
from router.placement_policies import Placement


class LocalPlacement:
    """Chooses among decode workers that compute prompts. `now` in seconds."""

    def __init__(self, settings: RouterConfig, fleet: Fleet, foresight: Foresight):
        self._settings = settings
        self._fleet = fleet
        self._foresight = foresight

    def reason(self, live: LiveRequest) -> Literal["always", "no_prefill"] | None:
        """Why a decode worker is to compute the prompt; None: a prefill worker is."""
        if not self._fleet.any_whole(live.need.model_name):
            return None
        if self._settings.local_prefill == "always":
            return "always" if self._any_could_serve(live) else None
        by_prefill = any(
            not worker.draining
            and worker.peer not in live.avoided
            and placement.could_prefill(live.need, worker, self._fleet)
            for worker in self._fleet.of_role("prefill")
        )
        return None if by_prefill or not self._any_could_serve(live) else "no_prefill"

    def place(self, live: LiveRequest, now: float) -> Placement[Worker] | None:
        """The decode worker that computes the prompt and goes on; None while none has room and a turn."""
        group = live.sampling_group
        if group is not None and (source := self._sibling(live, now)) is not None:
            shared = len(live.request.token_ids) if group.is_at_reader else 0
            if not self._may_take(live, source):
                return None
            return placement.place_beside_group(live.need, source, shared, self._settings, now)
        for workers in placement.whole_rounds(live.need, self._fleet, self._settings):
            able = [worker for worker in workers if self._may_take(live, worker)]
            choice = placement.place_whole(live.need, able, self._fleet.prefixes, self._settings, now)
            if choice is not None:
                return choice
        return None

    def waits_for_sibling(self, live: LiveRequest, now: float) -> bool:
        """Whether it waits for the worker that has its prompt, and not for room anywhere."""
        return self._sibling(live, now) is not None

    def _sibling(self, live: LiveRequest, now: float) -> Worker | None:
        """The decode worker that has computed its prompt for a sibling."""
        worker = live.sampling_group.source_for(now) if live.sampling_group is not None else None
        if worker is None or worker.peer in live.avoided:
            return None
        return worker if placement.could_serve(live.need, worker, self._fleet) else None

    def _may_take(self, live: LiveRequest, worker: Worker) -> bool:
        return worker.has_turn(live.tenant.name) and (
            bool(live.output) or self._foresight.has_pages(live, worker)
        )

    def _any_could_serve(self, live: LiveRequest) -> bool:
        return any(
            not worker.draining and placement.could_serve(live.need, worker, self._fleet)
            for worker in self._fleet.of_role("decode")
        )
