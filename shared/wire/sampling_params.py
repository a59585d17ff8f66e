"""How tokens are chosen: the parameters of one request and their bounds.

The same struct travels from the router to the workers. Validation happens once, at the router; `validate`
raises `RequestError` naming the field. Counts (`max_new_tokens`, `min_new_tokens`, penalties, positions) run from
the end of the prompt across all attempts of a request, never from the start of an attempt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import msgspec

from shared.primitives.errors import RequestError
from shared.wire.grammar import Grammar
from shared.wire.sampled import TOP_LOGPROBS_MAX

MAX_LOGIT_BIAS_ENTRIES = 300  # OpenAI's own bound
MAX_STOP_TOKEN_IDS = 64
MAX_ALLOWED_TOKEN_IDS = 1024
MAX_BAD_WORDS = 64
MAX_BAD_WORD_TOKENS = 32


BadWord = Annotated[tuple[int, ...], msgspec.Meta(min_length=1, max_length=MAX_BAD_WORD_TOKENS)]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters of one request; the defaults are neutral, `temperature=0` is greedy."""

    max_new_tokens: int
    seed: int  # 64 bits; the router draws one where the client gave none
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Annotated[dict[int, float], msgspec.Meta(max_length=MAX_LOGIT_BIAS_ENTRIES)] = {}
    min_new_tokens: int = 0  # end-of-sequence and stop ids are not admitted before
    stop_token_ids: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_STOP_TOKEN_IDS)] = ()
    ignore_eos: bool = False
    logprobs: int = -1  # how many of the likeliest tokens are named with each; 0: its own alone, -1: none
    prompt_logprobs: int = -1  # likewise, of each token of the prompt but the first
    grammar: Grammar | None = None  # what the output must match
    # no other token is chosen; empty: all are
    allowed_token_ids: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_ALLOWED_TOKEN_IDS)] = ()
    # sequences of token ids that must not come in the output
    bad_words: Annotated[tuple[BadWord, ...], msgspec.Meta(max_length=MAX_BAD_WORDS)] = ()

    @property
    def needs_history(self) -> bool:
        """Whether sampling looks at the request's own earlier tokens."""
        return (
            self.repetition_penalty != 1.0
            or self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
            or self.grammar is not None
            or bool(self.bad_words)
        )

    @property
    def penalized(self) -> bool:
        """Whether earlier tokens change logits by penalties."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    @property
    def features(self) -> frozenset[str]:
        """What a worker must name in its `Hello` to be given these parameters; one that does not would ignore them."""
        return frozenset(name for name, is_asked in FEATURES.items() if is_asked(self))


# Parameters that came after the first version: what each is called in a `Hello`, and whether a request asks for it.
FEATURES: dict[str, Callable[[SamplingParams], bool]] = {
    "logprobs": lambda params: params.logprobs >= 0,
    "prompt_logprobs": lambda params: params.prompt_logprobs >= 0,
    "grammar": lambda params: params.grammar is not None,
    "allowed_token_ids": lambda params: bool(params.allowed_token_ids),
    "bad_words": lambda params: bool(params.bad_words),
}
# What a model's generation_config.json may name.
OF_MODELS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_BOUNDS: dict[str, tuple[float, float]] = {
    "max_new_tokens": (1, 2**31 - 1),
    "seed": (-(2**63), 2**64 - 1),
    "temperature": (0.0, 1000.0),  # OpenAI has 2; RL and some samplers of clients go beyond
    "top_p": (0.0, 1.0),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 10.0),
    "frequency_penalty": (-2.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
    "min_new_tokens": (0, 2**31 - 1),
    "logprobs": (-1, TOP_LOGPROBS_MAX),
    "prompt_logprobs": (-1, TOP_LOGPROBS_MAX),
}


def validate(params: SamplingParams, vocab_size: int) -> None:
    """Raise `RequestError` for the first field out of its bounds."""
    for field, (low, high) in _BOUNDS.items():
        value = getattr(params, field)
        if not low <= value <= high:  # no comparison holds for a NaN
            raise RequestError(f"{field} must be between {low} and {high}, got {brief(value)}", param=field)
    if params.top_p == 0.0:
        raise RequestError("top_p must be above 0, got 0", param="top_p")
    if params.min_new_tokens > params.max_new_tokens:
        raise RequestError(
            f"min_tokens must not exceed max_tokens ({params.max_new_tokens}), got {params.min_new_tokens}",
            param="min_tokens",
        )
    _validate_token_ids("stop_token_ids", params.stop_token_ids, MAX_STOP_TOKEN_IDS, vocab_size)
    _validate_token_ids("logit_bias", tuple(params.logit_bias), MAX_LOGIT_BIAS_ENTRIES, vocab_size)
    _validate_token_ids("allowed_token_ids", params.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS, vocab_size)
    if len(params.bad_words) > MAX_BAD_WORDS:
        raise RequestError(
            f"bad_words takes at most {MAX_BAD_WORDS} entries, got {len(params.bad_words)}", param="bad_words"
        )
    for word in params.bad_words:
        _validate_token_ids("bad_words", word, MAX_BAD_WORD_TOKENS, vocab_size)
    for token_id, bias in params.logit_bias.items():
        if not -100.0 <= bias <= 100.0:
            raise RequestError(
                f"logit_bias values must be between -100 and 100, got {brief(bias)} for token {token_id}",
                param="logit_bias",
            )


def brief(number: float) -> str:
    """A number that a client sent, for a message: as it is, or its size if it has many digits."""
    if isinstance(number, int) and abs(number) >= 10**20:
        return f"a number of {len(str(abs(number)))} digits"
    return str(number)


def _validate_token_ids(field: str, token_ids: tuple[int, ...], most: int, vocab_size: int) -> None:
    if len(token_ids) > most:
        raise RequestError(f"{field} takes at most {most} entries, got {len(token_ids)}", param=field)
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"{field} must hold token ids from 0 to {vocab_size - 1}, got {brief(token_id)}", param=field
            )
