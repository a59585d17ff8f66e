"""A look at the first logits of a model: weights that give none are found at start.

Damaged files, a conversion gone wrong or a dtype of too small a range make numbers that are none (NaN). Every stream
would then be a few tokens of nothing, and no error would say so. What one token gives is looked at, not each weight.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shared.engine.attention.protocol import PagedBatch
from shared.primitives.errors import ModelError

Forward = Callable[[Tensor, PagedBatch, Tensor], Tensor]  # see `Model.forward`

_NO_NUMBERS = (
    "the model's logits should be numbers, the first ones are not (NaN): its weights are damaged, or too large for "
    "this dtype; download the folder again, or choose bfloat16 or float32 (dtype)"
)


def require_numbers(sum_of_logits: Tensor) -> None:
    """Raise `ModelError` if one of the logits of this sum, a scalar, is no number; waits for it."""
    if bool(sum_of_logits.isnan()):
        raise ModelError(_NO_NUMBERS)


@torch.inference_mode()
def require_first_logits(forward: Forward, page_size: int) -> None:
    """Compute one token on page 0, which no request has yet. Raises `ModelError` where that gives no numbers."""
    one = torch.ones(1, dtype=torch.int64)
    batch = PagedBatch.of(one, one, torch.zeros((1, 1), dtype=torch.int32), page_size)
    first = torch.zeros(1, dtype=torch.int64)
    require_numbers(forward(first, batch, first).sum())
