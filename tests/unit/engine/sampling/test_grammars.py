"""Compiling, keeping and copying grammars; what a matcher does is the library's business, and is not tested again."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from shared.batch.schedule_batch import SlotJoin
from shared.engine.sampling import grammars as module
from shared.engine.sampling.grammars import Grammars
from shared.engine.sampling.masks import NOTHING_ALLOWED, Constraints
from shared.engine.sampling.sampler import Sampler
from shared.limits.grammars import NOTHING_FOLLOWS, library_version, problem
from shared.primitives.errors import InvariantError, ModelError
from shared.wire.grammar import Grammar
from shared.wire.sampling_params import SamplingParams
from tests.byte_tokenizer import EOS, VOCAB_SIZE

TRUE = Grammar("json", '{"type": "boolean"}')
UNKNOWN_RULE = Grammar("lark", 'start: "a" nothing')


@pytest.fixture
def grammars(tokenizer_json: Path) -> Grammars:
    return Grammars(tokenizer_json, VOCAB_SIZE, {EOS})


def ids(tokenizer_json: Path, text: str) -> list[int]:
    return list(Tokenizer.from_file(str(tokenizer_json)).encode(text).ids)


def joined(grammar: Grammar, output: list[int], slot: int = 3) -> SlotJoin:
    """The prompt spells what the grammar would refuse."""
    params = SamplingParams(max_new_tokens=9, seed=1, grammar=grammar)
    return SlotJoin(slot, (), 0, params, prompt_len=2, token_ids=(7, 7, *output))


def allowed(constraints: Constraints, slot: int = 3, ends: tuple[int, ...] | None = None) -> set[int]:
    logits = np.zeros(VOCAB_SIZE, np.float32)
    assert constraints.mask(slot, logits, None if ends is None else np.array(ends)) == ""
    return set(np.flatnonzero(logits == 0).tolist())


def failure(constraints: Constraints, slot: int = 3) -> str:
    why = constraints.mask(slot, np.zeros(VOCAB_SIZE, np.float32), None)
    assert why is not None
    return why


def until_ready(grammars: Grammars, grammar: Grammar) -> None:
    grammars.prepare(grammar)
    done = threading.Event()
    while not grammars.ready(grammar):
        done.wait(0.001)


def test_a_prepared_grammar_is_ready_and_sound(grammars: Grammars) -> None:
    until_ready(grammars, TRUE)
    assert grammars.error(TRUE) == ""


def test_a_grammar_that_cannot_be_compiled_says_why(grammars: Grammars) -> None:
    until_ready(grammars, UNKNOWN_RULE)
    assert "nothing" in grammars.error(UNKNOWN_RULE)
    assert "nothing" in problem(UNKNOWN_RULE)
    assert problem(TRUE) == ""
    assert problem(Grammar("json", "[1]")) != ""


def test_a_grammar_is_compiled_once(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    until_ready(grammars, TRUE)
    monkeypatch.setattr(module, "compiled", None)  # whoever compiles now fails
    until_ready(grammars, TRUE)
    assert grammars.matcher(TRUE) is not grammars.matcher(TRUE)


def test_what_is_kept_is_bounded(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CACHED_GRAMMARS_MAX", 3)
    for number in range(9):
        assert grammars.error(Grammar("regex", f"a{{{number}}}")) == ""
    assert grammars.nbytes <= 3 * (module.GRAMMAR_BYTES + 4 * 10)
    monkeypatch.setattr(module, "CACHED_GRAMMARS_BYTES_MAX", 0)
    assert grammars.error(TRUE) == ""
    assert grammars.nbytes == 0


def test_the_compiling_thread_is_nicer_than_its_process(grammars: Grammars) -> None:
    until_ready(grammars, TRUE)
    assert grammars._thread is not None
    assert grammars._thread.native_id is not None
    own = os.getpriority(os.PRIO_PROCESS, 0)
    theirs = os.getpriority(os.PRIO_PROCESS, grammars._thread.native_id)
    assert theirs == min(19, own + module.NICER)


def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Grammars(tmp_path / "tokenizer.json", VOCAB_SIZE, {EOS})


def test_a_matcher_is_made_of_the_output_alone_wherever_a_request_goes_on(
    grammars: Grammars, tokenizer_json: Path
) -> None:
    whole, joining = Constraints(grammars, VOCAB_SIZE), Constraints(grammars, VOCAB_SIZE)
    schema = Grammar(
        "json", '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
    )
    answer = ids(tokenizer_json, '{"a": 12}')
    whole.join(joined(schema, []))
    for at, token in enumerate(answer):
        joining.join(joined(schema, answer[:at]))
        assert token in allowed(whole)
        assert allowed(joining) == allowed(whole)
        whole.take([2, 3], [5, token])
    assert allowed(whole) == {EOS}


def test_a_row_past_its_end_finds_no_grammar(grammars: Grammars, tokenizer_json: Path) -> None:
    constraints = Constraints(grammars, VOCAB_SIZE)
    constraints.join(joined(TRUE, ids(tokenizer_json, "true")))
    constraints.take([3], [EOS])
    assert 3 not in constraints


def test_output_that_the_grammar_refuses_is_an_error(grammars: Grammars, tokenizer_json: Path) -> None:
    constraints = Constraints(grammars, VOCAB_SIZE)
    constraints.join(joined(TRUE, ids(tokenizer_json, "x")))
    assert failure(constraints)
    assert 3 not in constraints


@pytest.mark.parametrize("grammar", [Grammar("json", '{"$ref": "#"}'), Grammar("regex", r"[^\s\S]")])
def test_a_grammar_that_allows_nothing_is_an_error_and_no_token(grammars: Grammars, grammar: Grammar) -> None:
    constraints = Constraints(grammars, VOCAB_SIZE)
    constraints.join(joined(grammar, []))
    assert failure(constraints) == NOTHING_FOLLOWS
    assert 3 not in constraints


def test_a_slot_without_a_grammar_has_no_matcher(grammars: Grammars) -> None:
    constraints = Constraints(grammars, VOCAB_SIZE)
    constraints.join(joined(TRUE, []))
    constraints.join(SlotJoin(3, (), 0, SamplingParams(max_new_tokens=1, seed=1), 2))
    assert 3 not in constraints
    assert not constraints


def test_the_version_names_library_and_engine() -> None:
    assert library_version().startswith("llguidance@1.9")


def test_ends_that_may_not_come_yet_yield_where_nothing_else_is_allowed(
    grammars: Grammars, tokenizer_json: Path
) -> None:
    constraints = Constraints(grammars, VOCAB_SIZE)
    constraints.join(joined(Grammar("regex", "tx?"), ids(tokenizer_json, "t")))
    (x,) = ids(tokenizer_json, "x")
    assert allowed(constraints) == {EOS, x}
    assert allowed(constraints, ends=(EOS,)) == {x}
    constraints.take([3], [x])
    assert allowed(constraints, ends=(EOS,)) == {EOS}


def test_what_others_have_masked_and_the_grammar_leaves_nothing(
    grammars: Grammars, tokenizer_json: Path
) -> None:
    constraints = Constraints(grammars, VOCAB_SIZE)
    constraints.join(joined(Grammar("regex", "t"), []))
    logits = np.zeros(VOCAB_SIZE, np.float32)
    logits[ids(tokenizer_json, "t")] = -np.inf
    assert constraints.mask(3, logits, None) == NOTHING_ALLOWED


def test_an_engine_without_grammars_takes_none() -> None:
    with pytest.raises(InvariantError, match="grammar"):
        Constraints(None, VOCAB_SIZE).join(joined(TRUE, []))


def test_a_sampler_uses_the_constraints_that_it_is_given(grammars: Grammars, tokenizer_json: Path) -> None:
    constraints = Constraints(grammars, VOCAB_SIZE)
    sampler = Sampler(slots=4, vocab_size=VOCAB_SIZE, eos_token_ids={EOS}, constraints=constraints)
    params = SamplingParams(max_new_tokens=9, seed=1, temperature=1.0, grammar=Grammar("regex", "tx"))
    sampler.join(SlotJoin(3, (), 0, params, prompt_len=2, token_ids=(7, 7)))
    sampled = []
    for position in range(3):
        logits = torch.zeros(1, VOCAB_SIZE)
        sampled += sampler.sample(logits, torch.tensor([3]), torch.tensor([2 + position])).tolist()
        assert sampler.failed == {}
    assert sampled == [*ids(tokenizer_json, "t"), *ids(tokenizer_json, "x"), EOS]


def test_a_row_without_a_token_is_named_and_spoils_no_other(grammars: Grammars) -> None:
    sampler = Sampler(
        slots=4, vocab_size=VOCAB_SIZE, eos_token_ids={EOS}, constraints=Constraints(grammars, VOCAB_SIZE)
    )
    for slot, grammar in ((2, Grammar("json", '{"$ref": "#"}')), (3, TRUE)):
        params = SamplingParams(max_new_tokens=9, seed=1, temperature=1.0, grammar=grammar)
        sampler.join(SlotJoin(slot, (), 0, params, prompt_len=2, token_ids=(7, 7)))
    tokens = sampler.sample(torch.zeros(2, VOCAB_SIZE), torch.tensor([2, 3]), torch.tensor([2, 2]))
    assert list(sampler.failed) == [0]
    assert 0 <= int(tokens[0]) < VOCAB_SIZE
