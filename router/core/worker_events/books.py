"""What the parts of the core must say of the same request, and how they agree again after a step that broke off.

A step of a request changes its state, a queue, deadlines and a worker together (`request_table`). An error in the
middle of one leaves some of them changed. Then `strike` takes that request out of all of them, wherever it stands, and
counts anew what is counted; every other request keeps its place. `check` proves that the books agree, by a look at all
live requests. Neither is called while all goes well.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any, get_args

from router.core.fleet.worker import Worker
from router.core.fleet.workers import Fleet
from router.core.requests.lifecycle import RequestState
from router.core.requests.live_request import LiveRequest
from router.core.requests.request_table import BEFORE_DECODE, BEGUN, RequestTable
from router.core.requests.reservations import Deadline
from shared.primitives.errors import InvariantError
from shared.wire import messages

AT_WORK = (RequestState.PREFILLING, RequestState.EXTENDING, RequestState.DECODING)


def strike(live: LiveRequest, requests: RequestTable, fleet: Fleet, now: float) -> None:
    """Take a request out of all books, whatever a step that broke off has left there; its workers are told."""
    reservations = requests.reservations
    requests.live.pop(live.rid, None)
    for worker in fleet.forget(live.rid):
        reservations.send(worker, messages.Cancel(live.rid, live.attempt))
        reservations.look_at_foreseen(worker)
    for queue in (reservations.waiting, reservations.ready):
        queue.discard(live)
    for kind in get_args(Deadline):
        reservations.deadlines.clear((kind, live.rid))
    reservations.close(live)
    live.state = RequestState.FAILED
    live.worker = live.holder = live.target = live.foreseen_at = None
    live.baton = None
    if live.sampling_group is not None and live.rid in live.sampling_group.rids:
        requests.sampling_groups.leave(live.sampling_group, live.rid)
    _count_anew(requests)
    if not live.tenant.live:
        requests.tenants.forget(live.tenant, now)
    with contextlib.suppress(Exception):  # the step may have broken off at what is shown of it
        requests.ended.add(live)


def check(requests: RequestTable, fleet: Fleet) -> None:
    """Raise `InvariantError` where two books disagree about a live request."""
    live = requests.live.values()
    _agree("states", requests.by_state, Counter(each.state for each in live))
    for tenant in {each.tenant.name: each.tenant for each in live}.values():
        own = Counter(each.state for each in live if each.tenant is tenant)
        _agree(f"states of tenant {tenant.name}", tenant.by_state, own)
        begun = Counter(each.kv_group for each in live if each.tenant is tenant and each.state in BEGUN)
        _agree(f"requests begun of tenant {tenant.name}", tenant.begun, begun)
    _agree("requests before decode", _flat(requests), _before_decode(requests))
    for queue, state in (
        (requests.reservations.waiting, RequestState.WAITING),
        (requests.reservations.ready, RequestState.READY),
    ):
        queued = Counter(each.rid for each in queue.in_order())
        _agree(f"queue of {state.value}", queued, Counter(each.rid for each in live if each.state is state))
    for each in live:
        _check_claims(each, fleet)
    for worker in fleet.workers.values():
        _check_worker(worker, requests)


def _check_claims(live: LiveRequest, fleet: Fleet) -> None:
    """Which claims belong to which state stands in `request_table`."""
    at_work, leased = live.worker is not None, live.holder is not None
    if at_work != (live.state in AT_WORK) or (live.state is RequestState.READY and not leased):
        raise InvariantError(
            f"request {live.rid} is {live.state.value}: at a worker: {at_work}, leased: {leased}"
        )
    for worker in (live.worker, live.holder, live.target):
        if worker is not None and fleet.workers.get(worker.peer) is not worker:
            raise InvariantError(f"request {live.rid} is {live.state.value} at {worker.peer}, which is gone")


def _check_worker(worker: Worker, requests: RequestTable) -> None:
    live = requests.live.values()
    about = f"of {worker.peer}"
    _agree(
        f"work {about}", Counter(list(worker.assigned)), Counter(e.rid for e in live if e.worker is worker)
    )
    _agree(
        f"leases {about}", Counter(list(worker.leases)), Counter(e.rid for e in live if e.holder is worker)
    )
    _agree(
        f"room {about}", Counter(list(worker.reserved)), Counter(e.rid for e in live if e.target is worker)
    )
    foreseen = Counter(e.rid for e in live if e.foreseen_at is worker)
    _agree(f"room foreseen {about}", Counter(list(worker.foreseen)), foreseen)
    extending = Counter(e.rid for e in live if e.worker is worker and e.state is RequestState.EXTENDING)
    _agree(f"prompts {about}", Counter(list(worker.extending)), extending)
    new = sum(
        tokens
        for rid, tokens in worker.extending.items()
        if worker.assigned[rid].load_number == worker.load_number
    )
    if worker.extending_unreported != new:
        raise InvariantError(
            f"the tokens of prompts {about} are {worker.extending_unreported}, expected {new}"
        )
    assigned = worker.assigned.values()
    _agree(f"tenants {about}", worker.by_tenant, Counter(each.tenant for each in assigned))
    sums = (len(assigned), sum(each.tokens for each in assigned), sum(each.pages for each in assigned))
    if sums != (worker.own.requests, worker.own.tokens, worker.own.pages):
        raise InvariantError(f"the sums {about} are {worker.own}, expected {sums}")


def _agree(name: str, kept: Counter[Any], expected: Counter[Any]) -> None:
    if +kept != +expected:
        raise InvariantError(f"the books of {name} say {+kept}, expected {+expected}")


def _count_anew(requests: RequestTable) -> None:
    requests.by_state.clear()
    live = requests.live.values()
    for tenant in requests.tenants.all_live:
        tenant.by_state.clear()
        tenant.begun.clear()
    for each in live:
        requests.by_state[each.state] += 1
        each.tenant.by_state[each.state] += 1
        if each.state in BEGUN:
            each.tenant.begun[each.kv_group] += 1
    requests.before_decode.clear()
    for (kv_group, name), count in _before_decode(requests).items():
        requests.before_decode[kv_group][name] = count


def _before_decode(requests: RequestTable) -> Counter[tuple[tuple[str, str], str]]:
    before = (each for each in requests.live.values() if each.state in BEFORE_DECODE)
    return Counter((each.kv_group, each.tenant.name) for each in before)


def _flat(requests: RequestTable) -> Counter[tuple[tuple[str, str], str]]:
    by_group = requests.before_decode.items()
    return Counter(
        {(kv_group, tenant): count for kv_group, counts in by_group for tenant, count in counts.items()}
    )
