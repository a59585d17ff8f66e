"""The oracle for waits at a router: who is refused at once, and what may stand in front of decode.

- A request is refused for its expected wait only if others stand before it, two for each decode worker and more.
- Nothing more is computed for decode workers in front of which as much stands as their rate takes in three quarters of
  `ready_seconds`, and in `ready_seconds` more while prompts are computed.
- Some requests for each decode worker may always stand there, whatever the rate, unless a stream is late.
- While a stream is late, nothing new of a tenant that has something in front of its decode workers is computed for
  them.
- What is refused for its target or deadline is so at once, and what is dropped for it only when it is too late.
- A stream that has begun is ended for lack of a worker only where none could continue it.
"""

from __future__ import annotations

from collections import Counter
from math import inf

from router.core.dispatch import RouterCore
from router.core.effects import ClientRequest, RequestEnded, RequestFailed
from router.core.fleet.placement import could_decode, could_prefill, could_serve
from router.core.fleet.worker import KvGroup
from router.core.requests.lifecycle import RequestState
from router.core.requests.live_request import LiveRequest
from router.core.requests.request_table import BEFORE_DECODE
from router.core.requests.tenants import Tenant
from shared.scheduling.tenant_shares import share_of
from tests.simulation.scenarios.scenario import PlannedRequest, ScenarioSizes

SLACK_SECONDS = 0.01  # that a deadline may be late in these worlds
ROUNDING = 1e-9
STANDING = 0.75  # of `ready_seconds`: what decode takes in it may stand in front of it
LOOK_SECONDS = 0.1  # … and that what it ends may still be there


def standing_before(core: RouterCore, request: ClientRequest) -> int:
    """How many of its model wait whose turn is before that of a request which is about to come."""
    queue = core._requests.reservations.waiting
    own = (True, -request.priority, queue.clock.next_start(request.tenant))
    return sum(
        queue._order(other)[:3] <= own for other in queue.in_order() if other.request.model == request.model
    )


def was_refused(core: RouterCore) -> bool:
    """Whether the request that has just come was refused for the wait that it could expect."""
    last = core._effects[-1] if core._effects else None
    if not isinstance(last, RequestEnded) or not isinstance(last.outcome, RequestFailed):
        return False
    return last.outcome.code in ("wait_too_long", "target_missed")


def prove_refusal(core: RouterCore, request: ClientRequest, before: int) -> None:
    """With `before` others before it."""
    workers = len(core.fleet.of_role("decode"))
    assert before > 2 * workers, (
        f"{request.rid} is refused, with {before} before it and {workers} decode workers"
    )


def prove_target_missed(
    planned: PlannedRequest, sizes: ScenarioSizes, failed: RequestFailed, seconds: float
) -> None:
    """A request that is ended for its target, so many seconds after it came: at once, or when it was too late."""
    target = target_of(planned.deadline_seconds, sizes.ttft_target_seconds)
    assert target < inf, f"{planned.rid} has no target: {failed.message}"
    in_turn = seconds == 0 if failed.status == 429 else seconds >= target - ROUNDING
    assert in_turn, f"{planned.rid} has a target of {target:g} s and gets {failed.status} after {seconds:g} s"


def is_too_late(core: RouterCore, live: LiveRequest, now: float) -> bool:
    """Whether a request that is not computed yet was to have its first token by now, since it came."""
    return now >= live.arrived_at + target_of(
        live.request.deadline_seconds, core.settings.ttft_target_seconds
    )


def target_of(*asked: float) -> float:
    """The least of the seconds that are asked for; infinite: nobody asks."""
    return min((seconds for seconds in asked if seconds), default=inf)


def prove_dropped(core: RouterCore, now: float) -> None:
    """What is too late waits no longer, but for siblings."""
    late = [
        live.rid
        for live in core._requests.live.values()
        if live.state is RequestState.WAITING
        and not live.output
        and live.sampling_group is None
        and is_too_late(core, live, now - LOOK_SECONDS)
        and live.state_since < now - LOOK_SECONDS
    ]
    assert not late, f"{late} wait, and are too late for their targets"


