"""What a step of the device brings back: tokens, and what is known of them.

`TokenLogprobs` is computed where the token is sampled and travels with it to the client; nobody computes it again.
Values are natural logarithms of the raw distribution: before penalties, masks, temperature and filters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import msgspec

TOP_LOGPROBS_MAX = 20  # OpenAI's own bound


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """How likely a token was, and what else was likely at its place."""

    logprob: float
    rank: int = 0  # how many tokens were likelier, plus 1; 0: not known
    # token id and logprob of the likeliest, in falling order, equal ones by ascending id
    top: Annotated[tuple[tuple[int, float], ...], msgspec.Meta(max_length=TOP_LOGPROBS_MAX)] = ()


Logprobs = tuple[TokenLogprobs, ...]  # of some tokens, in their order; empty: nobody asked


@dataclass(frozen=True, slots=True)
class Sampled:
    """The results of one step, in row order of its batch.

    `logprobs` has an entry for each row whose request asks for them, by the row's place in `token_ids`. `scored` has
    those of an EXTEND row's `scores`, by the row's place in the batch. `failed` names rows whose request cannot go on,
    by their place in `token_ids`, and why: their token is to be discarded.
    """

    token_ids: list[int]
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    scored: Mapping[int, Sequence[TokenLogprobs]] = field(default_factory=dict)
    failed: Mapping[int, str] = field(default_factory=dict)
