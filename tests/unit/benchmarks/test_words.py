"""Prompts have the number of tokens that they should have, by the tokenizer of the default model."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer

from shared.engine.gguf.convert import DEFAULT_MODEL
from shared.local.model_store import resolve
from tests.benchmarks.client.words import WORDS, DrawnPrompts


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    folder = resolve(DEFAULT_MODEL, lambda _: None)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def test_every_word_is_one_token_alone_and_after_a_space(tokenizer: Tokenizer) -> None:
    split = [
        word for word in WORDS if len(tokenizer.encode(word)) != 1 or len(tokenizer.encode(f" {word}")) != 1
    ]
    assert split == []
    assert len(set(WORDS)) == len(WORDS) > 200


@pytest.mark.parametrize("tokens", [1, 2, 17, 512, 4000])
def test_a_prompt_has_as_many_tokens_as_asked(tokenizer: Tokenizer, tokens: int) -> None:
    assert len(tokenizer.encode(DrawnPrompts("seed").draw(tokens))) == tokens


def test_prompts_behind_a_prefix_share_its_tokens_and_no_more(tokenizer: Tokenizer) -> None:
    prompts = DrawnPrompts("seed")
    prefix = prompts.draw(100)
    shared = tokenizer.encode(prefix).ids
    ends = [tokenizer.encode(prompts.draw(12, prefix)).ids for _ in range(2)]
    assert [ids[:100] for ids in ends] == [shared, shared]
    assert [len(ids) for ids in ends] == [112, 112]
    assert ends[0][100:] != ends[1][100:]


def test_a_seed_says_the_prompts() -> None:
    assert DrawnPrompts("a").draw(32) == DrawnPrompts("a").draw(32)
    assert DrawnPrompts("a").draw(32)[:16] != DrawnPrompts("b").draw(32)[:16]
