"""A step launches the kernels of the filters that its rows ask for, and no others."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from torch import Tensor

from shared.batch.schedule_batch import SlotJoin
from shared.engine.cuda.adjustments import Adjustments
from shared.engine.cuda.host_stream import HostStream
from shared.engine.cuda.slots import DeviceWords
from shared.engine.cuda.staging import Staging
from shared.engine.model.torch_ops import TorchOps
from shared.wire.sampling_params import SamplingParams

VOCAB = 307
PLAIN = SamplingParams(max_new_tokens=9, seed=1, temperature=0.6, min_p=0.001)
RANKED = SamplingParams(max_new_tokens=9, seed=1, temperature=0.6, top_k=20)
SHARED = SamplingParams(max_new_tokens=9, seed=1, temperature=0.6, top_p=0.9)
BOTH = SamplingParams(max_new_tokens=9, seed=1, temperature=0.6, top_k=20, top_p=0.9)


class CountedOps(TorchOps):
    """Counts the filters that are launched."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def top_k_floor(self, logits: Tensor, top_k: Tensor) -> Tensor:
        """See `Ops`."""
        self.calls["top_k"] += 1
        return super().top_k_floor(logits, top_k)

    def top_p_floor(self, logits: Tensor, top_p: Tensor) -> Tensor:
        """See `Ops`."""
        self.calls["top_p"] += 1
        return super().top_p_floor(logits, top_p)


def filtered(asked: list[SamplingParams], logits: Tensor) -> tuple[Tensor, Counter[str]]:
    """The logits of a step whose rows ask for these, and what was launched."""
    device, ops, stream = torch.device("cpu"), CountedOps(), HostStream(1)
    words = DeviceWords(len(asked), 1, 16, 0, device)
    adjustments = Adjustments(len(asked), VOCAB, (), ops, words)
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
    return found, ops.calls


@pytest.mark.parametrize(
    ("asked", "launched"),
    [
        ([PLAIN], {}),
        ([RANKED, PLAIN], {"top_k": 1}),
        ([SHARED, PLAIN], {"top_p": 1}),
        ([RANKED, SHARED], {"top_k": 1, "top_p": 1}),
        ([BOTH], {"top_k": 1, "top_p": 1}),
    ],
)
def test_a_filter_that_no_row_asks_for_is_not_launched(
    asked: list[SamplingParams], launched: dict[str, int]
) -> None:
    logits = torch.randn(len(asked), VOCAB, generator=torch.Generator().manual_seed(5)) * 3
    _, calls = filtered(asked, logits)
    assert calls == launched


def test_a_row_keeps_the_same_tokens_whatever_others_ask_for() -> None:
    """What is launched depends on the batch; what is held must not."""
    kinds = [PLAIN, RANKED, SHARED, BOTH]
    logits = torch.randn(len(kinds), VOCAB, generator=torch.Generator().manual_seed(6)) * 0.3
    together, _ = filtered(kinds, logits)
    for row, params in enumerate(kinds):
        alone, _ = filtered([params], logits[row : row + 1])
        assert torch.equal(alone[0], together[row])
    kept = (together > -torch.inf).sum(-1).tolist()
    assert kept[1] == 20
    assert 0 < kept[3] <= 20
    assert kept[3] < kept[2] < VOCAB
