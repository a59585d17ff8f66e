"""Sinks by the sums that FlashInfer returns are what a softmax over one more key gives."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from shared.engine.attention import flashinfer
from shared.engine.attention.flashinfer_package import flashinfer_package
from shared.engine.attention.heads import weaken_by_sinks

ROWS, HEADS, KEYS, HEAD_DIM = 5, 3, 7, 8


class SummingWrapper:
    """What FlashInfer's wrappers return of these scores and values where sums are asked for: logarithms of base 2."""

    def __init__(self, scores: Tensor, values: Tensor) -> None:
        self.scores, self.values = scores, values
        self.asked: dict[str, Any] = {}

    def run(self, _q: Tensor, _view: Tensor, **returned: Any) -> tuple[Tensor, Tensor]:
        """Attend."""
        self.asked = returned
        attended = torch.einsum("rhk,hkd->rhd", self.scores.softmax(-1), self.values)
        return attended, torch.logsumexp(self.scores, -1) / torch.log(torch.tensor(2.0))


@pytest.mark.parametrize("size", [0.1, 3.0, 60.0])
def test_a_sink_takes_the_part_of_one_more_key(size: float) -> None:
    torch.manual_seed(0)
    scores, sinks = torch.randn(ROWS, HEADS, KEYS) * size, torch.randn(HEADS) * size
    values = torch.randn(HEADS, KEYS, HEAD_DIM)
    wrapper: Any = SummingWrapper(scores, values)
    found = flashinfer._attended(wrapper, torch.empty(ROWS, HEADS, HEAD_DIM), torch.empty(0), sinks)
    column = sinks.view(1, HEADS, 1).expand(ROWS, HEADS, 1)
    weights = torch.cat((scores, column), -1).softmax(-1)[..., :KEYS]
    torch.testing.assert_close(found, torch.einsum("rhk,hkd->rhd", weights, values))
    assert wrapper.asked == {"return_lse": True}


def test_narrow_results_stay_narrow_and_are_rounded_once() -> None:
    attended = torch.randn(ROWS, HEADS, HEAD_DIM).bfloat16()
    sums, sinks = torch.randn(ROWS, HEADS), torch.randn(HEADS)
    wanted = (attended.float() * torch.sigmoid(sums - sinks).unsqueeze(-1)).bfloat16()
    found = weaken_by_sinks(attended, sums, sinks)
    assert found.dtype is torch.bfloat16
    assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    "kind", ["BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"]
)
def test_the_package_returns_sums_where_they_are_asked_for(kind: str) -> None:
    pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")
    run = getattr(flashinfer_package(), kind).run
    inspect.signature(run).bind(None, torch.empty(0), torch.empty(0), out=torch.empty(0), return_lse=True)
