"""A language model whose every mistake shows: what a request must answer is a pure function of the request.

A KV cell is a hash of its token and of all cells before it, and the next token is a hash of all cells. So one
wrong page, stale read, lost or doubled token, or sampling at a wrong position changes everything that follows, and
comparing the output with `expected_output` finds it. Nothing here knows pages, batches, workers or time.
"""

from __future__ import annotations

from collections.abc import Sequence

from shared.wire.messages import FinishReason
from shared.wire.sampled import Logprobs, TokenLogprobs
from shared.wire.sampling_params import SamplingParams
from tests.simulation.oracle import toy_grammar

VOCAB_SIZE = 64
ALL = frozenset(range(VOCAB_SIZE))
EOS_TOKEN_IDS = frozenset({0})  # one token in 64: streams of a few dozen tokens end either way


def kv_cell(before: Sequence[int], token_id: int) -> int:
    """The KV of a token behind the cells `before`."""
    return hash((token_id, *before))


def sample(
    cells: Sequence[int],
    params: SamplingParams,
    prompt_len: int,
    history: Sequence[int],
    allowed: frozenset[int] = frozenset(),
) -> int:
    """The token that follows `cells`; `history` (all tokens so far) matters only to penalties.

    `allowed` are the tokens that may come; empty: all.
    """
    position = len(cells) - prompt_len
    seed = params.seed if params.temperature else 0
    seen = tuple(history) if params.penalized else ()
    token_id = hash((position, seed, seen, *cells)) % VOCAB_SIZE
    if allowed:
        ends = EOS_TOKEN_IDS.union(params.stop_token_ids) if position < params.min_new_tokens else frozenset()
        allowed = allowed - ends or allowed
        return min(allowed, key=lambda one: (one - token_id) % VOCAB_SIZE)
    if position < params.min_new_tokens:
        while token_id in EOS_TOKEN_IDS or token_id in params.stop_token_ids:
            token_id = (token_id + 1) % VOCAB_SIZE
    return token_id


def logprobs_of(cells: Sequence[int], token_id: int, most: int) -> TokenLogprobs:
    """What is told of a token that follows `cells`: a function of both, as the token is."""
    at = hash((token_id, *cells)) % 1000
    return TokenLogprobs(-at / 8, 1 + at % 3, tuple((at % VOCAB_SIZE, -float(rank)) for rank in range(most)))


def expected_logprobs(prompt: Sequence[int], output: Sequence[int], params: SamplingParams) -> Logprobs:
    """Of each token of an output; none if nobody asked."""
    if params.logprobs < 0:
        return ()
    cells, told = list[int](), list[TokenLogprobs]()
    for token_id in prompt:
        cells.append(kv_cell(cells, token_id))
    for token_id in output:
        told.append(logprobs_of(cells, token_id, params.logprobs))
        cells.append(kv_cell(cells, token_id))
    return tuple(told)


def expected_scores(prompt: Sequence[int], params: SamplingParams) -> Logprobs:
    """Of each token of a prompt but the first; none if nobody asked."""
    if params.prompt_logprobs < 0:
        return ()
    cells = [kv_cell((), prompt[0])]
    told = []
    for token_id in prompt[1:]:
        told.append(logprobs_of(cells, token_id, params.prompt_logprobs))
        cells.append(kv_cell(cells, token_id))
    return tuple(told)


def unmasked(params: SamplingParams, output: Sequence[int]) -> frozenset[int]:
    """What `allowed_token_ids` and `bad_words` leave behind an output; empty: all."""
    if not (params.allowed_token_ids or params.bad_words):
        return frozenset()
    left = frozenset(params.allowed_token_ids) or ALL
    text = "".join(map(chr, output))
    return left - {word[-1] for word in params.bad_words if text.endswith("".join(map(chr, word[:-1])))}


def finish_reason(output: Sequence[int], params: SamplingParams) -> FinishReason | None:
    """Why an output ends with its last token; None if it goes on."""
    last = output[-1]
    if last in params.stop_token_ids or (last in EOS_TOKEN_IDS and not params.ignore_eos):
        return "stop"
    return "length" if len(output) == params.max_new_tokens else None


def expected_output(
    prompt: Sequence[int], params: SamplingParams
) -> tuple[tuple[int, ...], FinishReason | None]:
    """All tokens of the answer, and why it ends; None: its grammar allows no more."""
    token_ids, cells, output = list(prompt), list[int](), list[int]()
    reason = None
    while reason is None:
        for token_id in token_ids[len(cells) :]:
            cells.append(kv_cell(cells, token_id))
        may_come = unmasked(params, output)
        if params.grammar is not None:
            if toy_grammar.fails(params.grammar, toy_grammar.state_of(output)):
                break
            may_come = toy_grammar.allowed(toy_grammar.state_of(output), VOCAB_SIZE) & (may_come or ALL)
        output.append(sample(cells, params, len(prompt), token_ids, may_come))
        token_ids.append(output[-1])
        reason = finish_reason(output, params)
    return tuple(output), reason
