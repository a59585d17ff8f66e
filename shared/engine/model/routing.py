"""Chooses the experts of each token, by `Routing`. Depends on no value: shapes alone decide what is launched."""

from __future__ import annotations

import torch
from torch import Tensor

from shared.engine.checkpoint.experts_config import Routing, Scoring

_SUM_MIN = 1e-20  # as the reference has it, where sigmoids may all be 0


def route(logits: Tensor, correction: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """Logits float32 [tokens, experts], correction [experts] → experts int64, weights float32, [tokens, chosen]."""
    softmax = routing.scoring is Scoring.SOFTMAX
    scores = logits.softmax(-1) if softmax else 1.0 / (1.0 + torch.exp(-logits))
    ranked = scores if correction is None else scores + correction
    if routing.groups > 1:
        ranked = _of_best_groups(ranked, routing)
    chosen = best(ranked, routing.chosen)
    weights = scores.gather(1, chosen)
    if routing.normalized:
        weights = weights / (weights.sum(-1, keepdim=True) + _SUM_MIN)
    return chosen, weights if routing.scale == 1 else weights * routing.scale


def best(scores: Tensor, count: int) -> Tensor:
    """The places of the `count` highest in each row, the highest first; of equal ones the lower place comes first.

    scores float32 [rows, places] → int64 [rows, count]. torch.topk says nothing of equal numbers: here none are equal,
    since a place is part of what is compared.
    """
    bits = scores.contiguous().view(torch.int32)
    ascending = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the order of the numbers
    places = scores.shape[1]
    keys = (ascending.long() << 32) | torch.arange(places - 1, -1, -1, device=scores.device)
    return places - 1 - (keys.topk(count, dim=-1).values & 0xFFFFFFFF)


def _of_best_groups(ranked: Tensor, routing: Routing) -> Tensor:
    """Scores of experts outside the best groups become -inf; those of the others stay."""
    groups = ranked.view(len(ranked), routing.groups, -1)
    worth = groups.topk(2, dim=-1).values.sum(-1)
    taken = torch.zeros_like(worth, dtype=torch.bool)
    taken.scatter_(1, best(worth, routing.groups_chosen), True)
    return groups.masked_fill(~taken.unsqueeze(2), -torch.inf).view_as(ranked)
