"""`Device` on a stream: steps are launched from the scheduler's own thread, which never waits for them.

A launch has two parts. The host's part looks at its mirror of the slots, fills a staging buffer and plans attention.
The device's part reads that buffer and state on the device alone, so it may run as late as it likes: step N+1 takes
its input token from the state that step N leaves (the FutureMap), and no plan ever reads anything back.

    launch   mirror → staging → plan │ upload → write words → layers → adjust → choose → download → mark
    wait     mark → tokens

MIXED is launched as DECODE, from its graph, and then as EXTEND: rows that decode get the bits that they have in DECODE.
The graph goes first, for its padding writes logits behind its rows, where those of the prompts belong. Then the tokens
of all rows are chosen at once.

    launch   … │ upload → write words → graph │ staging → plan │ upload → layers → adjust → choose → download → mark

Where a mask on the host needs the token before, as a grammar's does, `launch` leaves the step open behind its layers,
and `wait` for the step before goes on with it (`sampling`). A row whose mask there is no time for sits out: that is
known before the next step is staged, which sets its slot back, on the host and by words on the device.

Copies between device and host pages run on a stream of their own, behind the steps launched before them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from shared.batch.schedule_batch import ForwardMode, ScheduleBatch
from shared.engine.cuda.counters import DeviceCounters
from shared.engine.cuda.engine_parts import Capacity, EngineParts
from shared.engine.cuda.extends import Extends, ExtendStep
from shared.engine.cuda.graphs import DecodeGraphs
from shared.engine.cuda.sampling import Sampling, StagedRows, TokenChoice
from shared.engine.cuda.slots import SlotMirror, Words
from shared.engine.cuda.step_memory import step_memory
from shared.engine.parallel.orders import Orders
from shared.engine.parts import OnLogits
from shared.engine.sampling.masks import Matchers
from shared.engine.streams import Mark, Work
from shared.primitives.errors import InvariantError
from shared.wire.sampled import Sampled


@dataclass(slots=True, eq=False)
class _Step:
    """One that was launched. It is open until its tokens are chosen."""

    number: int
    mode: ForwardMode
    began: Mark
    waited_since: Mark | None  # the end of the step before, if a request was in both
    rows: StagedRows | None  # those that sample, if any do
    extend: ExtendStep | None
    choice: TokenChoice | None = None
    ended: Mark | None = None


@dataclass(slots=True, eq=False)
class _Forward:
    """What a step computes."""

    slots: NDArray[np.int64]  # of all its requests
    work: list[Work] = field(default_factory=list)  # up to the logits, but what is launched already
    rows: StagedRows | None = None
    extend: ExtendStep | None = None


_NO_SLOTS = np.empty(0, dtype=np.int64)


class CudaDevice:
    """`Device` around a model, its cache and two streams."""

    def __init__(
        self,
        parts: EngineParts,
        capacity: Capacity,
        eos_token_ids: frozenset[int],
        *,
        matchers: Matchers | None = None,
        on_logits: OnLogits | None = None,
        orders: Orders | None = None,
    ) -> None:
        """Captures the graphs of DECODE and EXTEND. `orders`: of the other ranks of its worker."""
        self._parts = parts
        self._forward = forward = parts.forward
        self._copy_stream = parts.copies
        cache, slots, width = parts.cache, capacity.slots, capacity.pages_per_slot
        device = cache.store.device
        self._words, self._staging = step_memory(parts, capacity)
        self._mirror = SlotMirror(slots, width, cache.pages, cache.page_size, capacity.vocab_size)
        self.counters = DeviceCounters()
        self._sampling = Sampling(parts, self._words, capacity.vocab_size, eos_token_ids, matchers, on_logits)
        forward.synchronize()  # weights and all that was made above lie on another stream
        self._graphs = DecodeGraphs(parts, self._words, self._staging, self._sampling.logits, self.counters)
        logits = self._sampling.logits
        self._extends = Extends(self._staging, self._mirror, parts, capacity, logits, self._graphs)
        self._slots = slots
        self._launched = 0
        self._completed = 0
        self._in_last, self._last_slots = np.zeros(slots, dtype=bool), _NO_SLOTS  # of the newest forward
        self._decoding: tuple[int, ...] = ()  # slots of the newest DECODE
        self._decode_slots = _NO_SLOTS
        self._steps: dict[int, _Step | BaseException] = {}  # not waited for, in order
        self._copies: deque[tuple[int, Mark]] = deque()
        self._broken: BaseException | None = None
        self._open: _Step | None = None  # the newest, if its tokens are not chosen yet
        self.sum_of_first_logits = torch.empty((), dtype=torch.float32, device=device)
        self._warm_up()
        self._orders = orders
        if orders is not None:
            orders.open(self._staging.order_words)
            self._staging.tell(orders)
        self._last = forward.record()  # behind the newest step
        self._last_forward = self._last  # behind the newest that computed

    # ---- the scheduler's side ------------------------------------------------------------------------------------

    def launch(self, batch: ScheduleBatch) -> None:
        """See `Device`."""
        if batch.step != self._launched + 1:
            raise InvariantError(f"step {batch.step} was launched after step {self._launched}")
        self._launched = batch.step
        self._settle()
        try:
            self._steps[batch.step] = self._broken or self._launch(batch)
        except BaseException as error:  # surfaces in `wait`, where the loop expects it
            self._steps[batch.step] = self._broken = error

    def wait(self, step: int) -> Sampled:
        """See `Device`; raises what the step raised. The next step may have waited for these tokens: it goes on."""
        if self._open is not None and self._open.number == step:
            self._settle()
        launched = self._steps.get(step)
        if launched is None:
            raise InvariantError(f"step {step} was never launched, or has been waited for")
        try:
            if isinstance(launched, BaseException):
                raise launched
            self._read(launched)
        finally:
            self._settle()
            del self._steps[step]
        self._completed = max(self._completed, step)
        return self._sampled(launched, self._count_seconds(launched))

    def completed(self) -> int:
        """See `Device`; raises if a step has failed on the device."""
        for step, launched in self._steps.items():
            if isinstance(launched, BaseException) or launched.ended is None or not launched.ended.passed():
                break
            self._reach(launched.ended)
            self._completed = step
        return self._completed

    @property
    def work_done(self) -> int:
        """A number that changes while steps are computed: it stands still when the device hangs. From any thread."""
        steps = [step for step in tuple(self._steps.values()) if isinstance(step, _Step)]
        marks = [mark for step in steps for mark in (step.began, step.ended)]
        return 2 * self._launched - sum(mark is None or not mark.passed() for mark in marks)

    @property
    def launches_cost(self) -> bool:
        """See `EngineDevice`: a GPU computes by itself."""
        return False

    def start_backup(self, copy_id: int, pages: Sequence[int], host_pages: Sequence[int]) -> None:
        """See `Device`."""
        self._copy(copy_id, pages, host_pages, backup=True)

    def start_restore(self, copy_id: int, host_pages: Sequence[int], pages: Sequence[int]) -> None:
        """See `Device`."""
        self._copy(copy_id, pages, host_pages, backup=False)

    def copies_done(self) -> list[int]:
        """See `Device`; raises if the device is broken."""
        if self._broken is not None:
            raise self._broken
        done = []
        while self._copies and self._copies[0][1].passed():
            copy_id, mark = self._copies[0]
            self._reach(mark)
            if self._orders is not None and not self._orders.copied(copy_id):
                break
            self._copies.popleft()
            done.append(copy_id)
        return done

    def close(self) -> None:
        """Finish what was launched, and give up the streams."""
        for stream in (self._forward, self._copy_stream):
            stream.close()

    # ---- launching -----------------------------------------------------------------------------------------------

    def _launch(self, batch: ScheduleBatch) -> _Step:
        for join in batch.joins:
            self._sampling.join(join)
            self._extends.join(join)
        forward = _STAGES[batch.mode](self, batch, self._mirror.change(batch))
        # Not before: what the host takes to stage is not the device's time.
        began = (forward.extend and forward.extend.began) or self._forward.record()
        self._staging.upload()
        for work in forward.work:
            self._forward.run(work)
        if forward.extend is not None:
            self._extends.download(forward.extend)
        waited_since = self._last_forward if self._goes_on(forward.slots) else None
        step = _Step(batch.step, batch.mode, began, waited_since, forward.rows, forward.extend)
        if forward.rows is not None and not forward.rows.is_known:
            self._open = step
        elif forward.rows is not None:
            step.choice = self._choose(step.number, forward.rows)
        self._last = self._forward.record()
        self._staging.end(self._last)
        if self._open is None:
            step.ended = self._last
            if len(forward.slots):
                self._last_forward = step.ended
        return step

    def _settle(self) -> None:
        """Choose the tokens of the step that was left open. Those of the steps before are known, or are waited for."""
        if (step := self._open) is None:
            return
        self._open = None
        try:
            for before in self._steps.values():
                if isinstance(before, BaseException):
                    raise before
                if before is not step:
                    self._read(before)
            assert step.rows is not None
            step.choice = self._choose(step.number, step.rows)
            step.ended = self._last = self._last_forward = self._forward.record()
        except BaseException as error:
            self._steps[step.number] = self._broken = self._broken or error

    def _choose(self, step: int, rows: StagedRows) -> TokenChoice:
        """Choose the tokens of a step; what it took over of rows that sit it out is set back before the next one."""
        choice = self._sampling.run(step, rows)
        for slot, last_token in self._sampling.sat_out(choice).items():
            self._mirror.set_back(slot, last_token)
        return choice

    def _goes_on(self, slots: NDArray[np.int64]) -> bool:
        """Whether one of a forward's slots was in the one before. A step without slots is no forward."""
        if slots is self._last_slots or not len(slots):
            return len(slots) > 0
        goes_on = bool(self._in_last[slots].any())
        self._in_last[self._last_slots] = False
        self._in_last[slots] = True
        self._last_slots = slots
        return goes_on

    def _slots_of(self, listed: Sequence[int]) -> NDArray[np.int64]:
        """Slots as an array, which is kept as long as the same ones decode."""
        if (found := tuple(listed)) != self._decoding:
            self._decoding, self._decode_slots = found, np.array(found, dtype=np.int64)
        return self._decode_slots

    def _stage_prebuilt(self, _batch: ScheduleBatch, changes: Words) -> _Forward:
        return _Forward(
            _NO_SLOTS, self._words.stage(changes, self._staging, self._forward, self._parts.kernels)
        )

    def _stage_decode(self, batch: ScheduleBatch, changes: Words) -> _Forward:
        write = self._words.stage(changes, self._staging, self._forward, self._parts.kernels)
        slots = self._slots_of(batch.decode_slots)
        kv_lens = self._mirror.lengthen(slots)
        work = self._graphs.stage(slots, kv_lens, self._mirror.pages_of(slots, kv_lens))
        of_slots = self._staging.device[: len(slots)]
        rows = self._sampling.stage(slots, kv_lens, of_slots, self._staging, may_sit_out=len(slots))
        return _Forward(slots, [*write, work], rows)

    def _stage_extend(self, batch: ScheduleBatch, changes: Words) -> _Forward:
        """Launch all runs of prompts but the last."""
        slots = np.array([row.slot for row in batch.extend], dtype=np.int64)
        self._mirror.pages_of(slots, self._mirror.kv_lens[slots])  # they are enough
        extend = self._extends.begin(batch.extend)
        forward = _Forward(
            slots,
            self._words.stage(changes, self._staging, self._forward, self._parts.kernels),
            extend=extend,
        )
        self._stage_last_run(forward, [row.samples for row in batch.extend])
        return forward

    def _stage_mixed(self, batch: ScheduleBatch, changes: Words) -> _Forward:
        """Launch the rows that decode, then all runs of prompts but the last."""
        batch.check_slots()
        slots = np.array([*batch.decode_slots, *(row.slot for row in batch.extend)], dtype=np.int64)
        decoding = len(batch.decode_slots)
        self._mirror.lengthen(slots[:decoding])
        kv_lens = self._mirror.kv_lens[slots]
        pages = self._mirror.pages_of(slots, kv_lens)
        write = self._words.stage(changes, self._staging, self._forward, self._parts.kernels)
        graph = self._graphs.stage(slots[:decoding], kv_lens[:decoding], pages[:decoding])
        began = self._forward.record()
        self._staging.upload()
        for work in (*write, graph):
            self._forward.run(work)
        self._staging.end(self._forward.record())
        forward = _Forward(slots, extend=self._extends.begin(batch.extend, decoding, began))
        self._staging.begin()
        samples = [*[True] * decoding, *(row.samples for row in batch.extend)]
        self._stage_last_run(forward, samples, may_sit_out=decoding)
        return forward

    def _stage_last_run(self, forward: _Forward, samples: Sequence[bool], *, may_sit_out: int = 0) -> None:
        """Stage the last run of prompts, and the choice for those of the step's slots that sample."""
        assert forward.extend is not None
        forward.work.append(self._extends.stage(forward.extend, forward.extend.last))
        slots = forward.slots[np.array(samples, dtype=bool)]
        if len(slots):
            _, of_slots = self._staging.put(slots.astype(np.int32))
            kv_lens = self._mirror.kv_lens[slots]
            forward.rows = self._sampling.stage(
                slots, kv_lens, of_slots, self._staging, may_sit_out=may_sit_out
            )

    def _warm_up(self) -> None:
        """Do once what no graph has done: libraries load kernels at first use, or find that they are missing.

        Waits for it: what fails here fails the start, and not the first request.
        """
        padding, logits = (
            np.array([len(self._parts.cache.store) - 1], dtype=np.int32),
            self._sampling.logits[:1],
        )
        self._staging.begin()
        extend = self._extends.stage_tokens(
            [[0]], np.ones(1, dtype=np.int64), [padding], np.zeros(1, dtype=np.int32), logits
        )
        _, of_slots = self._staging.put(np.array([self._slots], dtype=np.int32))
        self._staging.upload()
        self._forward.run(extend)
        self._forward.run(self._sum_first_logits)
        self._forward.run(partial(self._sampling.warm_up, of_slots))
        self._staging.end(self._forward.record())
        self._forward.synchronize()

    def _sum_first_logits(self) -> None:
        """A sum of numbers is one, and tells without a wait that all are."""
        torch.sum(self._sampling.logits[:1], (0, 1), dtype=torch.float32, out=self.sum_of_first_logits)

    # ---- results and copies --------------------------------------------------------------------------------------

    def _read(self, step: _Step) -> None:
        """Wait for what a step that is not open has chosen, and let masks know it."""
        assert step.ended is not None
        self._reach(step.ended)
        if step.choice is not None:
            self._sampling.read(step.choice)

    def _sampled(self, step: _Step, seconds: float) -> Sampled:
        """What a step that was read brings."""
        chosen = step.choice
        sampled = self._sampling.sampled(chosen, seconds) if chosen else Sampled([], seconds=seconds)
        return sampled if step.extend is None else replace(sampled, scored=self._extends.scored(step.extend))

    def _copy(self, copy_id: int, pages: Sequence[int], host_pages: Sequence[int], *, backup: bool) -> None:
        cache = self._parts.cache
        if max(pages) >= cache.pages or max(host_pages) >= cache.host_pages or min((*pages, *host_pages)) < 0:
            self._broken = self._broken or InvariantError(
                f"a copy of pages {list(pages)} and host pages {list(host_pages)}: there are {cache.pages} and "
                f"{cache.host_pages}"
            )
            return
        self._copy_stream.wait_for(self._last)
        if self._orders is not None:
            self._orders.copy(copy_id, pages, host_pages, backup=backup)
        self._copy_stream.run(
            partial(cache.backup, pages, host_pages) if backup else partial(cache.restore, host_pages, pages)
        )
        self._copies.append((copy_id, self._copy_stream.record()))

    def _reach(self, mark: Mark) -> None:
        try:
            mark.wait()
        except BaseException as error:
            self._broken = self._broken or error
            raise

    def _count_seconds(self, step: _Step) -> float:
        """Count what the step took, and return it."""
        assert step.ended is not None
        seconds = step.ended.seconds_since(step.began)
        counters = self.counters
        if step.mode is ForwardMode.DECODE:
            counters.decode_seconds += seconds
        elif step.mode is ForwardMode.EXTEND:
            counters.extend_seconds += seconds
        elif step.mode is ForwardMode.MIXED:
            counters.mixed_seconds += seconds
        else:
            counters.prebuilt_seconds += seconds
        if step.waited_since is not None:
            counters.idle_seconds += max(0.0, step.began.seconds_since(step.waited_since))
        return seconds


# What stages a step and leaves its work to be launched. Of MIXED, and of prompts that are scored, parts are launched.
_STAGES: dict[ForwardMode, Callable[[CudaDevice, ScheduleBatch, Words], _Forward]] = {
    ForwardMode.PREBUILT: CudaDevice._stage_prebuilt,
    ForwardMode.DECODE: CudaDevice._stage_decode,
    ForwardMode.EXTEND: CudaDevice._stage_extend,
    ForwardMode.MIXED: CudaDevice._stage_mixed,
}
