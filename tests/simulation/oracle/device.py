"""The fake device: paged memory that computes the oracle's model, as adversarially as the protocol allows.

    step   launch ───────────────────── completion: read the pages, write cells, sample
    copy   start ── page ─── page ─ page ─ done     each page moves at a time of its own, beside the steps

Of several ranks each copies its slices at times of its own; the copy is done when the last one is.

The rows of a MIXED step are executed in a drawn order: none may depend on another one.

All effects of a step happen at its completion, not at its launch: a page that is given to somebody else in
between is read or overwritten, and the oracle shows it. A position without a page goes to the invalid page,
which everybody scribbles on. Nothing here raises for a wrong page; only what no device could execute does.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from shared.batch.schedule_batch import ExtendRow, ForwardMode, ScheduleBatch, SlotJoin
from shared.engine.sampling.masks import Constraints, MaskShares, TokenMasks
from shared.wire.sampled import Sampled, TokenLogprobs
from shared.wire.sampling_params import SamplingParams
from tests.simulation.oracle.model import VOCAB_SIZE, kv_cell, logprobs_of, sample
from tests.simulation.world.timeline import Action, TimelineProcess

ALL_SLICES = range(4)  # of a page
UNREAD = VOCAB_SIZE - 1  # the token of a row that has none


class Pages:
    """Memory for `total` pages of cells; a cell that was never written holds garbage found nowhere else.

    A page has `SLICES` slices, which ranks have between them. A step writes all of them; reads of several ranks bring
    them one by one, and a cell is garbage while its slices are not of one cell.
    """

    def __init__(self, total: int, page_size: int, salt: int):
        self.cells = [[hash((salt, page, i)) for i in range(page_size)] for page in range(total)]
        self._slices: dict[
            int, tuple[list[int], list[list[int]]]
        ] = {}  # by page: its cells then, and all slices

    def copy(self, page: int, source: Pages, source_page: int, slices: range = ALL_SLICES) -> None:
        """Overwrite a page, or slices of it, with those of a page of `source`, as it is now."""
        cells = self.cells[page]
        if slices == ALL_SLICES:
            cells[:] = source.cells[source_page]
            return
        known, rows = self._slices.get(page, ([], []))
        if known != cells:  # written since, in all slices
            rows = [list(cells) for _ in ALL_SLICES]
        for number in slices:
            rows[number][:] = source.cells[source_page]
        cells[:] = [each[0] if len(set(each)) == 1 else hash(each) for each in zip(*rows, strict=True)]
        self._slices[page] = (list(cells), rows)


@dataclass(slots=True)
class Slot:
    """What the device keeps of a request between steps."""

    pages: list[int]
    kv_len: int
    params: SamplingParams
    prompt_len: int
    history: list[int]
    last_token: int | None
    told: TokenLogprobs | None = None  # of the last token, if the request asks


@dataclass(slots=True)
class Step:
    """A launched step; inputs are copied at the launch, as a real device does."""

    batch: ScheduleBatch
    extend: tuple[ExtendRow, ...]
    decode_slots: tuple[int, ...]
    completes_at: float
    seconds: float
    sampled: Sampled | None = None  # once completed


@dataclass(frozen=True, slots=True)
class _Row:
    """A row that samples: its slot, and the cells of all its tokens."""

    slot: int
    cells: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """How long a worker's device takes, in seconds."""

    step: float = 0.010
    token: float = 0.0002  # an EXTEND token on top
    jitter: float = 0.5  # as a share, both ways
    copied_page: float = 0.004

    def slowed(self, factor: float) -> Speed:
        """A device that takes `factor` times as long."""
        return replace(self, step=factor * self.step, token=factor * self.token)


