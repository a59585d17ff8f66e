"""Chooses the experts of each token, by `Routing`. Depends on no value: shapes alone decide what is launched.

Written for few launches, since on a GPU each operation is one and a layer's numbers are few.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shared.engine.checkpoint.experts_config import Routing, Scoring

_SUM_MIN = 1e-20  # as the reference has it, where sigmoids may all be 0


class Router:
    """Routing of one layer, with what it reads of the device."""

    def __init__(self, routing: Routing, correction: Tensor | None, device: torch.device) -> None:
        """`correction`: float32 [experts], added to scores before the choice."""
        self._routing = routing
        self._correction = correction
        # Made once: within a graph it would be a launch, or memory that another graph fills.
        self._places = torch.arange(routing.experts - 1, -1, -1, device=device)

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Logits float32 [tokens, experts] → experts int64 and weights float32, [tokens, chosen]."""
        routing = self._routing
        softmax = routing.scoring is Scoring.SOFTMAX
        scores = logits.softmax(-1) if softmax else torch.exp(-logits).add_(1.0).reciprocal_()
        ranked = scores if self._correction is None else scores + self._correction
        if routing.groups > 1:
            ranked = self._of_best_groups(ranked)
        chosen = best(ranked, routing.chosen, self._places, positive=ranked is scores)
        weights = scores.gather(1, chosen)
        if routing.normalized:
            total = weights.sum(-1, keepdim=True)
            weights = weights / (total if softmax else total + _SUM_MIN)
        return chosen, weights if routing.scale == 1 else weights * routing.scale

    def _of_best_groups(self, ranked: Tensor) -> Tensor:
        """Scores of experts outside the best groups become -inf; those of the others stay."""
        groups = ranked.view(len(ranked), self._routing.groups, -1)
        worth = groups.topk(2, dim=-1).values.sum(-1)
        taken = torch.zeros_like(worth, dtype=torch.bool)
        taken.scatter_(
            1, best(worth, self._routing.groups_chosen, self._places[-self._routing.groups :]), True
        )
        return groups.masked_fill(~taken.unsqueeze(2), -torch.inf).view_as(ranked)


def best(scores: Tensor, count: int, places: Tensor, *, positive: bool = False) -> Tensor:
    """The places of the `count` highest in each row, the highest first; of equal ones the lower place comes first.

    scores float32 [rows, n], places int64 [n] from n - 1 down to 0 → int64 [rows, count]. `positive`: no score is
    negative. torch.topk says nothing of equal numbers: here none are equal, since a place is part of what is compared.
    """
    bits = scores.contiguous().view(torch.int32)
    if not positive:
        bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the order of the numbers
    keys = torch.add(places, bits, alpha=len(places))
    return keys.topk(count, dim=-1).values.bitwise_not_().remainder_(len(places))
