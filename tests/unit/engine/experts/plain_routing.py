"""Rules of routing, read plainly, one token after the other; and logits to try them on."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from shared.engine.checkpoint.experts_config import Routing, Scoring
from shared.engine.model.ops import ExpertChoice

MakeChoice = Callable[[Routing, Tensor | None, torch.device], ExpertChoice]
CPU = torch.device("cpu")

_sigmoids = partial(Routing, scoring=Scoring.SIGMOID, corrected=True)
ROUTINGS = {
    "softmax": Routing(9, 3),
    "softmax, not normalized": Routing(9, 3, normalized=False),
    "softmax, all": Routing(4, 4),
    "sigmoid": Routing(8, 2, scoring=Scoring.SIGMOID, scale=2.5, corrected=True),
    "sigmoid, groups": Routing(
        12, 3, scoring=Scoring.SIGMOID, corrected=True, groups=4, groups_chosen=2, normalized=False
    ),
    "one expert": Routing(1, 1),
    "Mixtral": Routing(8, 2),
    "gpt-oss-120b": Routing(128, 4),
    "Qwen3": Routing(128, 8),
    "GLM-4.5": _sigmoids(160, 8, scale=2.5),
    "DeepSeek-V3": _sigmoids(256, 8, scale=2.5, groups=8, groups_chosen=4),
    "many groups": _sigmoids(96, 5, groups=48, groups_chosen=40),
    "as many as a kernel takes": Routing(512, 32, normalized=False),
    "as many as there may be": Routing(1023, 32, normalized=False),
}


def read_plainly(logits: Tensor, correction: Tensor, routing: Routing) -> dict[int, float]:
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


def logits_of(rows: int, experts: int, *, tied: bool) -> Tensor:
    """Logits float32 [rows, experts]; `tied`: many of them are equal."""
    generator = torch.Generator().manual_seed(rows)
    if tied:
        return torch.randint(-2, 3, (rows, experts), generator=generator).float()
    return torch.randn(rows, experts, generator=generator) * 3


def correction_of(routing: Routing) -> Tensor | None:
    """Steps by which experts of lower scores are chosen, some of them below 0."""
    return torch.arange(routing.experts).remainder(3) * 0.25 - 0.4 if routing.corrected else None


def assert_as_read_plainly(
    made: MakeChoice, routing: Routing, logits: Tensor, device: torch.device = CPU
) -> None:
    """Compare each token's experts, in the order of their choice, and weights."""
    correction = correction_of(routing)
    on_device = None if correction is None else correction.to(device)
    chosen, weights = made(routing, on_device, device)(logits.to(device))
    biases = torch.zeros(routing.experts) if correction is None else correction
    for row, experts, given in zip(logits, chosen.tolist(), weights.tolist(), strict=True):
        expected = read_plainly(row, biases, routing)
        assert experts == list(expected)
        assert given == pytest.approx(list(expected.values()), rel=1e-5)
