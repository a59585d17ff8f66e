"""Logprobs of chosen tokens: those of torch's log-softmax, whatever computes them, and the same bits in any company."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shared.batch.schedule_batch import SlotJoin
from shared.engine.native.build import build, choose
from shared.engine.native.kernels import Kernels
from shared.engine.sampling.logprobs import LogprobRows, logprobs_by_numpy
from shared.wire.sampled import TokenLogprobs
from shared.wire.sampling_params import SamplingParams

SIZES = (1, 2, 15, 16, 17, 64, 65, 1000, 49152)


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return Kernels(build(choose()))


def logits_of(size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 5


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("compiled", [True, False])
def test_they_are_those_of_a_log_softmax(kernels: Kernels, size: int, compiled: bool) -> None:
    rows, logits = LogprobRows(1, kernels if compiled else None), logits_of(size)
    expected = logits.double().log_softmax(-1)
    for token in {0, size // 2, size - 1}:
        found = rows.of(logits.numpy(), token, min(20, size))
        assert abs(found.logprob - expected[token].item()) < 1e-5
        assert found.rank == int((logits > logits[token]).sum()) + 1
        values, ids = expected.topk(min(20, size))
        assert [token_id for token_id, _ in found.top] == ids.tolist()
        assert np.allclose([logprob for _, logprob in found.top], values.numpy(), atol=1e-5)


@pytest.mark.parametrize("compiled", [True, False])
def test_of_equal_tokens_the_lower_id_comes_first(kernels: Kernels, compiled: bool) -> None:
    logits = torch.zeros(100)
    logits[[7, 70, 90]] = 1.0
    found = LogprobRows(1, kernels if compiled else None).of(logits.numpy(), 70, 5)
    assert [token_id for token_id, _ in found.top] == [7, 70, 90, 0, 1]
    assert found.rank == 1


@pytest.mark.parametrize("compiled", [True, False])
def test_tokens_that_are_impossible_have_no_weight(kernels: Kernels, compiled: bool) -> None:
    logits = torch.full((50,), -torch.inf)
    logits[[3, 9]] = torch.tensor([2.0, 2.0])
    found = LogprobRows(1, kernels if compiled else None).of(logits.numpy(), 9, 2)
    assert found.logprob == pytest.approx(-np.log(2))
    assert found == TokenLogprobs(found.logprob, 1, ((3, found.logprob), (9, found.logprob)))


def test_only_rows_whose_request_asks_are_copied_and_before_they_change(kernels: Kernels) -> None:
    rows = LogprobRows(4, kernels)
    logits, slots = torch.stack([logits_of(64, seed) for seed in range(3)]), torch.tensor([2, 0, 3])
    assert rows.raw(logits, slots) == {}
    for slot, logprobs in ((0, 3), (2, -1), (3, 0)):
        params = SamplingParams(max_new_tokens=1, seed=0, logprobs=logprobs)
        rows.join(SlotJoin(slot, (), 0, params, 0))
    raw, kept = rows.raw(logits, slots), logits.clone()
    assert sorted(raw) == [1, 2]
    logits.fill_(-1.0)
    found = rows.chosen(raw, [5, 6, 7])
    assert found[1] == rows.of(kept[1].numpy(), 6, 3)
    assert found[2] == rows.of(kept[2].numpy(), 7, 0)
    assert found[2].top == ()


def test_a_slot_that_is_taken_anew_asks_for_what_the_new_request_asks(kernels: Kernels) -> None:
    rows = LogprobRows(1, kernels)
    for logprobs in (5, -1):
        rows.join(SlotJoin(0, (), 0, SamplingParams(max_new_tokens=1, seed=0, logprobs=logprobs), 0))
    assert rows.raw(torch.zeros(1, 8), torch.tensor([0])) == {}


def test_both_ways_agree(kernels: Kernels) -> None:
    logits = logits_of(49152, 1).numpy()
    compiled, numpy = LogprobRows(1, kernels).of(logits, 11, 20), logprobs_by_numpy(logits, 11, 20)
    assert compiled.rank == numpy.rank
    assert compiled.logprob == pytest.approx(numpy.logprob, abs=1e-5)
    assert [token_id for token_id, _ in compiled.top] == [token_id for token_id, _ in numpy.top]