def prove_in_time(core: RouterCore, live: LiveRequest, now: float) -> None:
    """A prompt is begun while its first token is not too late. A sibling waits for the first of its group."""
    assert live.sampling_group is not None or not is_too_late(core, live, now - SLACK_SECONDS), (
        f"{live.rid} came at {live.arrived_at}, and is begun at {now}: too late for its target"
    )


def prove_stranded(core: RouterCore, live: LiveRequest) -> None:
    """No worker that does not drain could continue the stream, full or not."""
    role = "prefill" if live.state is RequestState.WAITING else "decode"
    could = could_prefill if role == "prefill" else could_decode
    able = [
        worker.peer
        for worker in core.fleet.workers.values()
        if not worker.draining
        and (
            (worker.hello.role == role and could(live.need, worker, core.fleet))
            or (live.state is RequestState.WAITING and could_serve(live.need, worker, core.fleet))
        )
    ]
    assert not able, f"{live.rid} has {len(live.output)} tokens and is ended, but {able} could continue it"


def is_bounded(core: RouterCore, kv_group: KvGroup, now: float) -> bool:
    """Whether requests wait for decode in the kv_group, and the rate is known at which it takes them."""
    rate = core._backpressure._kv_groups.get(kv_group)
    return rate is not None and rate.blocked and rate.per_second(now, core.settings.ready_seconds) is not None


def prove_needed(core: RouterCore, live: LiveRequest, now: float) -> None:
    """A request that has gone to prefill is one that decode soon takes."""
    rate = core._backpressure._kv_groups[live.kv_group].per_second(now, core.settings.ready_seconds)
    assert rate is not None
    seconds = (STANDING + 1) * core.settings.ready_seconds  # of which one is for what is being computed
    bound = max(2, core.fleet.takers("decode", live.kv_group), rate * seconds + 0.5)
    before_decode = [
        other.tenant.name
        for other in core._requests.live.values()
        if other.kv_group == live.kv_group and other.state.value in ("prefilling", "ready")
    ]
    only_one_of_its_tenant = before_decode.count(live.tenant.name) == 1
    standing = len(set(before_decode)) if only_one_of_its_tenant else len(before_decode)
    assert standing <= bound, (
        f"{live.rid} is computed, and {standing} stand before decode at {rate:.2f} a second"
    )


def late_stream(
    core: RouterCore, kv_group: KvGroup, tenant: Tenant, now: float, but: LiveRequest | None = None
) -> LiveRequest | None:
    """A stream of the kv_group that has waited for decode for so long that nothing more of the tenant is begun.

    The tenant has something in front of it or a prompt at a decode worker of it, `but` not counted.
    """
    live = [each for each in core._requests.live.values() if each is not but]
    begun = [each for each in live if each.state in (*BEFORE_DECODE, RequestState.EXTENDING)]
    if not any(each.tenant is tenant and each.kv_group == kv_group for each in begun):
        return None
    late = (
        each
        for each in live
        if each.state is RequestState.READY and each.kv_group == kv_group and not each.unread_by
        if each.token_at < now - core.settings.ready_seconds
    )
    return next(late, None)


def prove_nobody_late(core: RouterCore, live: LiveRequest, now: float) -> None:
    """A prompt has just been begun, and no stream that waits for decode has been kept waiting for it."""
    late = late_stream(core, live.kv_group, live.tenant, now, but=live)
    assert late is None, f"{live.rid} is begun, and {late and late.rid} has waited for decode for long"


def prove_not_shut(core: RouterCore, kv_group: KvGroup, tenant: Tenant, now: float) -> None:
    """A kv_group that takes nothing more of a tenant has some before decode, or a late stream."""
    if late_stream(core, kv_group, tenant, now) is not None:
        return
    some = max(2, core.fleet.takers("decode", kv_group))
    standing = core._requests.before_decode.get(kv_group, Counter[str]())
    own, share = standing[tenant.name], share_of(some, core.settings.tenant_share_max)
    assert standing.total() >= some or own >= share, (
        f"{standing.total()} stand in front of {some} places of {kv_group}, and no more may come"
    )
