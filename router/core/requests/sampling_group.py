"""Requests of one prompt, as `n` asks for them: one of them computes it, and the others find it cached.

    first     waiting ─► prefilling ─► ready ─► decoding …       computes and fetches the prompt
    second    waiting ─────────────┴─► prefilling ─► ready ─► …  a page to compute, a page to fetch

While one of a group computes the prompt the others wait. Then they follow it to the same prefill worker, and later to
the same decode worker, as long as these take requests: for a while even if another one would take them at once. Which
of them goes first is not said before: it is whoever is placed while no worker has the prompt. So a worker that is lost,
or a client that gives up one of them, costs one more prompt and nothing else.

A sibling's noise is that of the next seed. So the first of a group answers what it would answer alone. What the prompt
costs is charged to the first. If the prompt is to be scored, the first has it scored: its scores are those of all.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from router.core.effects import ClientRequest
from router.core.fleet.worker import Worker
from router.core.requests.lifecycle import RequestState

PATIENCE_SECONDS = 2.0  # that siblings wait for the worker with their prompt, while others might compute it
SEEDS = 1 << 64


def split_choices(request: ClientRequest, rids: Sequence[str]) -> list[ClientRequest]:
    """One request for each of `rids`, all of the same prompt; the first one is `request` by another name."""
    group = rids[0] if len(rids) > 1 else ""
    return [_choice_request(request, rid, number, group) for number, rid in enumerate(rids)]


def _choice_request(request: ClientRequest, rid: str, number: int, group: str) -> ClientRequest:
    seed = request.params.seed + number
    params = msgspec.structs.replace(
        request.params,
        seed=seed if seed < SEEDS else seed - SEEDS,
        prompt_logprobs=-1 if number else request.params.prompt_logprobs,
    )
    return dataclasses.replace(request, rid=rid, params=params, sampling_group=group)


class GroupMember(Protocol):
    """One of the live requests of a group, as far as the group looks at it."""

    rid: str

    @property
    def state(self) -> RequestState:
        """Where the request is in its life."""


@dataclass(slots=True, eq=False)
class SamplingGroup:
    """The live requests of one prompt. It decides for none of them: it knows where the prompt is. `now` in seconds."""

    name: str
    rids: dict[str, None] = field(default_factory=dict)  # of those that are live
    computed_at: float = -math.inf  # when a worker last said that it has computed the prompt
    _computing: GroupMember | None = None  # the last one that was placed while no worker had the prompt
    _source: Worker | None = None  # has computed the prompt
    _decode: Worker | None = None  # was last given one of them

    def placed(self, live: GroupMember) -> None:
        """A worker has been chosen to compute its prompt."""
        if self.source is None:
            self._computing = live

    def computed(self, worker: Worker, now: float) -> None:
        """A worker has the prompt in its cache."""
        self._source, self.computed_at = worker, now

    def decodes(self, worker: Worker) -> None:
        """A decode worker has been chosen for one of them."""
        self._decode = worker

    def holds_back(self, live: GroupMember) -> bool:
        """Whether another one computes the prompt, so that this one had better wait."""
        computing = self._computing
        return (
            self.source is None
            and computing is not None
            and computing is not live
            and computing.state in (RequestState.PREFILLING, RequestState.EXTENDING)
        )

    def source_for(self, now: float) -> Worker | None:
        """The worker that should compute the next one, even if it has no place yet; None: any."""
        return self.source if now < self.computed_at + PATIENCE_SECONDS else None

    @property
    def source(self) -> Worker | None:
        """The worker that has computed the prompt, while it takes requests."""
        return self._source if self._source is not None and _stays(self._source) else None

    @property
    def reader(self) -> Worker | None:
        """The decode worker that has the prompt or fetches it, while it takes requests."""
        return self._decode if self._decode is not None and _stays(self._decode) else None

    @property
    def is_at_reader(self) -> bool:
        """Whether one of them holds the pages of the prompt at `reader`, or fetches them."""
        return self._decode is not None and any(rid in self._decode.assigned for rid in self.rids)


def _stays(worker: Worker) -> bool:
    return worker.up and not worker.draining


class SamplingGroups:
    """The groups that have a live request."""

    def __init__(self) -> None:
        self._groups: dict[str, SamplingGroup] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def enter(self, request: ClientRequest) -> SamplingGroup | None:
        """The group of a request that is live from now on; None: it has no siblings."""
        if not request.sampling_group:
            return None
        group = self._groups.setdefault(request.sampling_group, SamplingGroup(request.sampling_group))
        group.rids[request.rid] = None
        return group

    def leave(self, group: SamplingGroup | None, rid: str) -> None:
        """One of the group has ended."""
        if group is not None:
            del group.rids[rid]
            if not group.rids:
                del self._groups[group.name]
