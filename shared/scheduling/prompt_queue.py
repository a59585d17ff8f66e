"""The prompts that wait on a worker: which may come in, and in which order they are tried.

A waiting request holds nothing. How much of it is cached (`Req.cached_len`) is an estimate: it is made when the request
comes, and again when it is tried and does not fit. The queue knows the rules that bound and order it. It does not know
slots, leases or routers: whether the next request may start is the scheduler's question.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from shared.batch.req import Req
from shared.kv.kv_memory import KvMemory
from shared.scheduling.queue_policy import InBatchPrefix, QueuePolicy, aged_first, order_waiting
from shared.scheduling.sound_commands import unsound
from shared.scheduling.tenant_shares import least_served_first
from shared.wire.messages import Prefill, RefusalReason


@dataclass(frozen=True, slots=True)
class QueueRules:
    """What bounds and orders a queue, by the names of the settings; a worker's settings make it."""

    max_queued_requests: int
    queue_policy: QueuePolicy
    ageing_seconds: float
    prefix_aware_queue_max: int  # requests
    shared_prefix_cached_tokens_max: int
    shared_prefix_tokens_min: int


class PromptQueue:
    """Waiting requests, by rid in the order they came."""

    def __init__(self, rules: QueueRules, memory: KvMemory, context_len: int, vocab_size: int):
        self._rules = rules
        self._memory = memory
        self._context_len = context_len
        self._vocab_size = vocab_size
        self._reqs: dict[str, Req] = {}
        self._in_batch_prefix = InBatchPrefix(
            memory.cache,
            cached_tokens_max=rules.shared_prefix_cached_tokens_max,
            shared_tokens_min=rules.shared_prefix_tokens_min,
            queue_max=rules.prefix_aware_queue_max,
        )

    def __len__(self) -> int:
        return len(self._reqs)

    @property
    def reqs(self) -> list[Req]:
        """A copy, so that requests may be removed while it is walked."""
        return list(self._reqs.values())

    @property
    def tokens(self) -> int:
        """Tokens of all waiting prompts that are to be computed, by the estimates of what is cached."""
        return sum(len(req.token_ids) - req.cached_len for req in self._reqs.values())

    @property
    def put_off(self) -> dict[int, None]:
        """The requests that the last order left out, for the prefix of another one, by sequence number."""
        return self._in_batch_prefix.put_off

    def find(self, rid: str) -> Req | None:
        """The waiting request with this id."""
        return self._reqs.get(rid)

    def refusal(self, command: Prefill, *, draining: bool) -> tuple[RefusalReason, str] | None:
        """Why this request cannot come in, as reason and detail; None if it can."""
        total_tokens = len(command.token_ids)
        if (
            total_tokens >= self._context_len
            or self._memory.pages_for(total_tokens) > self._memory.pool.total
        ):
            return "too_long", f"{total_tokens} tokens exceed this worker's context or pages"
        if problem := unsound(command, self._vocab_size):
            return "internal", problem
        if draining or len(self._reqs) >= self._rules.max_queued_requests:
            return "no_room", "this worker is draining" if draining else "max_queued_requests"
        return None

    def add(self, req: Req) -> None:
        """Take in a request, which waits from now on."""
        self._memory.look_up(req, req.reusable_len)
        self._reqs[req.rid] = req

    def remove(self, req: Req) -> None:
        """Take out a request that starts, or that was cancelled."""
        del self._reqs[req.rid]

    def in_order(self, running: Sequence[Req], held: Counter[str], now: float) -> list[Req]:
        """The requests to try in this step, beside those that run and the tokens that each tenant holds here.

        By the queue policy, but for those that have waited for long; then fairly among tenants. Those that wait a round
        for a shared prefix are left out.
        """
        if not self._reqs:
            return []
        ordered = order_waiting(
            self._rules.queue_policy,
            self.reqs,
            self._memory.cache,
            running,
            prefix_aware_queue_max=self._rules.prefix_aware_queue_max,
        )
        ordered = aged_first(ordered, now - self._rules.ageing_seconds)
        ordered = least_served_first(ordered, held)
        return self._in_batch_prefix.go_now(ordered)
