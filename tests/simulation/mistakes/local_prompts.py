"""Mistakes in prompts that decode workers compute: see `mutations`."""

from __future__ import annotations

import math
from copy import copy
from dataclasses import replace
from typing import Any

from decode.lifecycle import DecodeState
from tests.simulation.mistakes.mutation import Instead, Mistakes, gives, nothing
from tests.simulation.mistakes.roles import get


def _prompts_first(settle: Any, prompts: Any, batch: Any, seconds: float) -> list[Any]:
    """The tokens of prompts are taken from the front of a step's, where those of streams are."""
    before = len(batch.decode_slots)
    return [
        each if each.row is None else replace(each, row=each.row - before)
        for each in settle(prompts, batch, seconds)
    ]


def _from_their_own_start(plan: Any, prompts: Any, step: int, decode_rows: int) -> Any:
    """A row has its place among the tokens that are computed; those that were cached are left out."""
    joins, rows = plan(prompts, step, decode_rows)
    cached = {req.slot: req.cached_len for req in prompts.extending}
    return joins, tuple(replace(row, start=row.start - cached[row.slot]) for row in rows)


def _keep_pages_of_prompts(release: Any, endings: Any, req: Any) -> None:
    if req.state is DecodeState.EXTENDING:
        endings.prompts.leave(req)
    else:
        release(endings, req)


def _whoever_asks(way: Any, places: Any, live: Any, source: Any, now: float) -> Any:
    other = copy(live)
    other.request = replace(live.request, by_prefill=False)
    return way(places, other, source, now)


def _never_back() -> Instead:
    """Once there was no prefill worker, there is none any more."""
    gone = set[Any]()

    def way(real: Any, parts: Any, live: Any, source: Any, now: float) -> Any:
        why = real(parts, live, source, now)
        if why == "no_prefill":
            gone.add(parts)
        return "no_prefill" if parts in gone and get(parts, "some decode worker computes")(live) else why

    return {"who computes a prompt": way}


def _not_leased(hand_over: Any, migrations: Any, req: Any, now: float) -> Any:
    baton = hand_over(migrations, req, now)
    if baton is not None:
        migrations.memory.release(req)
    return baton


def _a_token_long(hand_over: Any, migrations: Any, req: Any, now: float) -> Any:
    """The first token has a place in the pages, as if a step had computed its KV."""
    req.kv_len += 1
    baton = hand_over(migrations, req, now)
    if baton is None:
        req.kv_len -= 1
    return baton


def _again(ask_to_leave: Any, migrations: Any, live: Any, now: float) -> None:
    live.made_room = False
    ask_to_leave(migrations, live, now)


def _in_any_group(is_wanted: Any, packing: Any, _kv_group: Any, *inputs: Any) -> bool:
    kv_groups = get(packing, "the time for prompts of KV groups")()
    return any(is_wanted(packing, kv_group, *inputs) for kv_group in kv_groups)


def _of_earlier_passes(prompt_time: Any, packing: Any) -> Any:
    before = get(packing, "the time for prompts in this pass")
    return prompt_time(packing) | {kv_group: time for kv_group, time in before.items() if time.is_scarce}


def _of_draining_ones(prompt_time: Any, packing: Any) -> Any:
    """A worker that drains counts like the others."""
    workers = get(packing, "workers that may have little time for prompts").of_role("decode")
    draining = [worker for worker in workers if worker.draining]
    for worker in draining:
        worker.draining = False
    found = prompt_time(packing)
    for worker in draining:
        worker.draining = True
    return found


def _beside_all_growth(has_pages: Any, foresight: Any, live: Any, worker: Any) -> bool:
    """Whoever asks gets what the growth of others leaves, also a tenant that has nothing there."""
    left = worker.load.pages_for_new
    tells = left >= 0 and worker.load.running > 0
    return bool(has_pages(foresight, live, worker)) and not (
        tells and left < worker.pages_for(live.need.tokens)
    )


def _none_of_those_kept(slots: Any, worker: Any, tenant: str, *, more_than: int) -> int:
    """Whoever asks gets what anybody does."""
    told = worker.load.slots_for_new
    found = int(slots(worker, tenant, more_than=more_than))
    return found if told < 0 else min(found, told)


def _left(prompts: Any) -> list[Any]:
    waits = get(prompts, "a prompt waits for another one at decode")
    return [each for each in prompts.in_order if not waits(each) and each.req.launched_len < each.end]


def _as_if_computed(waits: Any, prompts: Any, prompt: Any) -> bool:
    """A prompt begins behind what another one is still computing, in pages of its own."""
    if waits(prompts, prompt):
        req = prompt.req
        req.cached_len = req.launched_len = req.kv_len = prompt.awaited_len
        prompt.awaited = None
    return False


