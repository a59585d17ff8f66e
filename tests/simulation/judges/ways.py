"""The oracle for the way of a prompt: the shorter one, by what workers have told.

Seconds are computed here once more, and so is who has room. How long fetches take is what the router has seen itself,
and what it expects to be cached is its own guess.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from router.core.dispatch import RouterCore
from router.core.fleet.worker import KvGroup
from router.core.queueing.local_prompts import SOONER
from router.core.requests.lifecycle import RequestState
from router.core.requests.live_request import LiveRequest
from tests.simulation.judges.places import FreePlaces, cost_at


class AtDecode(NamedTuple):
    """What computing a prompt at a decode worker takes."""

    seconds: float
    sooner: float  # of the way by prefill: how much of that is soon enough


class WaySeconds(NamedTuple):
    """Until decode has a prompt; infinite: nobody has room, or told a rate."""

    here: AtDecode  # computed there, by the best worker that surely has a turn
    there: float  # by way of prefill
    at: dict[str, AtDecode]  # by worker of decode that could compute it
    waiting: float = inf  # computed there sooner, by a worker that has no turn: the prompt must wait


def seconds_by_way(core: RouterCore, live: LiveRequest, now: float) -> WaySeconds:
    """Of each way of the prompt, if it is placed now."""
    tokens = len(live.request.token_ids) + len(live.output)
    cached = core.fleet.prefixes.hits(live.need.blocks).tokens
    places = FreePlaces(core, now)
    expected = places.expected(live, own=False)
    choice, reader, _ = core._at_prefill(live, None, now)
    if choice is None or choice.reason == "spread":
        return WaySeconds(AtDecode(inf, SOONER), inf, {})
    found = (
        int(core.fleet.prefixes.found(live.request.model, "prefill").tokens * tokens)
        if choice.reason == "own"
        else 0
    )
    known = found or choice.hit_tokens
    at = {
        worker.peer: AtDecode(
            cost_at(core.settings, worker, tokens, expected(worker)),
            _sooner((expected(worker) - known) / tokens),
        )
        for worker in places.able_whole(live)
    }
    here = min(
        (at[worker.peer] for worker in places.open_whole(live, at_once=True)),
        key=lambda each: (each.seconds, -each.sooner),
        default=AtDecode(inf, SOONER),
    )
    there = cost_at(core.settings, choice.worker, tokens, known)
    if live.request.params.max_new_tokens > 1 + len(live.output):
        group, fetched = choice.worker.kv_group, tokens - (cached(reader.peer) if reader is not None else 0)
        waits = [
            now - each.token_at
            for each in core._requests.live.values()
            if each.state is RequestState.READY and each.kv_group == group and not each.unread_by
        ]
        there += core._local_prompts._seconds.fetched(group, max(0, fetched), now) + max(waits, default=0.0)
    waiting = [
        at[each.peer].seconds
        for each in places.whole_with_room(live)[0]
        if not each.has_turn(live.tenant.name, tokens)
        and at[each.peer].seconds < there * at[each.peer].sooner
    ]
    waited = now - live.state_since + live.seconds.get(RequestState.WAITING.value, 0.0)
    is_over = now >= (live.state_since + live.wait_until) / 2
    is_over |= not choice.worker.tokens and waited >= there - min(waiting, default=inf) - ROUNDED
    return WaySeconds(here, there, at, inf if is_over or there == inf else min(waiting, default=inf))


def _sooner(cached_more: float) -> float:
    more = max(0.0, cached_more)
    return SOONER * (1 - more) + more


def prove_waits_for_turn(live: LiveRequest, seconds: WaySeconds) -> bool:
    """Where a decode worker would have it sooner behind what it has to compute it was not sent to prefill.

    Returns whether there was one.
    """
    assert live.state is not RequestState.PREFILLING or seconds.waiting == inf, (
        f"{live.rid} goes to prefill: {seconds.there:.4f} s, and {seconds.waiting:.4f} s with a turn at decode"
    )
    return seconds.waiting < inf


def prove_shorter(live: LiveRequest, seconds: WaySeconds) -> bool:
    """It was sent to whom it takes less, of two ways whose seconds are known; returns whether they are.

    A decode worker may have a turn for it where that is not sure: then what counts is what it takes there.
    """
    whole, there = live.state is RequestState.EXTENDING, seconds.there
    if there == inf:
        return False
    here, sooner = seconds.at[live.worker.peer] if live.worker is not None and whole else seconds.here
    if here == inf:
        return False
    bound = sooner * there
    shorter, longer = (here, bound) if whole else (bound, here)
    assert shorter <= longer + 1e-9, (
        f"{live.rid} is {live.state.value}: {here:.4f} s at decode and {there:.4f} s by way of prefill"
    )
    told = live.ways
    assert told is not None, f"{live.rid} does not tell what was foreseen"
    foreseen, cost = (told.decode, here) if whole else (told.prefill, there)
    assert 0 <= foreseen <= cost + 1e-9, f"{live.rid}: {foreseen:.4f} s are foreseen, which cost {cost:.4f} s"
    return True


def prove_no_room_kept(queue: list[LiveRequest], backfilled: dict[str, int], now: float) -> int:
    """What waits for a better worker was not gone past in this pass; returns how many wait so."""
    choosing = [each for each in queue if each.state is RequestState.WAITING and now < each.worth_at < inf]
    for live in choosing:
        past = live.backfilled - backfilled[live.rid]
        assert not past, f"{live.rid} waits for a better worker, and {past} count as gone past it for room"
    return len(choosing)


ROUNDED = 1e-9  # seconds: a prompt is placed at the moment until which it waits
SCARCE = 0.8  # of the rate without streams: a worker with less has little time for prompts


def prove_moved_in_time(core: RouterCore, live: LiveRequest, moved: set[str]) -> None:
    """A stream leaves its worker for the prompts there: once, for another worker, and since prompts wait."""
    assert live.rid not in moved, f"{live.rid} leaves a worker again"
    moved.add(live.rid)
    assert live.worker is not None, live.rid
    assert live.target is not live.worker, f"{live.rid} moves to where it is"
    prove_packed_in_time(core, live, live.worker.kv_group)


def prove_packed_in_time(core: RouterCore, live: LiveRequest, kv_group: KvGroup) -> None:
    """Prompts wait for workers of the KV group that do not drain, and one of these has little time for them."""
    workers = core.fleet.of_role("decode")
    there = [each for each in workers if each.kv_group == kv_group and not each.draining]
    scarce = any(each.load.extend_rate < SCARCE * each.load.extend_rate_alone for each in there)
    assert scarce, (
        f"{live.rid} makes room for prompts of {kv_group}, and all workers there have time for them"
    )
    names = {each.hello.model_name for each in there}
    waits = any(
        each.state is RequestState.WAITING and each.request.model in names
        for each in core._requests.live.values()
    ) or any(each.load.queued_tokens or each.extending.keys() - {live.rid} for each in there)
    assert waits, f"{live.rid} makes room for prompts of {kv_group}, and none waits"
