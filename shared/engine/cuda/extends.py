"""EXTEND on its device: FlashInfer's arrays, a plan, the layers, and the logprobs of prompts that are scored.

A step that scores is computed in runs (`scored_runs`), each staged, uploaded and launched before the next one is
staged: all plans share one workspace, and few logits are held at a time. The last run is left to the device, which
launches it like a step without scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from shared.batch.schedule_batch import ExtendRow, SlotJoin
from shared.engine.attention.protocol import PlannedAttention
from shared.engine.cuda.eager_extends import EagerExtends, ExtendSizes
from shared.engine.cuda.engine_parts import Capacity, EngineParts
from shared.engine.cuda.extend_graphs import ExtendGraphs
from shared.engine.cuda.graphs import DecodeGraphs
from shared.engine.cuda.kernels.step_kernels import ReportBuffers, read_reports
from shared.engine.cuda.slots import SlotMirror
from shared.engine.cuda.staging import Staging, place_of
from shared.engine.parallel.orders import Operation
from shared.engine.sampling.logprobs import Run, scored_runs
from shared.engine.streams import Mark, Work
from shared.wire.sampled import TokenLogprobs

Words = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class _ScoredTokens:
    """The tokens of a run that are scored, on the device."""

    each: Tensor  # int32 [n]: their rows of logits, the first ones
    token_ids: Tensor
    tops: Tensor
    reports: Tensor  # int32 [n, REPORT_WORDS], out


class ExtendStep:
    """One EXTEND step on its way: how far its runs have come."""

    def __init__(self, runs: Sequence[Run], first: int, began: Mark | None) -> None:
        self.runs = runs
        self.places: list[int] = []  # of the rows of scored tokens, in their order
        self.tops: list[int] = []
        self.sampled = first  # rows of logits that are taken
        self.reports: Tensor | None = None  # a buffer of the host
        self.began = began  # before all of the step that is launched before the last run, if there is any

    @property
    def last(self) -> Run:
        """The run that is launched last."""
        return self.runs[-1]


class Extends:
    """For one device. A plan of an eager step may overwrite that of a DECODE step, which is told before."""

    def __init__(
        self,
        staging: Staging,
        mirror: SlotMirror,
        parts: EngineParts,
        capacity: Capacity,
        logits: Tensor,  # float32 [slots, vocab], out: of the rows that sample
        decode: DecodeGraphs,
    ) -> None:
        self._stream = parts.forward
        self._staging = staging
        self._mirror = mirror
        self._model = parts.model
        self._kernels = parts.kernels
        self._logits = logits
        self._scores_a_run = capacity.scores_a_run
        self._eager = EagerExtends(parts, staging, decode)
        self._graphs = ExtendGraphs(parts, staging, capacity, decode.counters)
        self._reports = ReportBuffers(parts.forward, capacity.extend_tokens, logits.device)
        self._tops = np.zeros(len(logits), dtype=np.int32)

    def join(self, join: SlotJoin) -> None:
        """Overwrite what the slot asks to be reported of its prompt."""
        self._tops[join.slot] = max(0, join.params.prompt_logprobs)

    def begin(self, rows: Sequence[ExtendRow], first: int = 0, began: Mark | None = None) -> ExtendStep:
        """Launch all runs but the last. The mirror has taken over the step, and its slots have enough pages.

        `first`: rows of logits of the same step that the DECODE launched before has taken; `began`: the mark before it.
        """
        scores = any(row.scores for row in rows)
        runs = list(scored_runs(rows, self._scores_a_run)) if scores else [list(enumerate(rows))]
        step = ExtendStep(runs, first, began)
        for run in step.runs[:-1]:
            self._staging.begin()
            work = self.stage(step, run)
            step.began = step.began or self._stream.record()
            self._staging.upload()
            self._stream.run(work)
            self._staging.end(self._stream.record())
        return step

    def stage(self, step: ExtendStep, run: Run) -> Work:
        """Stage a run; returns what computes it once staging is uploaded."""
        rows, page_size = [row for _, row in run], self._mirror.page_size
        ends = np.cumsum([len(row.token_ids) for row in rows])
        kv_lens = np.array([row.start + len(row.token_ids) for row in rows], dtype=np.int64)
        pages = [
            self._mirror.tables[row.slot, : -(-int(kv_len) // page_size)]
            for row, kv_len in zip(rows, kv_lens, strict=True)
        ]
        samples = np.array([row.samples for row in rows], dtype=bool)
        scored = self._stage_scores(step, run)
        places = [
            int(end) - len(row.token_ids) + at
            for end, row in zip(ends, rows, strict=True)
            for at in range(len(row.scores))
        ]
        at = np.array([*places, *(ends[samples] - 1)], dtype=np.int32)
        first, step.sampled = step.sampled, step.sampled + int(samples.sum())
        logits = self._logits[first : step.sampled]
        token_ids = [row.token_ids for row in rows]
        if scored is None:
            for each in token_ids:
                self._mirror.check_token_ids(each)
            if (work := self._graphs.stage(token_ids, kv_lens, pages, at, logits)) is not None:
                return work
        return self.stage_tokens(token_ids, kv_lens, pages, at, logits, scored)

    def stage_tokens(
        self,
        token_ids: Sequence[Sequence[int]],
        kv_lens: NDArray[np.int64],
        pages: Sequence[Words],
        at: Words,
        logits: Tensor,
        scored: _ScoredTokens | None = None,
    ) -> Work:
        """Stage and plan eagerly requests [n] of these tokens, lengths and pages; `at`: the tokens that need logits."""
        query_lens = np.array([len(each) for each in token_ids], dtype=np.int64)
        rows = np.fromiter((token for each in token_ids for token in each), dtype=np.int32)
        self._mirror.check_token_ids(rows)
        qo_indptr = _starts(query_lens)
        page_size = self._mirror.page_size
        # One behind the other, in the order of `EagerExtends`.
        arrays: list[NDArray[np.signedinteger]] = [
            qo_indptr,
            _starts(np.array([len(each) for each in pages], dtype=np.int64)),
            np.concatenate(pages),
            (kv_lens - 1) % page_size + 1,
            np.repeat(np.arange(len(token_ids)), query_lens),
            np.arange(len(rows)) - np.repeat(qo_indptr[1:] - kv_lens, query_lens),
            rows,
            at,
        ]
        _, staged = self._staging.put(np.concatenate(arrays).astype(np.int32))
        sizes = ExtendSizes(len(token_ids), len(arrays[2]), len(rows), len(at))
        first = place_of(logits) // logits.shape[1] if scored is None else -1
        self._staging.note(Operation.EXTEND, staged, *astuple(sizes), first)
        ids, attention, needed = self._eager.planned(place_of(staged), sizes)
        return partial(self._compute, ids, attention, needed, logits, scored)

    def download(self, step: ExtendStep) -> None:
        """Bring reports to a buffer of the host, behind the last run."""
        if step.places:
            step.reports = self._reports.download(len(step.places))

    def scored(self, step: ExtendStep) -> dict[int, list[TokenLogprobs]]:
        """The reports, by the row's place in the step; its buffer serves another step from now on."""
        scored: dict[int, list[TokenLogprobs]] = {}
        if step.reports is not None:
            reports = read_reports(step.reports, step.tops, self._logits.shape[1])
            for place, one in zip(step.places, reports, strict=True):
                scored.setdefault(place, []).append(one)
            self._reports.give_back(step.reports)
        return scored

    def _stage_scores(self, step: ExtendStep, run: Run) -> _ScoredTokens | None:
        token_ids = [token_id for _, row in run for token_id in row.scores]
        if not token_ids:
            return None
        self._mirror.check_token_ids(token_ids)
        tops = [int(self._tops[row.slot]) for _, row in run for _ in row.scores]
        first = len(step.places)
        step.places += [place for place, row in run for _ in row.scores]
        step.tops += tops
        columns = (range(len(token_ids)), token_ids, tops)
        each, ids, top = (self._staging.put(np.array(column, dtype=np.int32))[1] for column in columns)
        return _ScoredTokens(each, ids, top, self._reports.on_device(len(token_ids), first))

    def _compute(
        self,
        token_ids: Tensor,
        attention: PlannedAttention,
        at: Tensor,
        sampled: Tensor,
        scored: _ScoredTokens | None,
    ) -> None:
        """The device's part. `sampled` float32 [rows that sample, vocab], out: their logits, behind the scored ones."""
        if scored is None:
            self._model.run(token_ids, attention, at, sampled)
            return
        logits = self._model.run(token_ids, attention, at, None)
        count = len(scored.token_ids)
        self._kernels.logprobs(logits[:count], scored.each, scored.token_ids, scored.tops, scored.reports)
        sampled.copy_(logits[count:])


def _starts(lens: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(lens)))
