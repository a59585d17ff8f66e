"""`Device` on torch: an ordered queue of steps and copies, carried out by one forward thread.

Per-slot state (page table, length, last token, sampling) lives beside the model. Only the forward thread changes it, in
order, by the deltas that batches carry. So a step may be launched before the previous one has finished: it reads its
input token from `last_tokens`, the FutureMap, when its turn comes. Nothing here knows of requests, leases or who owns a
page; for an invalid plan `wait` raises an `InvariantError`.

After an error the device is broken: that step and all later ones raise the error, and none hangs.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Protocol

import torch
from torch import Tensor

from shared.batch.schedule_batch import ExtendRow, ForwardMode, PageGrant, ScheduleBatch, SlotJoin
from shared.engine.attention.protocol import PagedBatch
from shared.engine.checkpoint.kv_cache import INVALID_PAGE, KVCache
from shared.engine.parts import OnLogits
from shared.engine.sampling.logprobs import LogprobRows, joined_runs, scored_runs
from shared.engine.sampling.sampler import Sampler
from shared.primitives.errors import InvariantError
from shared.wire.sampled import Sampled


class Model(Protocol):
    """From token ids to logits."""

    @property
    def layers_done(self) -> int:
        """Layers computed so far, over all steps; asked by other threads while one computes."""

    def forward(self, token_ids: Tensor, batch: PagedBatch, sampled_rows: Tensor) -> Tensor:
        """token_ids [tokens], sampled_rows [rows], ascending → logits float32 [rows, vocab].

        Keys and values of all tokens are cached.
        Raises `InvariantError` for a batch whose cache has fewer pages than tokens.
        """


class SlotState:
    """The state of each slot between steps."""

    def __init__(self, slots: int, pages_per_slot: int) -> None:
        self.page_tables = torch.full((slots, pages_per_slot), INVALID_PAGE, dtype=torch.int32)
        self.kv_lens = torch.zeros(slots, dtype=torch.int64)  # tokens in the cache
        self.last_tokens = torch.zeros(slots, dtype=torch.int64)  # the FutureMap
        self._page_counts = [0] * slots

    def join(self, join: SlotJoin) -> None:
        """Overwrite the slot."""
        self.page_tables[join.slot].fill_(INVALID_PAGE)
        self._page_counts[join.slot] = 0
        self.grant(PageGrant(join.slot, join.pages))
        self.kv_lens[join.slot] = join.kv_len
        if join.last_token is not None:
            self.last_tokens[join.slot] = join.last_token

    def grant(self, grant: PageGrant) -> None:
        """Append pages to the slot's table."""
        start = self._page_counts[grant.slot]
        end = start + len(grant.pages)
        if end > self.page_tables.shape[1]:
            raise InvariantError(
                f"slot {grant.slot} is given {end} pages, a table holds {self.page_tables.shape[1]}"
            )
        self.page_tables[grant.slot, start:end] = torch.tensor(grant.pages, dtype=torch.int32)
        self._page_counts[grant.slot] = end


@dataclass(frozen=True, slots=True)
class TokenSampling:
    """What chooses a step's tokens, and what is reported of them."""

    sampler: Sampler
    logprobs: LogprobRows
    on_logits: OnLogits | None


