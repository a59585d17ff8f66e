"""How likely the chosen tokens were: of the raw logits, for the rows whose request asks.

The sampler overwrites logits, so the rows that are asked for are copied before. Each row is looked at by itself: its
values do not depend on the batch. The compiled kernel needs 0.1 ms for a vocabulary of 49,152, numpy 0.6 ms.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.batch.schedule_batch import ExtendRow, SlotJoin
from shared.engine.native.kernels import Kernels
from shared.wire.sampled import TOP_LOGPROBS_MAX, Sampled, TokenLogprobs, bounded_logprobs

Row = NDArray[np.float32]


class LogprobRows:
    """Which slots ask for logprobs, and the logprobs of a step."""

    def __init__(self, slots: int, kernels: Kernels | None) -> None:
        self._top = torch.full((slots,), -1)
        self._prompt_top = torch.zeros(slots, dtype=torch.int64)
        self._anybody = False  # has asked since the start
        self._kernels = kernels

    def join(self, join: SlotJoin) -> None:
        """Overwrite what the slot asked for."""
        self._top[join.slot] = join.params.logprobs
        self._prompt_top[join.slot] = max(0, join.params.prompt_logprobs)
        self._anybody |= join.params.logprobs >= 0

    def raw(self, logits: Tensor, slots: Tensor) -> dict[int, tuple[Row, int]]:
        """Copies of the rows that are asked for, before anything changes them: row → logits [vocab], how many.

        logits float32 [rows, vocab], slots int64 [rows].
        """
        if not self._anybody:
            return {}
        asked = [(row, top) for row, top in enumerate(self._top[slots].tolist()) if top >= 0]
        return {row: (logits[row].numpy().copy(), top) for row, top in asked}

    def chosen(self, raw: dict[int, tuple[Row, int]], token_ids: Sequence[int]) -> dict[int, TokenLogprobs]:
        """What is known of the tokens that were chosen in these rows."""
        return {row: self.of(logits, token_ids[row], top) for row, (logits, top) in raw.items()}

    def scored(self, logits: Tensor, rows: Sequence[ExtendRow]) -> dict[int, list[TokenLogprobs]]:
        """What is known of the `scores` of these rows, by the row's place; logits float32 [scores, vocab]."""
        found: dict[int, list[TokenLogprobs]] = {}
        each = iter(logits.numpy())
        for place, row in enumerate(rows):
            top = int(self._prompt_top[row.slot])
            if row.scores:
                found[place] = [self.of(next(each), token_id, top) for token_id in row.scores]
        return found

    def of(self, logits: Row, token_id: int, top: int) -> TokenLogprobs:
        """One token among all; logits float32 [vocab], contiguous."""
        if self._kernels is None:
            return logprobs_by_numpy(logits, token_id, top)
        logprob, rank = ctypes.c_double(), ctypes.c_int32()
        ids, logprobs = (ctypes.c_int32 * TOP_LOGPROBS_MAX)(), (ctypes.c_double * TOP_LOGPROBS_MAX)()
        count = self._kernels.logprobs(
            logits.ctypes.data,
            len(logits),
            token_id,
            top,
            ctypes.byref(logprob),
            ctypes.byref(rank),
            ids,
            logprobs,
        )
        return bounded_logprobs(logprob.value, rank.value, zip(ids[:count], logprobs[:count], strict=True))


def logprobs_by_numpy(logits: Row, token_id: int, top: int) -> TokenLogprobs:
    """Logprobs of one row by numpy, for engines without kernels."""
    wide = logits.astype(np.float64)
    most = wide.max()
    total = most + np.log(np.exp(wide - most).sum())
    rank = int((logits > logits[token_id]).sum()) + 1
    return bounded_logprobs(float(wide[token_id] - total), rank, _likeliest(logits, wide - total, top))


def _likeliest(logits: Row, logprobs: NDArray[np.float64], top: int) -> tuple[tuple[int, float], ...]:
    if not top:
        return ()
    least = np.partition(logits, -top)[-top] if top < len(logits) else -np.inf
    candidates = np.nonzero(logits >= least)[0]
    order = candidates[np.argsort(-logits[candidates], kind="stable")][:top]
    return tuple((int(token_id), float(logprobs[token_id])) for token_id in order)


# ---- EXTEND rows whose prompt is scored, cut so that few logits are held at a time -----------------------------------
# A row that is scored needs the logits of each of its tokens: of 2,048 tokens and a vocabulary of 49,152 they take 400
# MB. So a step with such rows is computed in runs, one after the other, in the order of the rows. A row's bits do not
# depend on how it is cut, nor on what is beside it.


SCORES_A_RUN = 64  # logits of 12 MB for a vocabulary of 49,152

Run = list[tuple[int, ExtendRow]]  # pieces of rows, each with its row's place in the step


def scored_runs(rows: Sequence[ExtendRow], most: int = SCORES_A_RUN) -> Iterator[Run]:
    """The rows in runs of at most `most` scored tokens; rows that are not scored stay whole."""
    run: Run = []
    room = most
    for place, whole in enumerate(rows):
        row = whole
        while len(row.scores) > room:
            if room:
                head, row = _cut(row, room)
                run.append((place, head))
            yield run
            run, room = [], most
        run.append((place, row))
        room -= len(row.scores)
    yield run


def _cut(row: ExtendRow, tokens: int) -> tuple[ExtendRow, ExtendRow]:
    """The first tokens of a row, which is scored, and the rest."""
    ids, scores = row.token_ids, row.scores
    return (
        ExtendRow(row.slot, ids[:tokens], row.start, samples=False, scores=scores[:tokens]),
        ExtendRow(row.slot, ids[tokens:], row.start + tokens, row.samples, scores[tokens:]),
    )


def joined_runs(runs: Sequence[tuple[Run, Sampled]]) -> Sampled:
    """What the runs of a step have sampled and scored, as if they had been one."""
    token_ids: list[int] = []
    logprobs: dict[int, TokenLogprobs] = {}
    failed: dict[int, str] = {}
    sat_out: set[int] = set()
    seconds: dict[int, float] = {}
    scored: dict[int, list[TokenLogprobs]] = {}
    for run, sampled in runs:
        known = len(token_ids)
        token_ids += sampled.token_ids
        logprobs |= {known + at: own for at, own in sampled.logprobs.items()}
        failed |= {known + at: why for at, why in sampled.failed.items()}
        sat_out |= {known + at for at in sampled.sat_out}
        seconds |= {known + at: spent for at, spent in sampled.mask_seconds.items()}
        for at, scores in sampled.scored.items():
            scored.setdefault(run[at][0], []).extend(scores)
    return Sampled(token_ids, logprobs, scored, failed, sat_out, seconds)
