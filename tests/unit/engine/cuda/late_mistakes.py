"""Mistakes that a stream which is late forgives nobody. Each is planted, and some seed must show it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from shared.batch.schedule_batch import ForwardMode
from shared.engine.cuda.kernels.step_kernels import STATE_WORDS, SlotWord
from shared.engine.sampling.sampler import Adjustment
from tests.simulation.mistakes.mutation import Instead, Mistakes, Mutation, gives, nothing
from tests.simulation.mistakes.roles import get, put


def _given_too_early(run: Any, sampling: Any, step: int, rows: Any) -> Any:
    choice = run(sampling, step, rows)
    get(sampling, "results that are free").append(choice.buffer)
    return choice


def _padding_on_page_7(
    made: Any, words: Any, slots: int, width: int, page_size: int, _page: int, device: Any
) -> None:
    made(words, slots, width, page_size, 7, device)


def _future_map_late() -> Instead:
    stale: dict[int, Any] = {}

    def prepare(
        real: Any, kernels: Any, slots: Any, indptr: Any, tables: Any, state: Any, *rest: Any
    ) -> None:
        before = stale.setdefault(state.data_ptr(), state.clone())
        newest = state[:, SlotWord.LAST_TOKEN].clone()
        state[:, SlotWord.LAST_TOKEN] = before[:, SlotWord.LAST_TOKEN]
        real(kernels, slots, indptr, tables, state, *rest)
        state[:, SlotWord.LAST_TOKEN] = newest
        before.copy_(state)

    return {"a kernel prepares a decode step": prepare}


def _plan_before(stage: Any, graphs: Any, slots: Any, kv_lens: Any, page_counts: Any) -> Any:
    planned = get(graphs, "the plan of a batch")
    if planned is not None and planned[0] >= len(slots) and len(planned[1]) // 4 > len(slots):
        starts = np.zeros(planned[0] + 1, dtype=np.int32)
        np.cumsum(page_counts, out=starts[1 : len(slots) + 1])
        starts[len(slots) + 1 :] = starts[len(slots)] + np.arange(1, planned[0] - len(slots) + 1)
        put(graphs, "the plan of a batch", (planned[0], starts.tobytes()))
    return stage(graphs, slots, kv_lens, page_counts)


def _padding_of_the_first(stage: Any, graphs: Any, *batch: Any) -> Any:
    put(graphs, "the slot of rows of padding", 0)
    return stage(graphs, *batch)


def _captured_pages(prepare: Any, kernels: Any, slots: Any, indptr: Any, *rest: Any) -> None:
    prepare(kernels, slots, torch.tensor(indptr.tolist(), dtype=torch.int32), *rest)


def _old_length(change: Any, mirror: Any, batch: Any) -> Any:
    pairs = change(mirror, batch)
    lengths = [join.slot * STATE_WORDS + SlotWord.KV_LEN for join in batch.joins]
    return pairs[~np.isin(pairs[:, 0], lengths)]


def _length_twice(change: Any, mirror: Any, batch: Any) -> Any:
    joined = [[join.slot * STATE_WORDS + SlotWord.KV_LEN, join.kv_len] for join in batch.joins]
    return np.concatenate((np.array(joined, dtype=np.int32).reshape(-1, 2), change(mirror, batch)))


def _joins_late() -> Instead:
    late: dict[int, list[Any]] = {}

    def stage(real: Any, words: Any, pairs: Any, *rest: Any) -> Any:
        before, late[id(words)] = late.get(id(words), []), [pairs]
        return real(words, np.concatenate([*before, np.empty((0, 2), dtype=np.int32)]), *rest)

    return {"words are staged": stage}


def _mask_takes_twice(read: Any, sampling: Any, choice: Any) -> None:
    again = bool(choice.token_ids)
    read(sampling, choice)
    if again:
        for row, mask in choice.rows.masks:
            mask.take(choice.token_ids[row])


def _masks_staged_over(upload: Any, sampling: Any, bits: Any) -> Any:
    """Only they: the other staging keeps its marks."""
    staging = get(sampling, "staging of masks")
    put(staging, "the use of a staging ends", nothing)
    for role in ("the ring of a staging", "the views of a staging"):
        get(staging, role)[1:] = get(staging, role)[:1] * 3
    return upload(sampling, bits)


def _logprobs_of_adjusted(choose: Any, sampling: Any, step: int, rows: Any, masked: Any) -> None:
    changes = dict(rows.adjusted.changes)
    for early in (Adjustment.PENALTIES, Adjustment.ADDENDS):
        if early in changes:
            changes.pop(early)(sampling.logits[: len(rows.slots)])
    choose(sampling, step, replace(rows, adjusted=replace(rows.adjusted, changes=changes)), masked)


def _sampled_before(stage: Any, extends: Any, step: Any, run: Any) -> Any:
    step.sampled = 0
    return stage(extends, step, run)


def _pages_of_the_neighbour(
    laid_out: Any, graphs: Any, size: int, token_ids: Any, query_lens: Any, kv_lens: Any, pages: Any, at: Any
) -> Any:
    return laid_out(graphs, size, token_ids, query_lens, kv_lens, [*pages[1:], pages[0]], at)


def _prompts_come_first(sampled: Any, device: Any, step: Any, seconds: float) -> Any:
    found = sampled(device, step, seconds)
    if step.mode is not ForwardMode.MIXED:
        return found
    decoding = step.rows.may_sit_out
    return replace(found, token_ids=[*found.token_ids[decoding:], *found.token_ids[:decoding]])


def _copies_done_at_once(_: Any, device: Any) -> list[int]:
    done = [copy_id for copy_id, _ in get(device, "copies under way")]
    get(device, "copies under way").clear()
    return done


def _told_although_sat_out(run: Any, sampling: Any, step: int, rows: Any) -> Any:
    masks = rows.masks
    choice = run(sampling, step, rows)
    for row in choice.masked.shares.sat_out:
        dict(masks)[row].unknown += 1
    rows.masks = masks
    return choice


def _launched(_: Any, device: Any) -> Any:
    return get(device, "steps that are launched")


MISTAKES: Mistakes = {
    "prompts of a mixed step come before the rows that decode": {
        "what a step has sampled": _prompts_come_first
    },
    "logits of prompts are written over those of the rows that decode": {
        "prompts of a step begin": lambda begin, extends, rows, _first=0, began=None: begin(
            extends, rows, 0, began
        )
    },
    "staging is filled again too early": {"the use of a staging ends": nothing},
    "a plan is written over the one before": {"a plan waits for the one before": nothing},
    "a result is given to the next step too early": {"tokens are chosen": _given_too_early},
    "a result is read before its step is over": {"the host waits for a step": nothing},
    "rows of padding write to a page of the pool": {"words of slots are made": _padding_on_page_7},
    "rows of padding are those of the first request": {
        "a batch is staged for its graph": _padding_of_the_first
    },
    "the future map is read a step late": _future_map_late,
    # rows stay, but a request has gone on to its next page
    "a step runs with the plan of the batch before": {"a batch is staged for its graph": _plan_before},
    "a plan of prompts is taken for that of the batch": {"the plan of a batch is forgotten": nothing},
    "a graph is replayed with the pages it was captured with": {
        "a kernel prepares a decode step": _captured_pages
    },
    "a graph of prompts is replayed with the step of its capture": {
        "a graph of prompts gets its step": nothing
    },
    "a graph of prompts takes the pages of the neighbour": {
        "a step of prompts is laid out for its graph": _pages_of_the_neighbour
    },
    "a request that joins keeps the length of the one before": {"a batch changes slots": _old_length},
    # on a GPU either may be the last; in torch the second is
    "a length is written twice by one kernel": {"a batch changes slots": _length_twice},
    "joins are written after the step": _joins_late,
    "a mask does not wait for the token before": {"the token before a mask is known": gives(True)},
    "a mask takes a token twice": {"a choice is read": _mask_takes_twice},
    "masks are staged over those of the step before": {"masks are uploaded": _masks_staged_over},
    "logprobs are those of adjusted logits": {"a choice is computed": _logprobs_of_adjusted},
    "scores are reported of the neighbour run": {
        "tokens of a run are on the device": lambda on_device, told, count, _first=0: on_device(
            told, count, 0
        )
    },
    "rows of a run sample where the run before did": {"a run of prompt is staged": _sampled_before},
    "a backup reads pages before they are written": {
        "a stream waits for another": nothing,
        "steps that are over": _launched,
    },
    "a copy is called done before it is": {"copies that are over": _copies_done_at_once},
    # a lease would be given before its pages are written
    "a step is called done when it is launched": {"steps that are over": _launched},
    "penalties forget what a step chose": {
        "adjustments are staged": lambda stage, *arguments: replace(stage(*arguments), after=())
    },
    "a row is adjusted for its neighbour": {
        "adjustments are staged": lambda stage, adjustments, slots, kv_lens, staging: stage(
            adjustments, slots[::-1].copy(), kv_lens[::-1].copy(), staging
        )
    },
    "a page is restored from the wrong place": {
        "pages are restored": lambda restore, cache, host, pages: restore(cache, host[::-1], pages)
    },
    "a row that sits out keeps its place on the host": {"rows that sat out go back on the host": nothing},
    "a row that sits out keeps its place on the device": {
        "rows that sat out go back on the device": gives(np.empty((0, 2), dtype=np.int32))
    },
    "a row that sits out tells its mask of a token": {"tokens are chosen": _told_although_sat_out},
}


def seeds_until_caught(name: str, run: Callable[[int], None], most: int) -> int | None:
    """The first seed that shows the mistake; None: none does."""
    with Mutation("engine", MISTAKES[name]).made():
        for seed in range(most):
            try:
                run(seed)
            except Exception:  # wrong tokens, an invariant, an index: whatever shows it
                return seed
    return None