class TorchDevice:
    """`Device` around a model and its cache."""

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        sampling: TokenSampling,
        *,
        slots: int,
        pages_per_slot: int,
        threads: int,
    ) -> None:
        self._model = model
        self._cache = cache
        self._sampler = sampling.sampler
        self._logprobs = sampling.logprobs
        self._on_logits = sampling.on_logits
        self._state = SlotState(slots, pages_per_slot)
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._launched = 0
        self._completed = 0
        self._results: dict[int, Future[Sampled]] = {}
        self._copies_done: deque[int] = deque()
        self._broken: BaseException | None = None
        self._thread = threading.Thread(
            target=self._forward_loop, args=(threads,), name="forward", daemon=True
        )
        self._thread.start()

    # ---- the scheduler's side ----------------------------------------------------------------------------------

    def launch(self, batch: ScheduleBatch) -> None:
        """See `Device`."""
        if batch.step != self._launched + 1:
            raise InvariantError(f"step {batch.step} was launched after step {self._launched}")
        self._launched = batch.step
        result: Future[Sampled] = Future()
        self._results[batch.step] = result
        self._queue.put(lambda: self._run(batch, result))

    def wait(self, step: int) -> Sampled:
        """See `Device`; raises what the step raised."""
        if step not in self._results:
            raise InvariantError(f"step {step} was never launched, or has been waited for")
        return self._results.pop(step).result()

    def completed(self) -> int:
        """See `Device`."""
        return self._completed

    @property
    def work_done(self) -> int:
        """A number that changes while steps are computed: it stands still when the device hangs. From any thread."""
        return self._model.layers_done

    @property
    def launches_cost(self) -> bool:
        """See `EngineDevice`: the same cores plan and compute."""
        return True

    @property
    def counters(self) -> None:
        """Nothing is counted here: the scheduler counts steps, and a CPU has no other clock."""
        return None

    def start_backup(self, copy_id: int, pages: Sequence[int], host_pages: Sequence[int]) -> None:
        """See `Device`."""
        self._queue.put(lambda: self._copy(copy_id, lambda: self._cache.backup(pages, host_pages)))

    def start_restore(self, copy_id: int, host_pages: Sequence[int], pages: Sequence[int]) -> None:
        """See `Device`."""
        self._queue.put(lambda: self._copy(copy_id, lambda: self._cache.restore(host_pages, pages)))

    def copies_done(self) -> list[int]:
        """See `Device`; raises if the device is broken."""
        if self._broken is not None:
            raise self._broken
        return [self._copies_done.popleft() for _ in range(len(self._copies_done))]

    def close(self) -> None:
        """Finish what was launched and end the forward thread."""
        self._queue.put(None)
        self._thread.join()

    # ---- the forward thread ------------------------------------------------------------------------------------

    def _forward_loop(self, threads: int) -> None:
        torch.set_num_threads(threads)  # OpenMP keeps this number per calling thread
        with torch.inference_mode():
            while (work := self._queue.get()) is not None:
                work()

    def _run(self, batch: ScheduleBatch, result: Future[Sampled]) -> None:
        if self._broken is None:
            try:
                began_at = time.perf_counter()
                sampled = self._step(batch)
                sampled = replace(sampled, seconds=time.perf_counter() - began_at)
            except BaseException as error:  # whatever it is, `wait` must raise it rather than hang
                self._broken = error
        if self._broken is not None:
            result.set_exception(self._broken)
            return
        self._completed = batch.step
        result.set_result(sampled)

    def _copy(self, copy_id: int, copy: Callable[[], None]) -> None:
        if self._broken is None:
            try:
                copy()
                self._copies_done.append(copy_id)
            except BaseException as error:  # surfaces in `copies_done` and in every later `wait`
                self._broken = error

    def _step(self, batch: ScheduleBatch) -> Sampled:
        for join in batch.joins:
            self._state.join(join)
            self._sampler.join(join)
            self._logprobs.join(join)
        for grant in batch.grants:
            self._state.grant(grant)
        if batch.mode is ForwardMode.EXTEND:
            return self._extend(batch)
        if batch.mode is ForwardMode.DECODE:
            return self._decode(batch)
        if batch.mode is ForwardMode.MIXED:
            batch.check_slots()
            return self._extend(batch)
        return Sampled([])

    def _extend(self, batch: ScheduleBatch) -> Sampled:
        """Compute the rows of prompts; in MIXED the rows that decode are in front of the first run."""
        if not any(row.scores for row in batch.extend):
            return self._extend_rows(batch.step, batch.extend, batch.decode_slots)
        decode_slots, done = batch.decode_slots, []
        for run in scored_runs(batch.extend):
            done.append((run, self._extend_rows(batch.step, [row for _, row in run], decode_slots)))
            decode_slots = ()
        return joined_runs(done)

    def _extend_rows(self, step: int, rows: Sequence[ExtendRow], decode_slots: Sequence[int]) -> Sampled:
        """Compute, in one launch, a token of each slot that decodes, then the rows of prompts."""
        state, decoding = self._state, len(decode_slots)
        ones = [1] * decoding
        slots = torch.tensor([*decode_slots, *(row.slot for row in rows)])
        starts = torch.tensor([row.start for row in rows])
        query_lens = torch.tensor([*ones, *(len(row.token_ids) for row in rows)])
        kv_lens = state.kv_lens[slots]
        if not torch.equal(kv_lens[decoding:], starts):
            raise InvariantError(f"step {step} extends a slot elsewhere than at the end of its cache")
        state.kv_lens[slots] = kv_lens + query_lens
        token_ids = torch.tensor([token for row in rows for token in row.token_ids])
        if decoding:
            token_ids = torch.cat((state.last_tokens[slots[:decoding]], token_ids))
        samples = torch.tensor([*map(bool, ones), *(row.samples for row in rows)])
        ends = query_lens.cumsum(0)
        if not any(row.scores for row in rows):
            logits = self._logits(token_ids, slots, query_lens, ends[samples] - 1)
            return self._sample(step, logits, slots[samples], may_sit_out=decoding)
        firsts = (ends - query_lens)[decoding:].tolist()
        scored = [first + i for first, row in zip(firsts, rows, strict=True) for i in range(len(row.scores))]
        needed = torch.cat([torch.tensor(scored), ends[samples] - 1]).sort()
        logits = self._logits(token_ids, slots, query_lens, needed.values)
        is_scored = needed.indices < len(scored)
        reported = self._logprobs.scored(logits[is_scored], rows)
        sampled = self._sample(step, logits[~is_scored], slots[samples], may_sit_out=decoding)
        return replace(sampled, scored=reported)

    def _decode(self, batch: ScheduleBatch) -> Sampled:
        slots = torch.tensor(batch.decode_slots, dtype=torch.int64)
        self._state.kv_lens[slots] += 1
        ones, rows = torch.ones_like(slots), torch.arange(len(slots))
        logits = self._logits(self._state.last_tokens[slots], slots, ones, rows)
        return self._sample(batch.step, logits, slots, may_sit_out=len(slots))

    def _logits(self, token_ids: Tensor, slots: Tensor, query_lens: Tensor, rows: Tensor) -> Tensor:
        """token_ids [tokens], slots and query_lens [requests], rows [rows] among the tokens → [rows, vocab]."""
        batch = PagedBatch.of(
            query_lens, self._state.kv_lens[slots], self._state.page_tables[slots], self._cache.page_size
        )
        return self._model.forward(token_ids, batch, rows)

    def _sample(self, step: int, logits: Tensor, slots: Tensor, *, may_sit_out: int) -> Sampled:
        """A token for each row; logits float32 [rows, vocab], slots int64 [rows]. The first `may_sit_out` may sit out.

        A row that does is as if it had not been computed: the next step writes the same cell of its cache.
        """
        if self._on_logits is not None:
            self._on_logits(step, tuple(slots.tolist()), logits.clone())
        if not len(slots):
            return Sampled([])
        asked = self._logprobs.raw(logits, slots)
        kv_lens = self._state.kv_lens[slots]
        tokens = self._sampler.sample(logits, slots, kv_lens, may_sit_out=may_sit_out)
        chosen: list[int] = tokens.tolist()
        masks = self._sampler.masks
        if sat_out := list(masks.sat_out):
            self._state.kv_lens[slots[sat_out]] -= 1
            tokens[sat_out] = self._state.last_tokens[slots[sat_out]]
            asked = {row: each for row, each in asked.items() if row not in masks.sat_out}
        self._state.last_tokens[slots] = tokens
        reported = self._logprobs.chosen(asked, chosen)
        return Sampled(
            chosen, reported, failed=self._sampler.failed, sat_out=masks.sat_out, mask_seconds=masks.seconds
        )
