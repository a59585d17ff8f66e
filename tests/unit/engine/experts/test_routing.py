"""Routing chooses what a plain reading of its rules chooses, also where scores are equal."""

from __future__ import annotations

import math
from collections.abc import Callable
from ctypes import byref
from functools import partial

import pytest
import torch
from torch import Tensor

from shared.engine.checkpoint.experts_config import Routing, Scoring
from shared.engine.cpu.native_weights import native_routing
from shared.engine.model.routing import Router, best
from shared.engine.native.build import build, choose
from shared.engine.native.kernels import Kernels
from shared.primitives.errors import ModelError
from tests.unit.engine.driver import COMPILED_KERNELS, skip_unless_runnable

ROUTINGS = {
    "softmax": Routing(9, 3),
    "softmax, not normalized": Routing(9, 3, normalized=False),
    "softmax, all": Routing(4, 4),
    "sigmoid": Routing(8, 2, scoring=Scoring.SIGMOID, scale=2.5, corrected=True),
    "sigmoid, groups": Routing(
        12, 3, scoring=Scoring.SIGMOID, corrected=True, groups=4, groups_chosen=2, normalized=False
    ),
}


def _plainly(logits: Tensor, correction: Tensor, routing: Routing) -> dict[int, float]:
    """Weights of the chosen experts of a token, in the order of their choice. Scores are float32, and so are ties."""
    scores = logits.softmax(0) if routing.scoring is Scoring.SOFTMAX else 1.0 / (1.0 + torch.exp(-logits))
    ranked = scores + correction
    size = routing.experts // routing.groups
    groups = [range(first, first + size) for first in range(0, routing.experts, size)]
    if routing.groups > 1:
        worth = [float(ranked[list(group)].topk(2).values.sum()) for group in groups]
        kept = sorted(range(len(groups)), key=lambda group: (-worth[group], group))[: routing.groups_chosen]
        groups = [groups[group] for group in kept]
    able = [expert for group in groups for expert in group]
    chosen = sorted(able, key=lambda expert: (-float(ranked[expert]), expert))[: routing.chosen]
    total = math.fsum(scores[chosen].tolist()) if routing.normalized else 1.0
    return {expert: float(scores[expert]) / total * routing.scale for expert in chosen}


def _logits(rows: int, experts: int, *, tied: bool) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    if tied:  # few values: nearly every row has equal ones
        return torch.randint(-2, 3, (rows, experts), generator=generator).float()
    return torch.randn(rows, experts, generator=generator) * 3


def _by_torch(routing: Routing, correction: Tensor | None, logits: Tensor) -> tuple[Tensor, Tensor]:
    return Router(routing, correction, logits.device)(logits)


def _by_compiled(
    name: str, routing: Routing, correction: Tensor | None, logits: Tensor
) -> tuple[Tensor, Tensor]:
    library = Kernels(build(choose(name)))
    chosen = torch.full((len(logits), routing.chosen), -1, dtype=torch.int32)
    weights = torch.full(chosen.shape, math.nan)
    native = native_routing(routing, None if correction is None else correction.data_ptr())
    library.choose_experts(
        byref(native), logits.data_ptr(), len(logits), chosen.data_ptr(), weights.data_ptr()
    )
    return chosen, weights


BY: dict[str, Callable[[Routing, Tensor | None, Tensor], tuple[Tensor, Tensor]]] = {
    "torch": _by_torch,
    **{name: partial(_by_compiled, name) for name in COMPILED_KERNELS},
}


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("tied", [False, True], ids=["random", "tied"])
@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
def test_experts_and_weights_are_those_of_a_plain_reading(routing: Routing, tied: bool, by: str) -> None:
    skip_unless_runnable(by)
    logits = _logits(200, routing.experts, tied=tied)
    correction = torch.arange(routing.experts).remainder(3) * 0.25 if routing.corrected else None
    chosen, weights = BY[by](routing, correction, logits)
    biases = torch.zeros(routing.experts) if correction is None else correction
    for row, experts, given in zip(logits, chosen.tolist(), weights.tolist(), strict=True):
        expected = _plainly(row, biases, routing)
        assert experts == list(expected)
        assert given == pytest.approx(list(expected.values()), rel=1e-5)


def test_of_equal_scores_the_lower_place_comes_first() -> None:
    scores = torch.tensor([[0.5, 1.0, 1.0, 0.5, 1.0], [-1.0, -2.0, -1.0, -torch.inf, -2.0]])
    places = torch.arange(4, -1, -1)
    assert best(scores, 4, places).tolist() == [[1, 2, 4, 0], [0, 2, 1, 4]]
    assert best(scores[:1], 4, places, positive=True).tolist() == [[1, 2, 4, 0]]


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("routing", [ROUTINGS["softmax"], ROUTINGS["sigmoid, groups"]], ids=str)
def test_not_a_number_chooses_experts_that_there_are(routing: Routing, by: str) -> None:
    skip_unless_runnable(by)
    logits, correction = torch.full((3, routing.experts), torch.nan), torch.zeros(routing.experts)
    chosen, _ = BY[by](routing, correction if routing.corrected else None, logits)
    assert all(len(set(row)) == 3 and 0 <= min(row) <= max(row) < routing.experts for row in chosen.tolist())


@pytest.mark.parametrize(
    ("experts", "chosen", "groups", "groups_chosen"),
    [(8, 9, 1, 1), (8, 0, 1, 1), (8, 2, 3, 1), (8, 2, 0, 1), (8, 2, 4, 5), (8, 2, 8, 2), (8, 5, 4, 2)],
)
def test_a_choice_that_cannot_be_made_is_refused(
    experts: int, chosen: int, groups: int, groups_chosen: int
) -> None:
    with pytest.raises(ModelError, match=r"cannot be chosen|expected groups"):
        Routing(experts, chosen, groups=groups, groups_chosen=groups_chosen)
