"""Sampling: a pure function of (logits, params, own tokens, seed, position), whatever else is in the batch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shared.batch.schedule_batch import SlotJoin
from shared.engine.sampling.sampler import ORDER, Adjustment, Sampler
from shared.wire.sampling_params import MAX_BAD_WORD_TOKENS, SamplingParams

VOCAB = 61
EOS = 7


def params_of(**fields: object) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": 100, "seed": 1} | fields)  # type: ignore[arg-type]


any_params = st.builds(
    SamplingParams,
    max_new_tokens=st.just(100),
    seed=st.integers(-(2**63), 2**64 - 1),
    temperature=st.sampled_from([0.0, 1e-30, 0.3, 1.0, 2.0]),
    top_p=st.sampled_from([1.0, 0.9, 0.3, 1e-6]),
    top_k=st.sampled_from([-1, 0, 1, 5, VOCAB, 10_000]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.7, -1.0]),
    presence_penalty=st.sampled_from([0.0, 1.5]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100, width=32), max_size=4),
    min_new_tokens=st.sampled_from([0, 3]),
    stop_token_ids=st.sampled_from([(), (3, 4)]),
    allowed_token_ids=st.sampled_from([(), tuple(range(9, 20))]),
    bad_words=st.sampled_from([(), ((11,), (9, 12), (12, 9, 13), (13, 13))]),
)
histories = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12)


def logits_of(seed: int, rows: int = 1) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def choose(logits: Tensor, params: SamplingParams, tokens: Sequence[int] = (0,), prompt_len: int = 1) -> int:
    """One row, alone."""
    sampler = Sampler(slots=1, vocab_size=logits.shape[-1], eos_token_ids=[EOS])
    sampler.join(SlotJoin(0, (), 0, params, prompt_len, tokens))
    lengths = torch.tensor([len(tokens)])
    return int(sampler.sample(logits.reshape(1, -1).clone(), torch.tensor([0]), lengths)[0])


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(st.tuples(any_params, histories, st.integers(0, 99)), min_size=1, max_size=6),
    data=st.data(),
)
def test_a_row_chooses_the_same_alone_and_in_any_batch(
    rows: list[tuple[SamplingParams, list[int], int]], data: st.DataObject
) -> None:
    sampler = Sampler(slots=9, vocab_size=VOCAB, eos_token_ids=[EOS])
    slots = data.draw(st.permutations(range(9)))[: len(rows)]
    for slot in slots:  # nothing remains of the request that had the slot before
        sampler.join(SlotJoin(slot, (), 0, data.draw(any_params), 1, data.draw(histories)))
    for slot, (params, tokens, _) in zip(slots, rows, strict=True):
        sampler.join(SlotJoin(slot, (), 0, params, 1, tokens))
    logits = torch.cat([logits_of(seed) for _, _, seed in rows])
    lengths = torch.tensor([len(tokens) for _, tokens, _ in rows])
    together = sampler.sample(logits, torch.tensor(slots), lengths).tolist()
    assert together == [choose(logits_of(seed), params, tokens) for params, tokens, seed in rows]


@settings(max_examples=60, deadline=None)
@given(params=any_params, seed=st.integers(0, 99))
def test_a_join_at_any_token_continues_the_same_sequence(params: SamplingParams, seed: int) -> None:
    """History kept on the device equals history given at a join: a resumed request samples what it would have."""
    sampler = Sampler(slots=1, vocab_size=VOCAB, eos_token_ids=[EOS])
    tokens = [5, 9, 9]
    sampler.join(SlotJoin(0, (), 0, params, 3, tuple(tokens)))
    for step in range(6):
        logits = logits_of(seed + step)
        resumed = choose(logits, params, tokens, prompt_len=3)
        sampled = sampler.sample(logits, torch.tensor([0]), torch.tensor([len(tokens)]))
        assert int(sampled[0]) == resumed
        tokens.append(resumed)


@settings(max_examples=100, deadline=None)
@given(
    top_k=st.integers(1, 8),
    top_p=st.floats(0.05, 0.99),
    min_p=st.floats(0.0, 0.5),
    seed=st.integers(0, 10_000),
)
def test_the_chosen_token_passes_every_filter(top_k: int, top_p: float, min_p: float, seed: int) -> None:
    logits = logits_of(seed)
    params = params_of(seed=seed, top_k=top_k, top_p=top_p, min_p=min_p)
    token = choose(logits, params)
    kept = logits[0].double().softmax(-1)
    ranked = kept.argsort(descending=True).tolist()
    assert token in ranked[:top_k]
    kept[ranked[top_k:]] = 0
    kept /= kept.sum()
    higher = sum(float(kept[other]) for other in ranked[: ranked.index(token)])
    assert higher < top_p + 1e-6
    assert float(kept[token]) >= min_p * float(kept.max()) * (1 - 1e-6)


# The noise is the same at each temperature, so one of them needs many draws.
@pytest.mark.parametrize(("temperature", "draws"), [(0.7, 4000), (1.0, 20_000), (1.6, 4000)])
def test_frequencies_follow_the_softmax(temperature: float, draws: int) -> None:
    sampler = Sampler(slots=1, vocab_size=8, eos_token_ids=[])
    logits = torch.tensor([[1.0, 0.0, -1.0, 2.0, 0.5, 0.5, -3.0, 1.5]])
    sampler.join(SlotJoin(0, (), 0, params_of(temperature=temperature), 0))
    slots, lengths = torch.zeros(draws, dtype=torch.int64), torch.arange(draws)
    drawn = sampler.sample(logits.expand(draws, -1).clone(), slots, lengths)
    found = torch.bincount(drawn, minlength=8) / draws
    expected = (logits[0] / temperature).softmax(-1)
    assert ((found - expected).abs() < 4.5 * (expected * (1 - expected) / draws).sqrt()).all()


def test_seeds_and_positions_draw_independently() -> None:
    """Neighbouring seeds and positions agree as often as chance would have it, not more."""
    draws, sampler = 4000, Sampler(slots=2, vocab_size=16, eos_token_ids=[])
    for slot in (0, 1):
        sampler.join(SlotJoin(slot, (), 0, params_of(seed=slot), 0))
    lengths = torch.arange(draws)
    first, second = (
        sampler.sample(torch.zeros(draws, 16), torch.full((draws,), slot), lengths) for slot in (0, 1)
    )
    for one, other in ((first, second), (first[1:], first[:-1]), (first[1:], second[:-1])):
        share = float((one == other).float().mean())
        assert abs(share - 1 / 16) < 4.5 * math.sqrt(1 / 16 * 15 / 16 / draws)


@given(seed=st.integers(0, 1000), first=st.integers(0, VOCAB - 1), second=st.integers(0, VOCAB - 1))
def test_greedy_takes_the_lowest_of_equal_tokens(seed: int, first: int, second: int) -> None:
    logits = logits_of(seed)
    logits[0, [first, second]] = 50.0
    assert choose(logits, params_of(temperature=0.0)) == min(first, second)


def test_ends_are_not_admitted_before_min_new_tokens() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, EOS], logits[0, 9], logits[0, 11] = 30.0, 20.0, 10.0
    params = params_of(temperature=0.0, min_new_tokens=2, stop_token_ids=(9,))
    prompt = [1, 2, 3]
    found = [choose(logits, params, [*prompt, *[11] * output], prompt_len=3) for output in range(4)]
    assert found == [11, 11, EOS, EOS]


def test_bias_moves_a_choice() -> None:
    logits = logits_of(4)
    assert choose(logits, params_of(temperature=0.0, logit_bias={17: 100.0})) == 17
    best = int(logits.argmax())
    assert choose(logits, params_of(temperature=0.0, logit_bias={best: -100.0})) != best


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("repetition_penalty", 2.0, 2),  # 3/2 for a token of the prompt, 2.5/2 for one of the output
        ("frequency_penalty", 1.0, 0),  # the output alone counts: 2.5 - 2, the prompt's 3 stays
        ("presence_penalty", 1.0, 0),
    ],
)
def test_penalties_count_what_they_should(field: str, value: float, expected: int) -> None:
    """Token 0 is in the prompt, token 1 twice in the output, token 2 nowhere."""
    logits = torch.full((1, VOCAB), -5.0)
    logits[0, :3] = torch.tensor([3.0, 3.5, 2.0])
    chosen = choose(logits, params_of(temperature=0.0, **{field: value}), [0, 1, 1], prompt_len=1)
    assert chosen == expected


def test_frequency_counts_each_time_and_presence_once() -> None:
    logits = torch.full((1, VOCAB), -5.0)
    logits[0, :2] = torch.tensor([3.0, 1.5])
    for field, expected in (("frequency_penalty", 1), ("presence_penalty", 0)):
        params = params_of(temperature=0.0, **{field: 1.0})
        assert choose(logits, params, [2, 0, 0], prompt_len=1) == expected


def test_only_allowed_tokens_are_chosen() -> None:
    logits = logits_of(3)
    params = params_of(temperature=1.0, allowed_token_ids=(4, 9, 50))
    chosen = {choose(logits, msgspec.structs.replace(params, seed=seed)) for seed in range(200)}
    assert chosen == {4, 9, 50}
    assert choose(logits, params_of(temperature=0.0, allowed_token_ids=(4,))) == 4


def test_a_bad_word_is_masked_behind_its_beginning_in_the_output_alone() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 5], logits[0, 6] = 2.0, 1.0
    params = params_of(temperature=0.0, bad_words=((8, 9, 5),))
    assert choose(logits, params, (1, 8, 9), prompt_len=1) == 6
    assert choose(logits, params, (1, 8, 9), prompt_len=2) == 5, "the 8 is of the prompt"
    assert choose(logits, params, (1, 9), prompt_len=1) == 5
    assert choose(logits, params_of(temperature=0.0, bad_words=((5,),)), (1,)) == 6


def test_the_longest_bad_word_is_seen_whole() -> None:
    word = tuple(range(10, 10 + MAX_BAD_WORD_TOKENS))
    logits = torch.zeros(1, VOCAB)
    logits[0, word[-1]] = 1.0
    params = params_of(temperature=0.0, bad_words=(word,))
    assert choose(logits, params, (1, 2, 3, *word[:-1]), prompt_len=1) != word[-1]
    assert choose(logits, params, (1, 2, 3, *word[1:-1]), prompt_len=1) == word[-1]


def test_every_adjustment_stands_in_the_order_once() -> None:
    assert sorted(each.name for each in ORDER) == sorted(each.name for each in Adjustment)
