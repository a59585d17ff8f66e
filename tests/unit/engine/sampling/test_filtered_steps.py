"""Rows of a step ask for filters of their own, and each keeps what it asks for."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from shared.batch.schedule_batch import SlotJoin
from shared.engine.cuda.adjustments import Adjustments
from shared.engine.cuda.host_stream import HostStream
from shared.engine.cuda.kernels.step_kernels import ReferenceKernels
from shared.engine.cuda.slots import DeviceWords
from shared.engine.cuda.staging import Staging
from shared.wire.sampling_params import SamplingParams

VOCAB = 307
PLAIN = SamplingParams(max_new_tokens=9, seed=1, temperature=0.6, min_p=0.001)
RANKED = SamplingParams(max_new_tokens=9, seed=1, temperature=0.6, top_k=20)
SHARED = SamplingParams(max_new_tokens=9, seed=1, temperature=0.6, top_p=0.9)
BOTH = SamplingParams(max_new_tokens=9, seed=1, temperature=0.6, top_k=20, top_p=0.9)


def filtered(asked: list[SamplingParams], logits: Tensor) -> Tensor:
    """The logits of a step whose rows ask for these."""
    device, stream = torch.device("cpu"), HostStream(1)
    words = DeviceWords(len(asked), 1, 16, 0, device)
    adjustments = Adjustments(len(asked), VOCAB, (), ReferenceKernels(), words)
    for slot, params in enumerate(asked):
        adjustments.join(SlotJoin(slot, (0,), 4, params, 4))
    staging = Staging(stream, torch.zeros(1000, dtype=torch.int32), 0)
    staging.begin()
    rows = np.arange(len(asked))
    adjusted = adjustments.stage(rows, np.full(len(asked), 4), staging)
    staging.upload()
    stream.synchronize()
    found = logits.clone()
    for each in adjusted.changes.values():
        each(found)
    stream.close()
    return found


def test_a_row_keeps_the_same_tokens_whatever_others_ask_for() -> None:
    kinds = [PLAIN, RANKED, SHARED, BOTH]
    logits = torch.randn(len(kinds), VOCAB, generator=torch.Generator().manual_seed(6)) * 0.3
    together = filtered(kinds, logits)
    for row, params in enumerate(kinds):
        alone = filtered([params], logits[row : row + 1])
        assert torch.equal(alone[0], together[row])
    kept = (together > -torch.inf).sum(-1).tolist()
    assert kept[1] == 20
    assert 0 < kept[3] <= 20
    assert kept[3] < kept[2] < VOCAB


def test_a_temperature_that_is_0_in_float32_filters_nothing() -> None:
    """Such a row is greedy; divided by 0 its best token would be no number, and left out."""
    cold = SamplingParams(max_new_tokens=9, seed=1, temperature=1e-50, top_k=20)
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(7))
    assert torch.equal(filtered([cold], logits), logits)
