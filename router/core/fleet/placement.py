"""Which worker gets a request: pure functions of the request and the fleet.

First who *may* have it (model, KV format, size, room), then who *should* (`router.placement_policies`): there the
worker that was chosen longest ago wins among equals, so that light traffic uses the whole fleet. In a large fleet only
a handful is compared, see `_rounds`; chance comes from the request's id, so that the same inputs give the same choices.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from router.config import RouterConfig
from router.core.fleet.prefix_index import PrefixIndex
from router.core.fleet.worker import Worker
from router.core.fleet.workers import Fleet
from router.placement_policies import POLICIES, Candidates, Need, Placement, PolicyName, by_rendezvous
from shared.wire.messages import Role


def prefill_workers(need: Need, fleet: Fleet) -> list[Worker]:
    """Workers that could compute this prompt and, if more than one token is to come, have a decode worker for it."""
    return [worker for worker in fleet.of_role("prefill") if could_prefill(need, worker, fleet)]


def decode_workers(need: Need, fleet: Fleet) -> list[Worker]:
    """Workers that could fetch these pages and hold the request until its end."""
    return [worker for worker in fleet.of_role("decode") if could_decode(need, worker, fleet)]


def prefill_rounds(need: Need, fleet: Fleet, settings: RouterConfig) -> Iterator[list[Worker]]:
    """Workers that could compute this prompt: first a handful, then all that take anything now. See `_rounds`."""
    return _rounds("prefill", settings.prefill_policy, could_prefill, need, fleet, settings)


def decode_rounds(need: Need, fleet: Fleet, settings: RouterConfig) -> Iterator[list[Worker]]:
    """Workers that could fetch these pages: first a handful, then all that take anything now. See `_rounds`."""
    return _rounds("decode", settings.decode_policy, could_decode, need, fleet, settings)


Could = Callable[[Need, Worker, Fleet], bool]


def _rounds(
    role: Role, policy: PolicyName, could: Could, need: Need, fleet: Fleet, settings: RouterConfig
) -> Iterator[list[Worker]]:
    """Lists of workers to choose from, in turn until one of them takes the request; the last one is never empty,
    unless no worker of the fleet could ever take it.

    In a fleet of up to `candidates_max` workers there is one list, with all of them. In a larger one the first list has
    as many workers, drawn at random by the request, and those that have most of its prompt, or its own worker. So the
    cost of a request hardly grows with the fleet, and routers that know the same loads do not all choose the one that
    is least loaded. Where none of the handful has room, every worker is asked that takes anything at all.
    """
    everyone, candidates_max = fleet.of_role(role), settings.candidates_max
    if len(everyone) <= candidates_max or (need.session and POLICIES[policy].keeps_sessions):
        yield [worker for worker in everyone if could(need, worker, fleet)]
        return
    takers = fleet.open_to(role)
    seed = zlib.crc32(need.rid.encode()) ^ fleet.choices
    drawn = takers.draw(candidates_max, seed)
    if POLICIES[policy].reads_prefixes:
        best = fleet.prefixes.hits(need.blocks).best(role, candidates_max // 2, seed)
        besides = [fleet.workers[peer] for peer in best] or list(
            islice((worker for worker in by_rendezvous(need, takers.all) if could(need, worker, fleet)), 1)
        )
        drawn += [worker for worker in besides if worker not in drawn]
    yield [
        worker
        for worker in drawn
        if could(need, worker, fleet)
        and worker.peer not in need.avoided
        and need.determinism in ("", worker.hello.determinism)
    ]
    yield [worker for worker in takers.all if could(need, worker, fleet)] or list(
        islice((worker for worker in everyone if could(need, worker, fleet)), 1)
    )


def could_prefill(need: Need, worker: Worker, fleet: Fleet) -> bool:
    """Whether the worker could compute this prompt, busy or not, and somebody could go on with it."""
    return (
        worker.hello.model_name == need.model_name
        and need.model in ("", worker.hello.model)
        and worker.fits(need.tokens)
        and need.features <= worker.features
        and (
            need.tokens_max - need.tokens <= 1
            or fleet.has_reader(worker.kv_group, need.tokens_max, need.features)
        )
    )


def could_decode(need: Need, worker: Worker, _fleet: Fleet) -> bool:
    """Whether the worker could fetch these pages and hold the request until its end, full or not."""
    hello = worker.hello
    return (
        hello.model == need.model
        and hello.kv_format == need.kv_format
        and worker.fits(need.tokens_max)
        and need.features <= worker.features
    )


def could_serve(need: Need, worker: Worker, fleet: Fleet) -> bool:
    """Whether the decode worker could compute this prompt and hold the request until its end, full or not."""
    return (
        fleet.serves_whole(worker)
        and worker.hello.model_name == need.model_name
        and need.model in ("", worker.hello.model)
        and worker.fits(need.tokens_max)
        and need.features <= worker.features
    )


def whole_rounds(need: Need, fleet: Fleet, settings: RouterConfig) -> Iterator[list[Worker]]:
    """Decode workers that could serve the request with its prompt: first a handful, then all. See `_rounds`."""
    return _rounds("decode", settings.prefill_policy, could_serve, need, fleet, settings)


def place_prefill(
    need: Need, workers: Sequence[Worker], prefixes: PrefixIndex, settings: RouterConfig, now: float
) -> Placement[Worker] | None:
    """The prefill worker for a request, or None while all of them have enough to do."""
    free = [worker for worker in workers if _takes_prefill(worker, need, settings, now)]
    return _choose(need, free, prefixes, settings.prefill_policy, settings, now)


def place_decode(
    need: Need,
    workers: Sequence[Worker],
    prefixes: PrefixIndex,
    settings: RouterConfig,
    now: float,
    *,
    is_late: bool = False,
    only: bool = False,
) -> Placement[Worker] | None:
    """The decode worker for a request: room first, then the policy; None while none has room.

    `is_late`: its stream has waited so long that a worker is asked as soon as its pages are free. `only`: its tenant
    has begun no other request.
    """
    able = roomy(need, workers, settings, now, whatever_told=is_late, only=only)
    return _choose(need, able, prefixes, settings.decode_policy, settings, now)


def roomy(
    need: Need,
    workers: Sequence[Worker],
    settings: RouterConfig,
    now: float,
    *,
    whatever_told: bool = False,
    only: bool = False,
) -> list[Worker]:
    """Decode workers that have room for the request."""
    sizes = {worker.hello.limits.page_size: worker for worker in workers}
    pages = {size: worker.pages_for(need.tokens) for size, worker in sizes.items()}
    tenant, share_max, only_max = need.tenant, settings.tenant_share_max, need.tokens_max * only
    return [
        worker
        for worker in workers
        if worker.has_room(
            pages[worker.hello.limits.page_size],
            tenant,
            share_max,
            now,
            whatever_told=whatever_told,
            only_max=only_max,
        )
    ]


def place_beside_group(
    need: Need,
    worker: Worker,
    shared_tokens: int,
    settings: RouterConfig,
    now: float,
    *,
    whatever_told: bool = False,
) -> Placement[Worker] | None:
    """The decode worker where a sibling holds the pages of `shared_tokens`, if it has room for the rest."""
    pages = worker.pages_for(need.tokens, shared_tokens)
    if not worker.has_room(pages, need.tenant, settings.tenant_share_max, now, whatever_told=whatever_told):
        return None
    return Placement(worker, "its sibling's worker", "group", shared_tokens=shared_tokens)


def _takes_prefill(worker: Worker, need: Need, settings: RouterConfig, now: float) -> bool:
    return worker.takes_prefill(settings.tenant_share_max, need.tenant, now)


def _choose(
    need: Need,
    workers: Sequence[Worker],
    prefixes: PrefixIndex,
    policy: PolicyName,
    settings: RouterConfig,
    now: float,
) -> Placement[Worker] | None:
    if not workers:
        return None
    return POLICIES[policy].choose(
        Candidates(
            need,
            preferred(need, workers),
            lambda: prefixes.hits(need.blocks).tokens,
            settings,
            now,
            prefixes.found(need.model_name, "fetched" if need.kv_format else workers[0].hello.role).prompts,
        )
    )


def preferred(need: Need, workers: Sequence[Worker]) -> Sequence[Worker]:
    """Workers that have not failed the request and compute as those that it had, as far as there are any."""
    untried = [worker for worker in workers if worker.peer not in need.avoided] or workers
    equal = [worker for worker in untried if need.determinism in ("", worker.hello.determinism)]
    return equal or untried
