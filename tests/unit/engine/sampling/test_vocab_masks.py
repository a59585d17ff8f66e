"""Masks of the CUDA engine: they mask what the sampler of a CPU masks, whatever a request asks together."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from shared.batch.schedule_batch import SlotJoin
from shared.engine.cuda.vocab_masks import Bits, SlotMask, VocabMasks, mask_words
from shared.engine.sampling.grammars import Grammars
from shared.engine.sampling.masks import NOTHING_ALLOWED, Constraints
from shared.engine.sampling.sampler import Sampler
from shared.primitives.errors import InvariantError
from shared.wire.grammar import Grammar
from shared.wire.sampling_params import SamplingParams
from tests.byte_tokenizer import EOS, VOCAB_SIZE

SCHEMA = Grammar("json", '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}')
WORD = Grammar("regex", "[a-z]{2,9}")


@pytest.fixture
def grammars(tokenizer_json: Path) -> Grammars:
    return Grammars(tokenizer_json, VOCAB_SIZE, {EOS})


def join_of(output: list[int], **asked: object) -> SlotJoin:
    params = SamplingParams(max_new_tokens=99, seed=1, temperature=0.0, **asked)  # type: ignore[arg-type]
    return SlotJoin(0, (), 0, params, prompt_len=2, token_ids=(7, 7, *output))


def mask_of(grammars: Grammars | None, join: SlotJoin) -> SlotMask:
    masks = VocabMasks(VOCAB_SIZE, frozenset({EOS}), grammars)
    masks.join(join)
    ((row, mask),) = masks.of([5, 0, 6])
    assert row == 1
    return mask


def known(mask: SlotMask) -> tuple[Bits, str]:
    found = mask.bits()
    assert found is not None
    return found


def left(mask: SlotMask) -> set[int]:
    bits, why = known(mask)
    assert why == ""
    assert bits.nbytes == 4 * mask_words(VOCAB_SIZE)
    flags = np.unpackbits(bits, bitorder="little")
    assert not flags[VOCAB_SIZE:].any()
    return set(np.flatnonzero(flags).tolist())


def test_what_may_come_is_what_the_sampler_of_a_cpu_leaves(grammars: Grammars) -> None:
    """Step by step; a mask that is made anew in the middle goes on alike."""
    drawn = random.Random(3)
    letters = [token for token in range(VOCAB_SIZE) if token != EOS]
    for _ in range(60):
        grammar = drawn.choice((SCHEMA, WORD, None))
        join = join_of(
            [],
            grammar=grammar,
            allowed_token_ids=() if grammar or drawn.random() < 0.5 else tuple(drawn.sample(letters, 40)),
            bad_words=tuple(
                (drawn.choice(letters),) * drawn.randint(1, 2) for _ in range(drawn.randint(1, 9))
            ),
            min_new_tokens=drawn.choice((0, 6)),
        )
        sampler = Sampler(
            slots=1,
            vocab_size=VOCAB_SIZE,
            eos_token_ids={EOS},
            constraints=Constraints(grammars, VOCAB_SIZE),
        )
        sampler.join(join)
        mask, output = mask_of(grammars, join), []
        for place in range(12):
            logits = torch.rand(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(place))
            wanted = logits.clone()
            (token,) = sampler.sample(logits, torch.tensor([0]), torch.tensor([2 + place])).tolist()
            assert sampler.failed == {}
            may_come = {at for at, value in enumerate(logits[0].tolist()) if value > -np.inf}
            # `adjustments` masks these
            early = set() if grammar or place >= join.params.min_new_tokens else {EOS}
            assert left(mask) - early == may_come
            assert token == max(sorted(may_come), key=lambda at: float(wanted[0, at]))
            output.append(token)
            mask.take(token)
            if token == EOS:
                break
            assert left(mask_of(grammars, join_of(output, **asked_of(join.params)))) == left(mask)


def asked_of(params: SamplingParams) -> dict[str, object]:
    names = ("grammar", "allowed_token_ids", "bad_words", "min_new_tokens")
    return {name: getattr(params, name) for name in names}


def test_an_end_ends_the_grammar(grammars: Grammars) -> None:
    mask = mask_of(grammars, join_of([], grammar=WORD))
    mask.take(EOS)
    assert not mask.follows_output
    assert left(mask) == set(range(VOCAB_SIZE))


@pytest.mark.parametrize("grammar", [Grammar("json", '{"$ref": "#"}'), Grammar("regex", r"[^\s\S]")])
def test_a_grammar_that_allows_nothing_says_so_once(grammars: Grammars, grammar: Grammar) -> None:
    mask = mask_of(grammars, join_of([], grammar=grammar))
    bits, why = known(mask)
    assert why
    assert np.unpackbits(bits).sum() == VOCAB_SIZE  # the row has a token, which is discarded
    assert known(mask)[1] == ""


def test_a_grammar_of_masked_tokens_alone_says_so(grammars: Grammars, tokenizer_json: Path) -> None:
    (t,) = Tokenizer.from_file(str(tokenizer_json)).encode("t").ids
    mask = mask_of(grammars, join_of([], grammar=Grammar("regex", "t"), bad_words=((t,),)))
    assert known(mask)[1] == NOTHING_ALLOWED


def test_a_slot_that_is_taken_anew_has_the_mask_of_its_new_request(grammars: Grammars) -> None:
    masks = VocabMasks(VOCAB_SIZE, frozenset({EOS}), grammars)
    masks.join(join_of([], grammar=WORD))
    masks.join(join_of([]))
    assert masks.of([0]) == []


def test_an_engine_without_grammars_takes_none() -> None:
    with pytest.raises(InvariantError, match="grammar"):
        mask_of(None, join_of([], grammar=WORD))
