"""Routing chooses what a plain reading of its rules chooses, also where scores are equal."""

from __future__ import annotations

import math
from collections.abc import Callable
from ctypes import byref
from functools import partial

import pytest
import torch
from torch import Tensor

from shared.engine.checkpoint.experts_config import Routing
from shared.engine.cpu.native_weights import native_routing
from shared.engine.model.routing import Router, best
from shared.engine.native.build import build, choose
from shared.engine.native.kernels import Kernels
from shared.primitives.errors import ModelError
from tests.unit.engine.driver import COMPILED_KERNELS, skip_unless_runnable
from tests.unit.engine.experts.plain_routing import ROUTINGS, assert_as_read_plainly, logits_of


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
    logits = logits_of(200, routing.experts, tied=tied)
    choose_by = BY[by]
    assert_as_read_plainly(
        lambda routing, correction, _device: partial(choose_by, routing, correction), routing, logits
    )


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
