"""A long text that is encoded in slices has the ids of the whole text, for every shape of tokenizer."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from router.text.split_points import SLICE_BYTES, NoSplitPointError, SplitPoints, find_split_points
from router.text.tokenizer import CHARS_PER_TOKEN, Tokenizer, TooLongError
from tests.unit.router.tokenizer_shapes import CORPUS, CUTTABLE, shaped, superwords

WORDS = [word for line in CORPUS for word in line.split()]
SPACES = [" ", "  ", "\n", "\n\n", " \n", "\n ", "\t", "\r\n", "\u00a0", "\u3000"]
PARTS = (
    st.sampled_from(
        [*WORDS, *SPACES, *SPACES, "a", "e\u0301", "\u0301", "\u1161", "<|end|>", "'s", "7", "▁", "Ġ", "_"]
    )
    | st.integers(0, 10**6).map(str)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
)
TEXTS = st.lists(PARTS, max_size=80).map("".join)


def encode(tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def split_points_of(tokenizer: tokenizers.Tokenizer) -> SplitPoints:
    added = tokenizer.get_added_tokens_decoder()
    vocabulary = [[token_id] for token_id in tokenizer.get_vocab().values() if token_id not in added]
    return find_split_points(
        lambda text: encode(tokenizer, text),
        tokenizer.decode_batch(vocabulary),
        [token.content for token in added.values()],
    )


@cache
def split_points(name: str) -> SplitPoints:
    return split_points_of(shaped(name))


@settings(max_examples=60, deadline=None)
@given(TEXTS, st.integers(20, 120))
@pytest.mark.parametrize("name", CUTTABLE)
def test_slices_have_the_ids_of_the_whole_text(name: str, text: str, chars_max: int) -> None:
    ids: list[int] = []
    try:
        for part in split_points(name).slices(text, chars_max):
            assert len(part) <= chars_max
            ids += encode(shaped(name), part)
    except NoSplitPointError:
        return  # another test shows that ordinary text is cut
    assert ids == encode(shaped(name), text)


@pytest.mark.parametrize("name", CUTTABLE)
def test_ordinary_text_is_cut_into_many_slices(name: str) -> None:
    text = "".join(CORPUS[:3]) * 20
    slices = list(split_points(name).slices(text, 200))
    assert len(slices) > len(text) / 200
    assert [token_id for part in slices for token_id in encode(shaped(name), part)] == encode(
        shaped(name), text
    )


def test_a_text_without_spaces_is_cut_at_line_breaks() -> None:
    text = "中文文本。没有空格。\n" * 50
    assert len(list(split_points("llama3").slices(text, 100))) >= 5


PARAGRAPHS = st.lists(st.text("日本語中文かなカナ。、「」", min_size=1, max_size=40), min_size=8).map(
    "\n\n".join
)


@settings(max_examples=60, deadline=None)
@given(PARAGRAPHS.filter(lambda text: re.search(r"\n\w", text)))
@pytest.mark.parametrize("name", ["gpt2", "smollm", "llama3", "o200k", "qwen"])
def test_paragraphs_without_spaces_are_cut_at_blank_lines(name: str, text: str) -> None:
    paragraphs = "日本語のテキスト。\n\n中文文本\n\n" + text
    slices = list(split_points(name).slices(paragraphs + "\n\n" + "。" * 200, len(paragraphs) + 200))
    assert len(slices) > 1
    ids = [token_id for part in slices for token_id in encode(shaped(name), part)]
    assert ids == encode(shaped(name), "".join(slices))


def test_a_tokenizer_whose_tokens_span_words_is_never_cut() -> None:
    cuts = split_points_of(superwords())
    assert list(cuts.slices("word " * 20, 100)) == ["word " * 20]
    with pytest.raises(NoSplitPointError):
        list(cuts.slices("word " * 21, 100))


def test_a_slice_is_bounded_in_bytes_too() -> None:
    text = "🙂" * 1000 + " x" * SLICE_BYTES
    slices = list(split_points("gpt2").slices(text, SLICE_BYTES))
    assert "".join(slices) == text
    assert max(len(part.encode()) for part in slices) <= SLICE_BYTES


def test_a_long_word_without_a_seam_is_refused_with_its_bound() -> None:
    with pytest.raises(NoSplitPointError) as caught:
        list(split_points("gpt2").slices("7" * 101, 100))
    assert caught.value.chars == 100


# ---- a text that is too long costs no more than what shows it --------------------------------------------------------


def test_a_text_is_tokenized_only_until_there_are_too_many_tokens(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer(model_folder, template_seconds_max=5)
    tokenized: list[int] = []  # characters
    encode_once = tokenizer._encode_once

    def count(text: str, backend: Any = None) -> list[int]:
        tokenized.append(len(text))
        return encode_once(text, backend)

    monkeypatch.setattr(tokenizer, "_encode_once", count)
    tokens_max = 100
    with pytest.raises(TooLongError):
        tokenizer.encode("fox " * 100_000, tokens_max=tokens_max)
    assert 0 < sum(tokenized) <= 2 * CHARS_PER_TOKEN * tokens_max