MISTAKES: dict[str, Mistakes] = {
    "local_prompts": {
        "a prompt's first token is that of a stream beside it": {
            "prompts of a step are settled": _prompts_first
        },
        "the place of a prompt's tokens leaves out what was cached": {
            "rows of what is computed at decode": _from_their_own_start
        },
        "a prompt that leaves decode keeps its pages": {
            "what a request holds is released": _keep_pages_of_prompts
        },
        "a prompt is sent to a decode worker that does not know the command": {
            "a decode worker serves whole requests": lambda _, fleet, worker: bool(
                fleet and worker.hello.role == "decode"
            )
        },
        "decode computes prompts that prefill workers would take": {
            "who computes a prompt": lambda _, parts, live, _source, _now: (
                "no_prefill" if get(parts, "some decode worker computes")(live) else "prefill"
            )
        },
        "the pages of a prompt that leaves decode are free at once": {
            "a prompt leaves decode with its first token": _not_leased
        },
        "a prompt that leaves decode has KV of its first token": {
            "a prompt leaves decode with its first token": _a_token_long
        },
        "a router does not hear that prefill is back": _never_back,
        "what waits at prefill counts for nothing": {
            "seconds until a prompt is computed": lambda real, seconds, worker, tokens, cached: (
                real(seconds, worker, tokens, cached)
                if worker.hello.role == "decode" or not worker.load.extend_rate
                else (tokens - cached) / worker.load.extend_rate
            )
        },
        "a prompt is computed at decode whatever that takes": {
            "seconds until a prompt is computed": lambda real, seconds, worker, tokens, cached: (
                0.0 if worker.hello.role == "decode" else real(seconds, worker, tokens, cached)
            )
        },
        "what a prompt costs others is foreseen as its own time": {
            "what a prompt costs others": lambda real, *given: -real(*given)
        },
        "a prompt goes to decode however long it takes, unless prefill has more of it cached": {
            "how soon decode must have a prompt to get it": lambda real, cached_more: (
                math.inf if cached_more >= 0 else real(cached_more)
            )
        },
        "a prompt that is for prefill goes where all go": {"who computes a prompt": _whoever_asks},
        "a prompt waits for ever for the decode worker that has its prefix": {
            "decode workers that a prompt need not wait past": lambda real, places, live, *told: real(
                places, live, *told[:-1], live.state_since
            )
        },
        "no prompt waits for a turn at decode": {"until when a prompt waits for a turn": gives(-math.inf)},
        "a prompt gains by the streams beside it": {
            "what streams cost a prompt beside them": lambda real, worker, tokens, rate: (
                -real(worker, tokens, rate)
            )
        },
        "prompts that begin alike are computed one beside the other": {
            "a prompt waits for another one at decode": gives(False)
        },
        "a prompt begins behind what another one is still computing": {
            "a prompt waits for another one at decode": _as_if_computed
        },
        "short prompts go past a long one at decode as long as they come": {
            "which prompts go first at decode": lambda _, prompts: (
                [],
                sorted(_left(prompts), key=lambda each: each.end - each.req.launched_len),
            )
        },
        "a long prompt at decode leaves short ones nothing of its steps": {
            "which prompts go first at decode": lambda _, prompts: ([], _left(prompts))
        },
        "streams make room although no prompt waits": {"streams are packed": gives(True)},
        "streams make room for prompts of another KV group": {"streams are packed": _in_any_group},
        "streams make room for prompts of an earlier pass": {
            "the time for prompts of KV groups": _of_earlier_passes
        },
        "streams make room for prompts at a worker that drains": {
            "the time for prompts of KV groups": _of_draining_ones
        },
        "a stream makes room for prompts again and again": {"a stream is asked to leave": _again},
        "streams make room at a worker that lacks pages": {"a worker may get more streams": gives(True)},
        "a tenant with nothing at a decode worker waits there for what others leave as they grow": {
            "a decode worker has pages for a prompt": _beside_all_growth
        },
        "a worker that has refused a tenant is asked again at once": {
            "a worker has refused a tenant": nothing
        },
        "no prompt is begun where another router's leave nothing but free pages": {
            "pages are foreseen at a worker": lambda real, worker, tenant, seconds, _: real(
                worker, tenant, seconds
            )
        },
        "a prompt takes what others may grow into however far it grows": {
            "a tenant may be below its share": lambda real, worker, tenant, _: real(worker, tenant, 0)
        },
        "slots that a worker keeps for tenants that hold little are offered to nobody": {
            "slots of a worker for a tenant": _none_of_those_kept
        },
        "room is kept for a prompt that waits for a better worker": {
            "a prompt waits for a better worker": lambda _, attempts, live: get(
                attempts, "a request finds no room"
            )(live)
        },
        "no decode worker has a turn for a prompt": {"a decode worker has a turn": gives(False)},
    },
}
