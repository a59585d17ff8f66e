"""The oracle for free pages: what a prompt takes at a decode worker, of those that others may grow into.

A worker gives them to a tenant that has nothing there, for a request within an even share of its pool. One that has
refused the tenant is not asked for them again before it has told many loads. Who has what there, and what was refused,
is counted here once more.
"""

from __future__ import annotations

from router.core.dispatch import RouterCore
from router.core.fleet.refused_tenants import REFUSED_LOADS
from router.core.fleet.worker import Worker
from router.core.requests.lifecycle import RequestState
from router.core.requests.live_request import LiveRequest
from shared.wire.messages import Message, Refused


class FreePagesJudge:
    """Remembers who was refused where, of one router."""

    def __init__(self, core: RouterCore):
        self._core = core
        # By worker and tenant: the worker of that session, whose loads are counted anew in each, and the load's number
        self._refused_at: dict[tuple[str, str], tuple[Worker, int]] = {}

    def received(self, peer: str, message: Message) -> None:
        """A message is about to be taken in."""
        if not isinstance(message, Refused) or message.reason != "no_room":
            return
        live, worker = self._core._requests.live.get(message.rid), self._core.fleet.workers.get(peer)
        if live is None or worker is None or live.worker is not worker or live.attempt != message.attempt:
            return
        if live.state is RequestState.EXTENDING:
            self._refused_at[peer, live.tenant.name] = worker, worker.load_number

    def prove_given(self, live: LiveRequest, worker: Worker) -> bool:
        """A prompt is about to be given to a decode worker; returns whether it needs what others may grow into."""
        load = worker.load
        others = max(0, load.pages_foreseen)
        is_empty = not (load.queued or load.running or worker.assigned or worker.foreseen or others)
        if live.output or live.sampling_group is not None or is_empty or load.pages_for_new < 0:
            return False
        new = sum(each.pages for each in worker.assigned.values() if each.load_number == worker.load_number)
        in_front = new + sum(worker.reserved.values()) + sum(worker.foreseen.values()) + others
        limits, prompt_len = worker.hello.limits, len(live.request.token_ids)
        if load.pages_for_new - in_front >= -(-prompt_len // limits.page_size):
            return False
        tenants = {each.tenant for each in worker.assigned.values()}
        assert live.tenant.name not in tenants, (
            f"{live.rid} gets what others grow into, beside its own tenant's"
        )
        even = limits.pages * limits.page_size / (max(1, len(tenants)) + 2)
        longest = prompt_len + live.request.params.max_new_tokens - 1
        assert longest <= even, (
            f"{live.rid} grows to {longest} tokens, an even share of {worker.peer} is {even:.0f}"
        )
        session, at = self._refused_at.get((worker.peer, live.tenant.name), (None, 0))
        assert session is not worker or worker.load_number - at >= REFUSED_LOADS, (
            f"{live.rid} is sent to {worker.peer}, which refused its tenant {worker.load_number - at} loads ago"
        )
        return True
