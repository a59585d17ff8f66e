"""Mistakes that only settings and requests at their borders bring to light: see `mutations`."""

from __future__ import annotations

from collections.abc import Sequence

from decode.admission import Admission
from prefill.scheduler import PrefillScheduler
from router.core.fleet.workers import Fleet, Worker
from shared.batch.req import Req
from shared.kv.radix_cache import RadixCache
from shared.scheduling.queue_policy import QUEUE_POLICIES
from shared.wire.messages import Decode, FinishReason, Hello, RefusalReason
from tests.simulation.mistakes.mutation import Mutation, Patch, into

MISTAKES: dict[str, Mutation] = {}
_mistake = into(MISTAKES)

CLIP = 96  # tokens; only requests without max_tokens generate more


@_mistake("lifecycle", "an answer without max_tokens ends where its reserve is clipped")
def _clipped() -> list[Patch]:
    def finish_reason(self: Req, eos_token_ids: frozenset[int]) -> FinishReason | None:
        return real(self, eos_token_ids) or ("length" if self.output_len >= CLIP else None)

    real = Req.finish_reason
    return [(Req, "finish_reason", finish_reason)]


@_mistake("room", "a request that may fill its context is a token too long for decode")
def _last_token_refused() -> list[Patch]:
    def never_fits(self: Admission, command: Decode) -> tuple[RefusalReason, str] | None:
        if command.prompt_len + command.params.max_new_tokens >= self._context_len:
            return "too_long", "it could fill the context"
        return real(self, command)

    real = Admission.never_fits
    return [(Admission, "never_fits", never_fits)]


@_mistake("placement", "a part of a request in flight per slot is none")
def _no_part() -> list[Patch]:
    def up(self: Fleet, peer: str, hello: Hello) -> Worker | str:
        worker = real(self, peer, hello)
        if isinstance(worker, Worker):
            worker.prefilling_max = int(hello.limits.slots * self._prefilling_per_slot)
        return worker

    real = Fleet.up
    return [(Fleet, "up", up)]


@_mistake("prefill", "routing-key keeps only the requests whose key runs")
def _others_dropped() -> list[Patch]:
    def routing_key(arrived: list[Req], cache: RadixCache, running: Sequence[Req]) -> list[Req]:
        del cache
        keys = {req.extra_key for req in running}
        return [req for req in arrived if req.extra_key in keys]

    return [(QUEUE_POLICIES, "routing-key", routing_key)]


@_mistake("prefill", "no prompt starts while leases hold as much as they may")
def _as_much_is_too_much() -> list[Patch]:
    def may_start(self: PrefillScheduler, req: Req) -> bool:
        pages_leased = self._config.lease_fraction * self.memory.pool.total
        return self.leases.pages < pages_leased and real(self, req)

    real = PrefillScheduler._may_start
    return [(PrefillScheduler, "_may_start", may_start)]
