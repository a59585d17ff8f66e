"""EXTEND rows whose prompt is scored, cut so that few logits are held at a time.

A row that is scored needs the logits of each of its tokens: of 2,048 tokens and a vocabulary of 49,152 they take
400 MB. So a step with such rows is computed in runs, one after the other, in the order of the rows. A row's bits do not
depend on how it is cut, nor on what is beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shared.batch.schedule_batch import ExtendRow
from shared.wire.sampled import Sampled, TokenLogprobs

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
