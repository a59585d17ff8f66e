"""The oracle for groups of sampling_group: a prompt is computed once, however many answers to it are wanted.

It looks at what each prefill worker computed of each request, and when it began. A worker that had to evict may compute
a prompt once more; so may another one, for siblings that have waited long enough for theirs. So only groups without
that are judged, in worlds where no prefill worker fails or leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from router.core.requests.sampling_group import PATIENCE_SECONDS
from tests.simulation.judges.prompts import JudgedPrefill, PromptStart
from tests.simulation.scenarios.faults import NONSENSE, ROUTER_DRAINS
from tests.simulation.scenarios.scenario import PlannedRequest, SimulationScenario

GROUPS_MAX = 4  # of a world
HARMLESS = {NONSENSE, *ROUTER_DRAINS, "crash router", "crash decode", "drain decode"}  # to prefill


def with_groups(scenario: SimulationScenario) -> SimulationScenario:
    """In half of the worlds some clients want two to five answers to their prompt; they may give up one of them."""
    rng = scenario.random("groups")
    if rng.random() < 0.5:
        return scenario
    chosen = rng.sample(range(len(scenario.requests)), rng.randint(1, GROUPS_MAX))
    requests: list[PlannedRequest] = []
    for number, planned in enumerate(scenario.requests):
        requests += _group(planned, rng.randint(2, 5)) if number in chosen else [planned]
    return scenario.with_requests(requests)


def _group(planned: PlannedRequest, size: int) -> list[PlannedRequest]:
    """Only the first one changes its mind, if `planned` does. Each has the seed that its place gives it."""
    rids = tuple(f"{planned.rid}-{number}" for number in range(size))
    others = replace(planned, abort_after_seconds=None, abort_after_tokens=None, stop_after_tokens=None)
    members = [planned, *[others] * (size - 1)]
    return [
        replace(member.asking(seed=member.params.seed + number), rid=rids[number], group=rids)
        for number, member in enumerate(members)
    ]


def prove_prompts_are_computed_once(scenario: SimulationScenario, workers: Sequence[JudgedPrefill]) -> int:
    """Each group computed its prompt and, for each sibling, no more than a page. Returns how many were judged."""
    starts: dict[str, list[PromptStart]] = {}
    full_at = [at for worker in workers for at in worker.full_at]
    for worker in workers:
        for rid, each in worker.prompt_starts.items():
            starts.setdefault(rid, []).append(each)
    groups = {planned.group: len(planned.prompt) for planned in scenario.requests if planned.group}
    judged = 0
    if scenario.fabric.partition or {fault.kind for fault in scenario.faults} - HARMLESS:
        return 0
    for rids, tokens in groups.items():
        began = [each for rid in rids for each in starts.get(rid, [])]
        if len(began) != len(rids):
            continue  # one was refused, stopped before, or computed once more
        first, last = min(each.at for each in began), max(each.at for each in began)
        if last - first >= PATIENCE_SECONDS or any(first <= at <= last for at in full_at):
            continue
        computed = sum(each.tokens for each in began)
        most = tokens + (len(rids) - 1) * scenario.sizes.page_size
        assert computed <= most, f"{rids[0]} and its siblings computed {computed} tokens; {most} are enough"
        judged += 1
    return judged
