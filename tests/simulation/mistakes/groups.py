"""Mistakes about requests of one prompt: see `mutations`."""

from __future__ import annotations

import dataclasses

import msgspec

from router.core.effects import ClientRequest
from router.core.fleet.workers import Worker
from router.core.requests import sampling_group
from router.core.requests.live_request import LiveRequest
from router.core.requests.sampling_group import SamplingGroup
from tests.simulation.mistakes.mutation import Mutation, Patch, into

MISTAKES: dict[str, Mutation] = {}
_mistake = into(MISTAKES)


@_mistake("groups", "a sibling has the seed of the first")
def _same_seed() -> list[Patch]:
    def sibling(request: ClientRequest, rid: str, number: int, group: str) -> ClientRequest:
        del number
        return dataclasses.replace(request, rid=rid, sampling_group=group)

    return [(sampling_group, "_choice_request", sibling)]


@_mistake("groups", "each sibling has the prompt scored")
def _scored_each() -> list[Patch]:
    def sibling(request: ClientRequest, rid: str, number: int, group: str) -> ClientRequest:
        made = real(request, rid, number, group)
        asked = request.params.prompt_logprobs
        return dataclasses.replace(made, params=msgspec.structs.replace(made.params, prompt_logprobs=asked))

    real = sampling_group._choice_request
    return [(sampling_group, "_choice_request", sibling)]


@_mistake("groups", "no sibling has the prompt scored")
def _scored_by_none() -> list[Patch]:
    def sibling(request: ClientRequest, rid: str, number: int, group: str) -> ClientRequest:
        made = real(request, rid, number, group)
        return dataclasses.replace(made, params=msgspec.structs.replace(made.params, prompt_logprobs=-1))

    real = sampling_group._choice_request
    return [(sampling_group, "_choice_request", sibling)]


@_mistake("groups", "siblings compute the prompt side by side")
def _side_by_side() -> list[Patch]:
    def holds_back(self: SamplingGroup, live: LiveRequest) -> bool:
        del self, live
        return False

    return [(SamplingGroup, "holds_back", holds_back)]


@_mistake("groups", "siblings go to any prefill worker")
def _anywhere() -> list[Patch]:
    def source_for(self: SamplingGroup, now: float) -> Worker | None:
        del self, now
        return None

    return [(SamplingGroup, "source_for", source_for)]


@_mistake("groups", "siblings wait for a first one that has ended")
def _orphans() -> list[Patch]:
    def holds_back(self: SamplingGroup, live: LiveRequest) -> bool:
        return self.source is None and self._computing is not None and self._computing is not live

    return [(SamplingGroup, "holds_back", holds_back)]


@_mistake("groups", "each sibling is charged for the prompt")
def _charged_each() -> list[Patch]:
    return [(ClientRequest, "charged_tokens", property(lambda request: len(request.token_ids)))]
