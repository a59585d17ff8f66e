"""`Device` on a stream: steps are launched from the scheduler's own thread, which never waits for them.

A launch has two parts. The host's part looks at its mirror of the slots, fills a staging buffer and plans attention.
The device's part reads that buffer and state on the device alone, so it may run as late as it likes: step N+1 takes
its input token from the state that step N leaves (the FutureMap), and no plan ever reads anything back.

    launch   mirror → staging → plan │ upload → write words → layers → adjust → choose → download → mark
    wait     mark → tokens

Copies between device and host pages run on a stream of their own, behind the steps launched before them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.engine.attention.paged import PagedBatch
from shared.engine.attention.protocol import PlannedAttention, StreamAttention
from shared.engine.cuda.adjustments import Adjusted, Adjustments
from shared.engine.cuda.counters import DeviceCounters
from shared.engine.cuda.graphs import DecodeGraphs, RunModel
from shared.engine.cuda.slots import DeviceWords, SlotMirror, Words
from shared.engine.cuda.staging import Staging
from shared.engine.cuda.step_kernels import StepKernels
from shared.engine.kv_cache import KVCache
from shared.engine.ops import Ops
from shared.engine.streams import Mark, Stream, Work
from shared.engine.torch_device import OnLogits
from shared.errors import InvariantError
from shared.sampled import Sampled
from shared.sampling_params import MAX_LOGIT_BIAS_ENTRIES, MAX_STOP_TOKEN_IDS
from shared.schedule_batch import ForwardMode, ScheduleBatch

_ENTRY_WORDS = 2**16  # of staging for changed words of state: what does not fit goes in portions before
_ROW_WORDS = 64 + 3 * (MAX_LOGIT_BIAS_ENTRIES + MAX_STOP_TOKEN_IDS)  # of staging for the sampling of a row


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a device is made for."""

    slots: int
    pages_per_slot: int
    extend_tokens: int  # of one EXTEND step, at most
    vocab_size: int


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What a device computes with. All of it works on the streams' device."""

    run_model: RunModel
    attention: StreamAttention
    kernels: StepKernels
    ops: Ops
    cache: KVCache  # with one padding page, its last


@dataclass(frozen=True, slots=True)
class _Step:
    """One that was launched."""

    mode: ForwardMode
    began: Mark
    ended: Mark
    tokens: Tensor | None  # host buffer int32, with one for each sampled row
    rows: int
    waited_since: Mark | None  # the end of the step before, if a request was in both


@dataclass(frozen=True, slots=True)
class _Forward:
    """The device's part of a step."""

    slots: NDArray[np.int64]  # of all its requests
    work: Sequence[Work]
    samples: int


_NO_SLOTS = np.empty(0, dtype=np.int64)


