"""What a step of the device brings back: tokens, and what is known of them.

`TokenLogprobs` is computed where the token is sampled and travels with it to the client; nobody computes it again.
Values are natural logarithms of the raw distribution: before penalties, masks, temperature and filters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import msgspec

from shared.wire.bounds import Count, Logprob, TokenId

TOP_LOGPROBS_MAX = 20  # OpenAI's own bound
LOGPROB_MIN = -9999.0  # OpenAI's word for a token that cannot come


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How likely a token was, and what else was likely at its place."""

    logprob: Logprob
    rank: Count = 0  # how many tokens were likelier, plus 1; 0: not known
    # token id and logprob of the likeliest, in falling order, equal ones by ascending id
    top: Annotated[tuple[tuple[TokenId, Logprob], ...], msgspec.Meta(max_length=TOP_LOGPROBS_MAX)] = ()


def bounded_logprobs(logprob: float, rank: int, top: Iterable[tuple[int, float]]) -> TokenLogprobs:
    """What is reported of a token: each logprob is a number from `LOGPROB_MIN` to 0, whatever a model has computed."""
    return TokenLogprobs(
        _bounded(logprob), rank, tuple((token_id, _bounded(likely)) for token_id, likely in top)
    )


def _bounded(logprob: float) -> float:
    return min(logprob, 0.0) if logprob > LOGPROB_MIN else LOGPROB_MIN  # no comparison holds for a NaN


Logprobs = tuple[TokenLogprobs, ...]  # of some tokens, in their order; empty: nobody asked


@dataclass(frozen=True, slots=True)
class Sampled:
    """The results of one step, in row order of its batch.

    `logprobs` has an entry for each row whose request asks for them, by the row's place in `token_ids`. `scored` has
    those of an EXTEND row's `scores`, by the row's place in `extend`. `failed` names rows whose request cannot go on,
    by their place in `token_ids`, and why: their token is to be discarded. So is that of a row in `sat_out`, which had
    no time for its grammar's mask: on the device nothing has changed for it, and the next step computes it again.
    `mask_seconds` are what masks took of the thread that computes steps, by row. `seconds` are those of the whole step,
    as the device measured them; 0.0: not known.
    """

    token_ids: list[int]
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    scored: Mapping[int, Sequence[TokenLogprobs]] = field(default_factory=dict)
    failed: Mapping[int, str] = field(default_factory=dict)
    sat_out: Collection[int] = ()
    mask_seconds: Mapping[int, float] = field(default_factory=dict)
    seconds: float = 0.0
