"""Mistakes that a stream which is late forgives nobody. Each is planted, and some seed must show it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shared.batch.schedule_batch import ScheduleBatch
from shared.engine.attention.plan_guard import PlanGuard
from shared.engine.checkpoint.kv_cache import KVCache
from shared.engine.cuda.adjustments import Adjustments
from shared.engine.cuda.device import CudaDevice
from shared.engine.cuda.extends import Extends, ExtendStep
from shared.engine.cuda.graphs import DecodeGraphs
from shared.engine.cuda.sampling import Sampling, StagedRows, TokenChoice
from shared.engine.cuda.slots import DeviceWords, SlotMirror
from shared.engine.cuda.staging import Staging
from shared.engine.cuda.step_kernels import STATE_WORDS, ReferenceKernels, ReportBuffers, SlotWord
from shared.engine.sampling.adjustments import Adjustment
from tests.doubles.late_stream import LateStream

Plant = Callable[[pytest.MonkeyPatch], None]
MISTAKES: dict[str, Plant] = {}


def _nothing(*_: object) -> None:
    return None


def _mistake(plant: Plant) -> Plant:
    MISTAKES[plant.__name__] = plant
    return plant


@_mistake
def staging_is_filled_again_too_early(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Staging, "end", _nothing)


@_mistake
def a_plan_is_written_over_the_one_before(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PlanGuard, "__enter__", _nothing)


@_mistake
def a_result_is_given_to_the_next_step_too_early(patch: pytest.MonkeyPatch) -> None:
    real = Sampling.run

    def run(self: Sampling, step: int, rows: StagedRows) -> TokenChoice:
        choice = real(self, step, rows)
        self._free.append(choice.tokens)
        return choice

    patch.setattr(Sampling, "run", run)


@_mistake
def a_result_is_read_before_its_step_is_over(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CudaDevice, "_reach", _nothing)


@_mistake
def rows_of_padding_write_to_a_page_of_the_pool(patch: pytest.MonkeyPatch) -> None:
    real = DeviceWords.__init__

    def init(
        self: DeviceWords, slots: int, width: int, page_size: int, _padding_page: int, device: Any
    ) -> None:
        real(self, slots, width, page_size, 7, device)

    patch.setattr(DeviceWords, "__init__", init)


@_mistake
def rows_of_padding_are_those_of_the_first_request(patch: pytest.MonkeyPatch) -> None:
    real = np.full
    patch.setattr(
        "shared.engine.cuda.graphs.np.full", lambda shape, _slot, dtype: real(shape, 0, dtype=dtype)
    )


@_mistake
def the_future_map_is_read_a_step_late(patch: pytest.MonkeyPatch) -> None:
    real = ReferenceKernels.prepare_decode
    stale: dict[int, Tensor] = {}

    def prepare(
        self: ReferenceKernels, slots: Tensor, indptr: Tensor, tables: Tensor, state: Tensor, *rest: Any
    ) -> None:
        before = stale.setdefault(state.data_ptr(), state.clone())
        newest = state[:, SlotWord.LAST_TOKEN].clone()
        state[:, SlotWord.LAST_TOKEN] = before[:, SlotWord.LAST_TOKEN]
        real(self, slots, indptr, tables, state, *rest)
        state[:, SlotWord.LAST_TOKEN] = newest
        before.copy_(state)

    patch.setattr(ReferenceKernels, "prepare_decode", prepare)


@_mistake
def a_step_runs_with_the_plan_of_the_batch_before(patch: pytest.MonkeyPatch) -> None:
    """Rows stay, but a request has gone on to its next page."""
    real = DecodeGraphs.stage

    def stage(self: DecodeGraphs, slots: Any, kv_lens: Any, page_counts: Any) -> Any:
        planned = self._planned
        if planned is not None and planned[0] >= len(slots) and len(planned[1]) // 4 > len(slots):
            starts = np.zeros(planned[0] + 1, dtype=np.int32)
            np.cumsum(page_counts, out=starts[1 : len(slots) + 1])
            starts[len(slots) + 1 :] = starts[len(slots)] + np.arange(1, planned[0] - len(slots) + 1)
            self._planned = (planned[0], starts.tobytes())
        return real(self, slots, kv_lens, page_counts)

    patch.setattr(DecodeGraphs, "stage", stage)


@_mistake
def a_plan_of_prompts_is_taken_for_that_of_the_batch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DecodeGraphs, "forget_plan", _nothing)


@_mistake
def a_graph_is_replayed_with_the_pages_it_was_captured_with(patch: pytest.MonkeyPatch) -> None:
    real = ReferenceKernels.prepare_decode

    def prepare(self: ReferenceKernels, slots: Tensor, indptr: Tensor, *rest: Any) -> None:
        real(self, slots, torch.tensor(indptr.tolist(), dtype=torch.int32), *rest)

    patch.setattr(ReferenceKernels, "prepare_decode", prepare)


@_mistake
def a_request_that_joins_keeps_the_length_of_the_one_before(patch: pytest.MonkeyPatch) -> None:
    real = SlotMirror.change

    def change(self: SlotMirror, batch: ScheduleBatch) -> Any:
        pairs = real(self, batch)
        lengths = [join.slot * STATE_WORDS + SlotWord.KV_LEN for join in batch.joins]
        return pairs[~np.isin(pairs[:, 0], lengths)]

    patch.setattr(SlotMirror, "change", change)


@_mistake
def a_length_is_written_twice_by_one_kernel(patch: pytest.MonkeyPatch) -> None:
    """On a GPU either may be the last; in torch the second is."""
    real = SlotMirror.change

    def change(self: SlotMirror, batch: ScheduleBatch) -> Any:
        joined = [[join.slot * STATE_WORDS + SlotWord.KV_LEN, join.kv_len] for join in batch.joins]
        before = np.array(joined, dtype=np.int32).reshape(-1, 2)
        return np.concatenate((before, real(self, batch)))

    patch.setattr(SlotMirror, "change", change)


@_mistake
def joins_are_written_after_the_step(patch: pytest.MonkeyPatch) -> None:
    real = DeviceWords.stage
    late: dict[int, list[Any]] = {}

    def stage(self: DeviceWords, pairs: Any, *rest: Any) -> Any:
        before, late[id(self)] = late.get(id(self), []), [pairs]
        return real(self, np.concatenate([*before, np.empty((0, 2), dtype=np.int32)]), *rest)

    patch.setattr(DeviceWords, "stage", stage)


@_mistake
def a_mask_does_not_wait_for_the_token_before(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StagedRows, "is_known", True)


@_mistake
def a_mask_takes_a_token_twice(patch: pytest.MonkeyPatch) -> None:
    real = Sampling.read

    def read(self: Sampling, choice: TokenChoice) -> None:
        again = bool(choice.token_ids)
        real(self, choice)
        if again:
            for row, mask in choice.rows.masks:
                mask.take(choice.token_ids[row])

    patch.setattr(Sampling, "read", read)


@_mistake
def masks_are_staged_over_those_of_the_step_before(patch: pytest.MonkeyPatch) -> None:
    """Only they: the other staging keeps its marks."""
    real = Sampling._upload

    def upload(self: Sampling, bits: Any) -> Any:
        patch.setattr(self._mask_staging, "end", _nothing)
        self._mask_staging._ring[1:] = self._mask_staging._ring[:1] * 3
        self._mask_staging._views[1:] = self._mask_staging._views[:1] * 3
        return real(self, bits)

    patch.setattr(Sampling, "_upload", upload)


@_mistake
def logprobs_are_those_of_adjusted_logits(patch: pytest.MonkeyPatch) -> None:
    real = Sampling._choose

    def choose(self: Sampling, step: int, rows: StagedRows, masked: Any) -> None:
        changes = dict(rows.adjusted.changes)
        for early in (Adjustment.PENALTIES, Adjustment.ADDENDS):
            if early in changes:
                changes.pop(early)(self.logits[: len(rows.slots)])
        adjusted = replace(rows.adjusted, changes=changes)
        real(self, step, replace(rows, adjusted=adjusted), masked)

    patch.setattr(Sampling, "_choose", choose)


@_mistake
def scores_are_reported_of_the_neighbour_run(patch: pytest.MonkeyPatch) -> None:
    real = ReportBuffers.on_device
    patch.setattr(ReportBuffers, "on_device", lambda self, count, _first=0: real(self, count, 0))


@_mistake
def rows_of_a_run_sample_where_the_run_before_did(patch: pytest.MonkeyPatch) -> None:
    real = Extends.stage

    def stage(self: Extends, step: ExtendStep, run: Any) -> Any:
        step.sampled = 0
        return real(self, step, run)

    patch.setattr(Extends, "stage", stage)


@_mistake
def a_backup_reads_pages_before_they_are_written(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LateStream, "wait_for", _nothing)
    patch.setattr(CudaDevice, "completed", lambda self: self._launched)


@_mistake
def a_copy_is_called_done_before_it_is(patch: pytest.MonkeyPatch) -> None:
    def copies_done(self: CudaDevice) -> list[int]:
        done = [copy_id for copy_id, _ in self._copies]
        self._copies.clear()
        return done

    patch.setattr(CudaDevice, "copies_done", copies_done)


@_mistake
def a_step_is_called_done_when_it_is_launched(patch: pytest.MonkeyPatch) -> None:
    """A lease would be given before its pages are written."""
    patch.setattr(CudaDevice, "completed", lambda self: self._launched)


@_mistake
def penalties_forget_what_a_step_chose(patch: pytest.MonkeyPatch) -> None:
    real = Adjustments.stage
    patch.setattr(Adjustments, "stage", lambda self, *rest: replace(real(self, *rest), after=()))


@_mistake
def a_row_is_adjusted_for_its_neighbour(patch: pytest.MonkeyPatch) -> None:
    real = Adjustments.stage
    patch.setattr(
        Adjustments,
        "stage",
        lambda self, slots, kv_lens, staging: real(self, slots[::-1].copy(), kv_lens[::-1].copy(), staging),
    )


@_mistake
def a_page_is_restored_from_the_wrong_place(patch: pytest.MonkeyPatch) -> None:
    real = KVCache.restore
    patch.setattr(KVCache, "restore", lambda self, host, pages: real(self, host[::-1], pages))


def seeds_until_caught(name: str, run: Callable[[int], None], most: int) -> int | None:
    """The first seed that shows the mistake; None: none does."""
    with pytest.MonkeyPatch.context() as patch:
        MISTAKES[name](patch)
        for seed in range(most):
            try:
                run(seed)
            except Exception:  # wrong tokens, an invariant, an index: whatever shows it
                return seed
    return None


@_mistake
def a_row_that_sits_out_keeps_its_place_on_the_host(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SlotMirror, "set_back", _nothing)


@_mistake
def a_row_that_sits_out_keeps_its_place_on_the_device(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SlotMirror, "_one_back", lambda *_: np.empty((0, 2), dtype=np.int32))


@_mistake
def a_row_that_sits_out_tells_its_mask_of_a_token(patch: pytest.MonkeyPatch) -> None:
    real = Sampling.run

    def run(self: Sampling, step: int, rows: StagedRows) -> TokenChoice:
        masks = rows.masks
        choice = real(self, step, rows)
        for row in choice.masked.shares.sat_out:
            dict(masks)[row].unknown += 1
        rows.masks = masks
        return choice

    patch.setattr(Sampling, "run", run)