class CudaDevice:
    """`Device` around a model, its cache and two streams."""

    def __init__(
        self,
        parts: EngineParts,
        capacity: Capacity,
        forward: Stream,
        copies: Stream,
        eos_token_ids: frozenset[int],
        *,
        on_logits: OnLogits | None = None,
    ) -> None:
        """Captures the graphs of DECODE."""
        self._parts = parts
        self._forward = forward
        self._copy_stream = copies
        self._on_logits = on_logits
        cache, slots, width = parts.cache, capacity.slots, capacity.pages_per_slot
        device = cache.store.device
        self._words = DeviceWords(slots, width, cache.page_size, len(cache.store) - 1, device)
        self._mirror = SlotMirror(slots, width, cache.pages, cache.page_size, capacity.vocab_size)
        self._adjustments = Adjustments(slots, capacity.vocab_size, eos_token_ids, parts.ops, self._words)
        fixed = DecodeGraphs.fixed_words(slots)
        # An EXTEND's arrays: three by token, a few by request, and the tables.
        words = fixed + 3 * capacity.extend_tokens + slots * (width + _ROW_WORDS) + _ENTRY_WORDS
        self.counters = DeviceCounters()
        self._staging = Staging(forward, torch.zeros(words, dtype=torch.int32, device=device), fixed)
        self._logits = torch.zeros(slots, capacity.vocab_size, device=device)
        self._tokens = torch.zeros(slots, dtype=torch.int32, device=device)
        forward.synchronize()  # weights and all that was made above lie on another stream
        self._graphs = DecodeGraphs(
            forward,
            parts.attention,
            parts.kernels,
            parts.run_model,
            self._words,
            self._staging,
            self._logits,
            cache.page_size,
            self.counters,
        )
        self._results: deque[Tensor] = deque()  # host buffers that no step uses
        self._slots = slots
        self._launched = 0
        self._completed = 0
        self._in_last = np.zeros(slots, dtype=bool)  # slots of the newest forward
        self._steps: dict[int, _Step | BaseException] = {}  # not waited for, in order
        self._copies: deque[tuple[int, Mark]] = deque()
        self._broken: BaseException | None = None
        self._warm_up()
        self._last = forward.record()  # behind the newest step
        self._last_forward = self._last  # behind the newest that computed

    # ---- the scheduler's side ------------------------------------------------------------------------------------

    def launch(self, batch: ScheduleBatch) -> None:
        """See `Device`."""
        if batch.step != self._launched + 1:
            raise InvariantError(f"step {batch.step} was launched after step {self._launched}")
        self._launched = batch.step
        try:
            self._steps[batch.step] = self._broken or self._launch(batch)
        except BaseException as error:  # surfaces in `wait`, where the loop expects it
            self._steps[batch.step] = self._broken = error

    def wait(self, step: int) -> Sampled:
        """See `Device`; raises what the step raised."""
        launched = self._steps.pop(step, None)
        if launched is None:
            raise InvariantError(f"step {step} was never launched, or has been waited for")
        if isinstance(launched, BaseException):
            raise launched
        self._reach(launched.ended)
        self._completed = max(self._completed, step)
        self._count_seconds(launched)
        if launched.tokens is None:
            return Sampled([])
        tokens: list[int] = launched.tokens[: launched.rows].tolist()
        self._results.append(launched.tokens)
        return Sampled(tokens)

    def completed(self) -> int:
        """See `Device`; raises if a step has failed on the device."""
        for step, launched in self._steps.items():
            if isinstance(launched, BaseException) or not launched.ended.passed():
                break
            self._reach(launched.ended)
            self._completed = step
        return self._completed

    @property
    def work_done(self) -> int:
        """A number that changes while steps are computed: it stands still when the device hangs. From any thread."""
        steps = [step for step in tuple(self._steps.values()) if isinstance(step, _Step)]
        return 2 * self._launched - sum(
            not mark.passed() for step in steps for mark in (step.began, step.ended)
        )

    @property
    def launches_cost(self) -> bool:
        """See `EngineDevice`: a GPU computes by itself."""
        return False

    def start_backup(self, copy_id: int, pages: Sequence[int], host_pages: Sequence[int]) -> None:
        """See `Device`."""
        self._copy(copy_id, pages, host_pages, partial(self._parts.cache.backup, pages, host_pages))

    def start_restore(self, copy_id: int, host_pages: Sequence[int], pages: Sequence[int]) -> None:
        """See `Device`."""
        self._copy(copy_id, pages, host_pages, partial(self._parts.cache.restore, host_pages, pages))

    def copies_done(self) -> list[int]:
        """See `Device`; raises if the device is broken."""
        if self._broken is not None:
            raise self._broken
        done = []
        while self._copies and self._copies[0][1].passed():
            copy_id, mark = self._copies.popleft()
            self._reach(mark)
            done.append(copy_id)
        return done

    def close(self) -> None:
        """Finish what was launched, and give up the streams."""
        for stream in (self._forward, self._copy_stream):
            stream.close()

    # ---- launching -----------------------------------------------------------------------------------------------

    def _launch(self, batch: ScheduleBatch) -> _Step:
        for join in batch.joins:
            self._adjustments.join(join)
        write = self._stage_pairs(self._mirror.change(batch))
        if batch.mode is ForwardMode.EXTEND:
            forward = self._stage_extend(batch)
        elif batch.mode is ForwardMode.DECODE:
            forward = self._stage_decode(batch)
        else:
            forward = _Forward(_NO_SLOTS, [], 0)
        began = self._forward.record()  # not before: what the host takes to stage is not the device's time
        self._staging.upload()
        for work in (*write, *forward.work):
            self._forward.run(work)
        tokens = self._download(forward.samples) if forward.samples else None
        self._last = ended = self._forward.record()
        self._staging.end(ended)
        waited_since = None
        if len(forward.slots):
            waited_since = self._last_forward if self._in_last[forward.slots].any() else None
            self._last_forward = ended
            self._in_last[:] = False
            self._in_last[forward.slots] = True
        return _Step(batch.mode, began, ended, tokens, forward.samples, waited_since)

    def _stage_pairs(self, pairs: Words) -> list[Work]:
        """Stage changes of the device's words; those that do not fit beside a step go before it."""
        fits = _ENTRY_WORDS // 2
        self._staging.begin()
        for start in range(0, len(pairs) - fits, fits):
            _, staged = self._staging.put(pairs[start : start + fits])
            self._staging.upload()
            self._forward.run(partial(self._parts.kernels.write_words, staged, self._words.words))
            self._staging.end(self._forward.record())
            self._staging.begin()
        rest = pairs[max(0, (len(pairs) - 1) // fits) * fits :]
        if not len(rest):
            return []
        _, staged = self._staging.put(rest)
        return [partial(self._parts.kernels.write_words, staged, self._words.words)]

    def _stage_decode(self, batch: ScheduleBatch) -> _Forward:
        slots = np.array(batch.decode_slots, dtype=np.int64)
        self._mirror.lengthen(slots)
        kv_lens, rows = self._mirror.kv_lens[slots], len(slots)
        work = self._graphs.stage(slots, kv_lens, self._mirror.pages_of(slots))
        adjusted = self._adjustments.stage(slots, kv_lens, self._staging)
        sample = partial(
            self._sample, batch.step, tuple(batch.decode_slots), self._staging.device[:rows], adjusted
        )
        return _Forward(slots, [work, sample], rows)

    def _stage_extend(self, batch: ScheduleBatch) -> _Forward:
        rows = batch.extend
        slots = np.array([row.slot for row in rows], dtype=np.int64)
        kv_lens, counts = self._mirror.kv_lens[slots], self._mirror.pages_of(slots)
        pages = [self._mirror.tables[slot, :count] for slot, count in zip(slots, counts, strict=True)]
        samples = np.array([row.samples for row in rows], dtype=bool)
        extend = self._stage_prompts([row.token_ids for row in rows], kv_lens, pages, samples)
        if not samples.any():
            return _Forward(slots, [extend], 0)
        _, of_slots = self._staging.put(slots[samples].astype(np.int32))
        adjusted = self._adjustments.stage(slots[samples], kv_lens[samples], self._staging)
        sampled = tuple(slots[samples].tolist())
        sample = partial(self._sample, batch.step, sampled, of_slots, adjusted)
        return _Forward(slots, [extend, sample], len(sampled))

    def _stage_prompts(
        self,
        token_ids: Sequence[Sequence[int]],
        kv_lens: NDArray[np.int64],
        pages: Sequence[NDArray[np.int32]],
        samples: NDArray[np.bool_],
    ) -> Work:
        """FlashInfer's arrays of an EXTEND step, its plan, and what computes the logits of those that sample."""
        query_lens = np.array([len(each) for each in token_ids], dtype=np.int64)
        rows = np.fromiter((token for each in token_ids for token in each), dtype=np.int32)
        self._mirror.check_token_ids(rows)
        qo_indptr = _starts(query_lens)
        page_size = self._mirror.page_size
        arrays: dict[str, NDArray[np.signedinteger]] = {
            "qo_indptr": qo_indptr,
            "kv_indptr": _starts(np.array([len(each) for each in pages], dtype=np.int64)),
            "kv_indices": np.concatenate(pages),
            "kv_last_page_len": (kv_lens - 1) % page_size + 1,
            "batch_indices": np.repeat(np.arange(len(token_ids)), query_lens),
            "positions": np.arange(len(rows)) - np.repeat(qo_indptr[1:] - kv_lens, query_lens),
        }
        staged = {name: self._staging.put(array.astype(np.int32)) for name, array in arrays.items()}
        host, device = (
            PagedBatch(page_size=page_size, **{name: pair[side] for name, pair in staged.items()})
            for side in (0, 1)
        )
        self._graphs.forget_plan()
        with self._forward.on_host():
            attention = self._parts.attention.plan_extend(host, device)
        _, ids = self._staging.put(rows)
        _, at = self._staging.put((qo_indptr[1:][samples] - 1).astype(np.int32))
        return partial(self._extend, ids, device.positions, attention, at)

    def _warm_up(self) -> None:
        """Do once what no graph has done: libraries load kernels at first use, or find that they are missing."""
        padding = np.array([len(self._parts.cache.store) - 1], dtype=np.int32)
        self._staging.begin()
        extend = self._stage_prompts([[0]], np.ones(1, dtype=np.int64), [padding], np.ones(1, dtype=bool))
        _, of_slots = self._staging.put(np.array([self._slots], dtype=np.int32))
        self._staging.upload()
        self._forward.run(extend)
        self._forward.run(partial(self._choose_once, of_slots))
        self._staging.end(self._forward.record())

    def _choose_once(self, of_slots: Tensor) -> None:
        logits, ops = self._logits[:1], self._parts.ops
        ops.top_k_floor(logits, torch.ones_like(of_slots))
        ops.top_p_floor(logits, torch.full_like(logits[:, 0], 0.5))
        self._parts.kernels.choose_tokens(logits, of_slots, self._words.state, self._tokens[:1])

    # ---- the device's part: reads staging and state on the device, nothing that the host changes ------------------

    def _extend(self, token_ids: Tensor, positions: Tensor, attention: PlannedAttention, at: Tensor) -> None:
        logits = self._parts.run_model(token_ids, positions, attention, at)
        self._logits[: len(at)].copy_(logits)

    def _sample(self, step: int, slots: tuple[int, ...], of_slots: Tensor, adjusted: Adjusted) -> None:
        logits, tokens = self._logits[: len(slots)], self._tokens[: len(slots)]
        if self._on_logits is not None:
            self._on_logits(step, slots, logits.clone())
        for adjust in adjusted.before:
            adjust(logits)
        self._parts.kernels.choose_tokens(logits, of_slots, self._words.state, tokens)
        for remember in adjusted.after:
            remember(tokens)

    # ---- results and copies --------------------------------------------------------------------------------------

    def _download(self, rows: int) -> Tensor:
        """Bring the tokens to a buffer of the host that no other step uses until this one was waited for."""
        buffer = self._results.popleft() if self._results else self._forward.buffer(self._slots)
        self._forward.download(buffer[:rows], self._tokens[:rows])
        return buffer

    def _copy(self, copy_id: int, pages: Sequence[int], host_pages: Sequence[int], copy: Work) -> None:
        cache = self._parts.cache
        if max(pages) >= cache.pages or max(host_pages) >= cache.host_pages or min((*pages, *host_pages)) < 0:
            self._broken = self._broken or InvariantError(
                f"a copy of pages {list(pages)} and host pages {list(host_pages)}: there are {cache.pages} and "
                f"{cache.host_pages}"
            )
            return
        self._copy_stream.wait_for(self._last)
        self._copy_stream.run(copy)
        self._copies.append((copy_id, self._copy_stream.record()))

    def _reach(self, mark: Mark) -> None:
        try:
            mark.wait()
        except BaseException as error:
            self._broken = self._broken or error
            raise

    def _count_seconds(self, step: _Step) -> None:
        seconds = step.ended.seconds_since(step.began)
        counters = self.counters
        if step.mode is ForwardMode.DECODE:
            counters.decode_seconds += seconds
        elif step.mode is ForwardMode.EXTEND:
            counters.extend_seconds += seconds
        else:
            counters.prebuilt_seconds += seconds
        if step.waited_since is not None:
            counters.idle_seconds += max(0.0, step.began.seconds_since(step.waited_since))


def _starts(lens: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(lens)))
