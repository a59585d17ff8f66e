"""Admission of requests to a decode worker: never, not now, or yes.

A new request may take the available pages less the growth that is expected of the requests that are here
(`decode/growth.py`).

A request below its tenant's share (`shared/scheduling/tenant_shares.py`) needs only its own pages: what one tenant may
not take alone is kept free for it, and as it grows the tenant that holds most is retracted. While a retracted
request has not returned, no other comes in, except for a bounded number of requests below their share: the backfill.

One request must always be able to go on. Transferring requests cannot be retracted, so they never take the pages that
the largest running one can want until they have landed or are given up: what it can generate in `fetch_seconds_max` at
the measured rate of steps. Those that have landed can be retracted. A fetch that makes slow progress may take longer:
then the largest one waits for it. Admission may evict cached pages to free some; the transfer queue allocates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence

from decode.config import DecodeConfig
from decode.growth import CachedSum, ExpectedGrowth, NewTokenRatio, OutputLengths, PagesReturned, StepRate
from shared.batch.req import Req
from shared.kv.kv_memory import KvMemory
from shared.kv.page_pool import PageState
from shared.scheduling.sound_commands import unsound, unsound_baton
from shared.scheduling.tenant_shares import is_below_share, share_of, tokens_by_tenant
from shared.wire.messages import Decode, RefusalReason, Serve

# In units of `retract_steps`: a retraction needs one, so the other lies before the next retraction.
STEPS_BETWEEN = 2
GROWTH_STEPS = 16  # that one sum of the growth serves: it is dear. Those that leave stay counted until then
BACKFILL_MAX = 32  # requests below their tenant's share that come in until all retracted ones have returned


class Admission:
    """Decides on new requests by the pages that are available in `memory`, and by the requests that are here.

    `settled` are those whose KV is here, `present` these and those whose KV is on its way. Most admissions ask for
    neither: a sum over them is cached.
    """

    def __init__(
        self,
        config: DecodeConfig,
        memory: KvMemory,
        context_len: int,
        kv_format: str,
        vocab_size: int,
        *,
        settled: Callable[[], Sequence[Req]],
        present: Callable[[], Sequence[Req]],
    ):
        self.ratio = NewTokenRatio(
            init=config.init_new_token_ratio,
            conservativeness=config.schedule_conservativeness,
            min_factor=config.min_new_token_ratio_factor,
            decay_steps=config.new_token_ratio_decay_steps,
            headroom_steps=config.retract_steps,
        )
        self.lengths = OutputLengths()
        self._step_rate = StepRate()
        self.returned = PagesReturned()
        self._present = present
        self._growth = CachedSum(present, self._no_growth, _with_growth_of)
        self._held = CachedSum[Counter[str]](present, Counter, _with_tokens_of)  # by tenant
        self._largest = CachedSum(settled, int, self._larger)
        self._config = config
        self._memory = memory
        self._context_len = context_len
        self._kv_format = kv_format
        self._vocab_size = vocab_size
        pages = memory.pool.total
        self.pages_kept = pages - share_of(pages, config.tenant_share_max)  # for requests below their share
        self.slots_kept = config.max_running_requests - share_of(
            config.max_running_requests, config.tenant_share_max
        )

    def never_fits(self, command: Decode | Serve) -> tuple[RefusalReason, str] | None:
        """Why this worker can never take the request; None if it can."""
        output_len = len(command.token_ids) - command.prompt_len
        final_len = command.prompt_len + command.params.max_new_tokens - 1
        if final_len >= self._context_len or self._memory.pages_for(final_len) > self._memory.pool.total:
            return "too_long", f"up to {final_len + 1} tokens exceed this worker's context or pages"
        if output_len >= command.params.max_new_tokens:
            return "internal", f"nothing to generate: {output_len} tokens of output are here"
        if isinstance(command, Decode):
            return self._unsound_baton(command)
        if not self._config.local_tokens_max:
            return "internal", "this worker computes no prompts"
        problem = unsound(command, self._vocab_size)
        return ("internal", problem) if problem else None

    def _unsound_baton(self, command: Decode) -> tuple[RefusalReason, str] | None:
        baton = command.baton
        if baton.kv_format != self._kv_format:
            return "unreachable", f"KV format {baton.kv_format} is not this worker's {self._kv_format}"
        if baton.kv_len != len(command.token_ids) - 1:
            return "internal", f"the baton covers {baton.kv_len} tokens of {len(command.token_ids)}"
        problem = unsound(command, self._vocab_size) or unsound_baton(baton, self._memory.page_size)
        return ("internal", problem) if problem else None

    def is_below_share(self, req: Req) -> bool:
        """Whether the tenant of `req` holds so little of what is here that the request needs only its own pages."""
        capacity = self._memory.pool.total * self._memory.page_size
        return is_below_share(req, self._held.get(), req.final_kv_len, capacity)

    def has_slot(
        self,
        is_below_share: Callable[[], bool],
        free_slots: int,
        *,
        alone: bool,
        retracting: bool,
        backfilled: int,
    ) -> bool:
        """Whether one of `free_slots` is for a request that may be below its share; `alone`: no other is in a slot.

        While requests are retracted only those below their share come in, `BACKFILL_MAX` until all have returned.
        """
        if alone or (free_slots > self.slots_kept and not retracting):
            return free_slots > 0 and not retracting
        return free_slots > 0 and backfilled < BACKFILL_MAX and is_below_share()

    def free_pages_for(
        self,
        req: Req,
        is_below_share: Callable[[], bool],
        missing: int,
        pages_arriving: int,
        *,
        alone: bool,
    ) -> bool:
        """Whether the request can have its `missing` pages; then they are free now.

        The growth of the others is kept free beside them, unless the request is below its share. `alone`: there are no
        others. The request's own cached prefix is locked already, and `pages_arriving` are the pages that those whose
        KV is on its way and the request hold.
        """
        pool = self._memory.pool
        usable = pool.total - pool.count(PageState.QUARANTINED)
        if self._memory.pages_for(req.final_kv_len) > usable:
            return False
        if alone:
            return self._free_now(missing)
        for_growth = self._memory.available_pages - missing - self.pages_kept
        if not self._growth_fits(req, for_growth) and not is_below_share():
            return False
        room = usable - missing - pages_arriving
        largest = self._memory.pages_for(self._context_len)  # at most: mostly there is as much room
        if largest > room:
            largest = self._pages_of_largest()
        return largest <= room and self._free_now(missing)

    def on_step(self, now: float) -> None:
        """A decode step is planned: all goes well."""
        self.ratio.decay()
        self._step_rate.on_step(now)
        self.on_change()
        if self._memory.launched_step % GROWTH_STEPS == 0:
            self._growth.invalidate()

    def on_admitted(self, req: Req) -> None:
        """The request is in a slot."""
        self._held.add(req)
        self._growth.add(req)

    def on_landed(self, req: Req) -> None:
        """The KV of the request is here."""
        self._largest.add(req)

    def invalidate_sums(self) -> None:
        """Make all sums anew: a retracted request has returned, or no step is launched that would do it."""
        self._growth.invalidate()
        self.on_change()

    def on_change(self) -> None:
        """Requests that are here have more tokens, or have left."""
        self._held.invalidate()
        self._largest.invalidate()

    @property
    def steps_until_landed(self) -> int:
        """Decode steps in which what arrives now has landed or is given up."""
        steps = self._step_rate.steps_within(self._config.fetch_seconds_max, most=self._context_len)
        return max(steps, self._config.retract_steps)

    def slots_for_new(self, free_slots: int) -> int:
        """How many of `free_slots` a request may have which is not below its tenant's share."""
        return max(0, free_slots - self.slots_kept) if self._present() else free_slots

    def pages_for_new(self) -> int:
        """Pages that a new request could have beside the growth of all that are here."""
        growth, present = self._growth.get(), self._present()
        pages = self._memory.pages_for(int(growth.tokens)) + (0 if growth.known else len(present))
        return max(0, self._memory.available_pages - pages - (self.pages_kept if present else 0))

    def growth_within(self, present: Collection[Req], seconds: float) -> int:
        """Pages that these requests are expected to take in so many seconds of steps, and no more than ever."""
        steps = self._step_rate.steps_within(seconds, most=self._context_len)
        most = sum(
            self._memory.pages_missing(req, min(req.growing_from + steps, req.final_kv_len))
            for req in present
        )
        growth = self._no_growth()
        growth.add(present)
        return min(most, self._memory.pages_for(int(growth.tokens)) + len(present))

    def after_retraction(self, running: list[Req]) -> None:
        """Expect more growth."""
        self.ratio.after_retraction(
            [req.output_len for req in running], [req.params.max_new_tokens for req in running]
        )

    def on_end(self, req: Req) -> None:
        """An output has ended: its length counts from now on."""
        known = self.lengths.known
        self.lengths.add(req.output_len, at_bound=req.remaining_new_tokens <= 0)
        if not known and self.lengths.known:
            self._growth.invalidate()  # it is a guess

    def check(self) -> None:
        """Prove that the cached sums are what the requests add up to; raises `InvariantError`."""
        self._held.check()
        self._largest.check()

    def reset(self) -> None:
        """The worker has no request any more: start over. What is known of the lengths of outputs stays."""
        self.ratio.reset()
        self.invalidate_sums()

    def _free_now(self, missing: int) -> bool:
        """Whether so many pages are free, after evicting those that are not.

        Pages that retire are not counted: they come only later. If what is evicted retires, too, the answer is no, so a
        request that comes in never costs more of the available pages than its own.
        """
        self._memory.cache.evict(missing - self._memory.pool.free)
        return missing <= self._memory.pool.free

    def _pages_of_largest(self) -> int:
        """Pages that the largest request whose KV is here can hold when what arrives now has landed or is given up."""
        return self._largest.get()

    def _larger(self, pages: int, reqs: Sequence[Req]) -> int:
        steps, longest = self.steps_until_landed if reqs else 0, 0
        for req in reqs:
            growing_from = (
                req.launched_len
            )  # but for a prompt that is computed; a call for each would be dear
            if growing_from < len(req.token_ids) - 1:
                growing_from = req.growing_from
            if req.final_kv_len > longest and growing_from + steps > longest:
                longest = min(req.final_kv_len, growing_from + steps)
        return max(pages, self._memory.pages_for(longest))

    def _growth_fits(self, req: Req, pages: int) -> bool:
        """Whether all, the request included, are expected to take no more than `pages` beside those they have."""
        growth = self._growth.get()
        if not growth.known:
            pages -= len(self._present())
        if self._memory.pages_for(int(growth.tokens) + req.remaining_new_tokens) <= pages:
            return True  # as mostly: no request grows beyond its bound
        return self._memory.pages_for(int(growth.tokens_with(req))) <= pages

    def _no_growth(self) -> ExpectedGrowth:
        config = self._config
        steps_certain = STEPS_BETWEEN * config.retract_steps
        return ExpectedGrowth(self.lengths, steps_certain, config.clip_max_new_tokens, self.ratio.value)


def _with_growth_of(growth: ExpectedGrowth, reqs: Sequence[Req]) -> ExpectedGrowth:
    growth.add(reqs)
    return growth


def _with_tokens_of(held: Counter[str], reqs: Sequence[Req]) -> Counter[str]:
    held.update(tokens_by_tenant(reqs))
    return held
