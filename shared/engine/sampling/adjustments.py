"""What changes a row of logits before its token is chosen, and in which order: one table for all engines.

The order is that of vLLM and SGLang. Each engine has its own arithmetic for an adjustment and runs them by `ORDER`.
Then Gumbel noise is added, and the highest logit wins, ties by the lowest id.
"""

from __future__ import annotations

from enum import Enum, auto


class Adjustment(Enum):
    """One change of a step's logits."""

    PENALTIES = auto()  # repetition, frequency, presence
    ADDENDS = auto()  # bias, and ends that may not come yet
    MASKS = auto()  # tokens that may not come: lists, bad words, grammars
    FILTERS = auto()  # temperature, top_k, top_p, min_p


ORDER = (Adjustment.PENALTIES, Adjustment.ADDENDS, Adjustment.MASKS, Adjustment.FILTERS)