@dataclass(slots=True, kw_only=True)
class OracleDevice:
    """The `Device` of one worker process."""

    process: TimelineProcess
    pages: Pages
    host_pages: Pages
    speed: Speed
    rng: random.Random
    on_copied: Action  # wakes the worker
    constraints: Constraints = field(default_factory=lambda: Constraints(None, VOCAB_SIZE))
    token_masks: TokenMasks = field(default_factory=TokenMasks)
    ranks: int = 1
    followers: random.Random = field(default_factory=lambda: random.Random(0))  # how late further ranks copy
    launched: int = 0
    settled: int = 0
    _completed: int = 0
    _busy_until: float = 0.0
    _copying_until: list[float] = field(default_factory=lambda: [0.0 for _ in ALL_SLICES])  # by rank
    _copying: dict[int, set[int]] = field(default_factory=dict)  # by copy: the ranks that are not done
    _slots: dict[int, Slot] = field(default_factory=dict)
    _steps: deque[Step] = field(default_factory=deque)  # launched, not yet waited for
    _copied: list[int] = field(default_factory=list)

    @property
    def page_size(self) -> int:
        return len(self.pages.cells[0])

    def launch(self, batch: ScheduleBatch) -> None:
        if batch.step != self.launched + 1:
            raise AssertionError(f"step {batch.step} launched after {self.launched}")
        self.launched = batch.step
        extend = tuple(
            ExtendRow(r.slot, tuple(r.token_ids), r.start, r.samples, tuple(r.scores)) for r in batch.extend
        )
        seconds = self.seconds_of(batch)
        self._busy_until = max(self._busy_until, self.process.now) + seconds
        step = Step(batch, extend, tuple(batch.decode_slots), self._busy_until, seconds)
        self._steps.append(step)
        self.process.at(step.completes_at, lambda: self._complete(step.batch.step))

    def seconds_of(self, batch: ScheduleBatch) -> float:
        """How long a step takes that is launched now."""
        seconds = 0.0001 if batch.mode is ForwardMode.PREBUILT else self.speed.step
        seconds += self.speed.token * sum(len(row.token_ids) for row in batch.extend)
        return seconds * (1 + self.speed.jitter * self.rng.uniform(-1, 1))

    def completes_at(self, step: int) -> float:
        """When a step that was not waited for yet completes (seconds), if the process is not frozen."""
        return next(each.completes_at for each in self._steps if each.batch.step == step)

    def wait(self, step: int) -> Sampled:
        oldest = self._steps[0]
        if oldest.batch.step != step:
            raise AssertionError(f"waits for step {step} before {oldest.batch.step}")
        self.process.block(oldest.completes_at)
        self._complete(step)
        self._steps.popleft()
        self.settled = step
        assert oldest.sampled is not None
        return oldest.sampled

    def completed(self) -> int:
        return self._completed

    def start_backup(self, copy_id: int, pages: Sequence[int], host_pages: Sequence[int]) -> None:
        self._start_copy(copy_id, self.pages, tuple(pages), self.host_pages, tuple(host_pages))

    def start_restore(self, copy_id: int, host_pages: Sequence[int], pages: Sequence[int]) -> None:
        self._start_copy(copy_id, self.host_pages, tuple(host_pages), self.pages, tuple(pages))

    def copies_done(self) -> list[int]:
        done, self._copied = self._copied, []
        return done

    def _start_copy(
        self, copy_id: int, source: Pages, sources: tuple[int, ...], target: Pages, targets: tuple[int, ...]
    ) -> None:
        self._copying[copy_id] = set(range(self.ranks))
        count = len(ALL_SLICES)
        for rank in range(self.ranks):
            rng = self.followers if rank else self.rng
            slices = ALL_SLICES[rank * count // self.ranks : (rank + 1) * count // self.ranks]
            begin = max(self._copying_until[rank], self.process.now)
            pace = self.followers.uniform(0.5, 4) if rank else 1.0
            end = begin + pace * self.speed.copied_page * (1 + len(sources))
            self._copying_until[rank] = end
            for pages in zip(targets, sources, strict=True):
                copy = partial(target.copy, pages[0], source, pages[1], slices)
                self.process.at(rng.uniform(begin, end), copy)
            self.process.at(end, partial(self._end_copy, copy_id, rank))

    def _end_copy(self, copy_id: int, rank: int) -> None:
        copying = self._copying.get(copy_id, set())
        copying.discard(rank)
        if copy_id in self._copying and self._is_copied(copying):
            del self._copying[copy_id]
            self._copied.append(copy_id)
            self.on_copied()

    def _is_copied(self, copying: set[int]) -> bool:
        """Whether a copy is done that these ranks have yet to do."""
        return not copying

    def _complete(self, number: int) -> None:
        """Carry out all steps up to `number` that are not carried out yet."""
        for step in self._steps:
            if self._completed < step.batch.step <= number:
                self._completed = step.batch.step
                step.sampled = self._execute(step)

    def _execute(self, step: Step) -> Sampled:
        for join in step.batch.joins:
            self._slots[join.slot] = _joined(join)
            self.constraints.join(join)
            self.token_masks.join(join)
        for grant in step.batch.grants:
            self._slots[grant.slot].pages.extend(grant.pages)
        scored: dict[int, list[TokenLogprobs]] = {}
        work: list[Callable[[], _Row | None]] = [partial(self._decode, slot) for slot in step.decode_slots]
        work += [partial(self._extend, row, scored.setdefault(at, [])) for at, row in enumerate(step.extend)]
        order = list(range(len(work)))
        if step.batch.mode is ForwardMode.MIXED:
            slots = [*step.decode_slots, *(row.slot for row in step.extend)]
            assert len(set(slots)) == len(slots), f"step {step.batch.step} has two rows of a slot: {slots}"
            self.rng.shuffle(order)
        rows = {at: work[at]() for at in order}
        sampling = [row for at in range(len(work)) if (row := rows[at]) is not None]
        masks, allowed = self._masks([row.slot for row in sampling], may_sit_out=len(step.decode_slots))
        sampled, failed = list[int](), dict[int, str]()
        for at, row in enumerate(sampling):
            if at in masks.sat_out:
                self._slots[row.slot].kv_len -= 1
                sampled.append(UNREAD)
            elif isinstance(why := allowed.get(at, frozenset()), str):
                self._slots[row.slot].last_token = 0
                failed[at] = why
                sampled.append(UNREAD)
            else:
                sampled.append(self._sample(row, why))
        told = {
            at: slot.told
            for at, slot in enumerate(self._slots[row.slot] for row in sampling)
            if slot.told is not None and at not in masks.sat_out
        }
        scores = {at: told for at, told in scored.items() if told}
        return Sampled(sampled, told, scores, failed, masks.sat_out, masks.seconds, step.seconds)

    def _extend(self, row: ExtendRow, told: list[TokenLogprobs]) -> _Row | None:
        slot = self._slots[row.slot]
        cells = self._read(slot, row.start)
        for at, token_id in enumerate(row.token_ids):
            self._append(slot, cells, token_id)
            if at < len(row.scores):
                told.append(logprobs_of(cells, row.scores[at], slot.params.prompt_logprobs))
        slot.kv_len = len(cells)
        return _Row(row.slot, cells) if row.samples else None

    def _decode(self, number: int) -> _Row:
        slot = self._slots[number]
        cells = self._read(slot, slot.kv_len)
        assert slot.last_token is not None, "a slot without a token to go on from"
        self._append(slot, cells, slot.last_token)
        slot.kv_len = len(cells)
        return _Row(number, cells)

    def _masks(
        self, slots: list[int], *, may_sit_out: int
    ) -> tuple[MaskShares, dict[int, frozenset[int] | str]]:
        """Which rows have no time for their masks; and the tokens that others may choose, or why there are none."""
        allowed: dict[int, frozenset[int] | str] = {}

        def mask(row: int, seconds: float) -> bool:
            logits = np.zeros(VOCAB_SIZE, np.float32)
            self.token_masks.mask(slots[row], logits)
            has_grammar = slots[row] in self.constraints
            why = self.constraints.mask(slots[row], logits, None, seconds) if has_grammar else ""
            if why is not None:
                allowed[row] = why or frozenset(np.flatnonzero(logits == 0).tolist())
            return why is not None

        for row, slot in enumerate(slots):
            if slot in self.token_masks and slot not in self.constraints:
                mask(row, math.inf)
        shares = self.constraints.share(slots, mask, may_sit_out=may_sit_out)
        self._busy_until += sum(shares.seconds.values())
        return shares, allowed

    def _sample(self, row: _Row, allowed: frozenset[int]) -> int:
        """The slot's next token, of those that are `allowed`; empty: all."""
        slot = self._slots[row.slot]
        slot.last_token = sample(row.cells, slot.params, slot.prompt_len, slot.history, allowed)
        slot.history.append(slot.last_token)
        most = slot.params.logprobs
        slot.told = logprobs_of(row.cells, slot.last_token, most) if most >= 0 else None
        self.constraints.take([row.slot], [slot.last_token])
        self.token_masks.take([row.slot], [slot.last_token])
        return slot.last_token

    def _read(self, slot: Slot, count: int) -> list[int]:
        """The cells of the slot's first `count` positions."""
        cells: list[int] = []
        for page in slot.pages[: -(-count // self.page_size)]:
            cells += self.pages.cells[page]
        del cells[count:]
        while len(cells) < count:
            cells.append(self.rng.getrandbits(60))  # the invalid page: everybody scribbles on it
        return cells

    def _append(self, slot: Slot, cells: list[int], token_id: int) -> None:
        page, offset = divmod(len(cells), self.page_size)
        cells.append(kv_cell(cells, token_id))
        if page < len(slot.pages):
            self.pages.cells[slot.pages[page]][offset] = cells[-1]


def _joined(join: SlotJoin) -> Slot:
    history = list(join.token_ids) if join.params.penalized else []
    return Slot(list(join.pages), join.kv_len, join.params, join.prompt_len, history, join.last_token)
