"""Text that grows token by token: complete characters only, and in the end exactly what all tokens decode to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers

from router.text.detokenizer import BROKEN, CONTEXT_TOKENS, PENDING_TOKENS_MAX, Detokenizer
from tests.unit.router.tiny_model import CORPUS, END_ID, SPECIAL, byte_fallback, byte_level

BYTE_LEVEL, BYTE_FALLBACK = byte_level(CORPUS), byte_fallback()
SPECIAL_IDS = frozenset(range(len(SPECIAL)))
CUTS = st.lists(st.integers(1, 5), min_size=1)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40) | st.text("aé日🙂 \n", max_size=40)


class Decoding:
    """`Decoder` over a bare tokenizer."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))


def cut(token_ids: Sequence[int], cuts: Sequence[int]) -> list[Sequence[int]]:
    """`token_ids` in pieces of the lengths in `cuts`, again and again."""
    pieces, at, turn = [], 0, 0
    while at < len(token_ids):
        length = cuts[turn % len(cuts)]
        pieces.append(token_ids[at : at + length])
        at, turn = at + length, turn + 1
    return pieces


def ids_of(tokenizer: Tokenizer, tokens: Sequence[str]) -> list[int]:
    vocabulary = tokenizer.get_vocab()
    return [vocabulary[token] for token in tokens]


def pieces_of(tokenizer: Tokenizer, token_ids: Sequence[int], cuts: Sequence[int] = (1,)) -> list[str]:
    detokenizer = Detokenizer(Decoding(tokenizer), SPECIAL_IDS if tokenizer is BYTE_LEVEL else ())
    pieces = [detokenizer.push(ids) for ids in cut(token_ids, cuts)]
    return [*pieces, detokenizer.finish()]


@given(TEXTS, CUTS)
@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte level", "byte fallback"])
def test_the_pieces_of_a_text_join_to_the_text_and_break_no_character(
    tokenizer: Tokenizer, text: str, cuts: list[int]
) -> None:
    token_ids = tokenizer.encode(text).ids
    whole = Decoding(tokenizer).decode(token_ids)
    pieces = pieces_of(tokenizer, token_ids, cuts)
    assert "".join(pieces) == whole
    assert BROKEN in text or BROKEN not in "".join(pieces)


@given(st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() - 1), max_size=60), CUTS)
def test_any_tokens_join_to_what_they_decode_to_however_broken_their_bytes(
    token_ids: list[int], cuts: list[int]
) -> None:
    assert "".join(pieces_of(BYTE_LEVEL, token_ids, cuts)) == Decoding(BYTE_LEVEL).decode(token_ids)


@given(st.lists(st.integers(1, 256), max_size=80), CUTS)
def test_broken_bytes_of_a_byte_fallback_vocabulary_lose_no_text_around_them(
    token_ids: list[int], cuts: list[int]
) -> None:
    around = BYTE_FALLBACK.encode("the end").ids
    joined = "".join(pieces_of(BYTE_FALLBACK, [*token_ids, *around], cuts))
    assert joined.endswith("the end")


def test_a_character_of_four_tokens_comes_with_its_last_one() -> None:
    token_ids = ids_of(BYTE_LEVEL, _byte_tokens("🦊"))
    assert pieces_of(BYTE_LEVEL, token_ids) == ["", "", "", "🦊", ""]


def test_an_incomplete_character_at_the_end_is_emitted_once() -> None:
    token_ids = ids_of(BYTE_LEVEL, _byte_tokens("a🦊"))[:-1]
    assert pieces_of(BYTE_LEVEL, token_ids) == ["a", "", "", "", BROKEN]


def test_broken_bytes_without_end_neither_wait_nor_pile_up() -> None:
    detokenizer = Detokenizer(Decoding(BYTE_LEVEL))
    broken = ids_of(BYTE_LEVEL, _byte_tokens("ÿ"))[0]
    emitted = sum(len(detokenizer.push([broken])) for _ in range(1000))
    assert emitted >= 1000 - PENDING_TOKENS_MAX
    assert len(detokenizer._window) <= 2 * PENDING_TOKENS_MAX
    assert emitted + len(detokenizer.finish()) == 1000


def test_special_tokens_have_no_text() -> None:
    token_ids = [END_ID, *BYTE_LEVEL.encode("fox").ids, END_ID]
    assert "".join(pieces_of(BYTE_LEVEL, token_ids)) == "fox"


def test_a_continuation_keeps_the_space_that_a_beginning_would_lose() -> None:
    context = BYTE_FALLBACK.encode("the").ids
    new = ids_of(BYTE_FALLBACK, ["▁the"])
    assert Detokenizer(Decoding(BYTE_FALLBACK), context=context).push(new) == " the"
    assert Detokenizer(Decoding(BYTE_FALLBACK)).push(new) == "the"


class ReadCounts(Sequence[int]):
    """A long prompt that counts the tokens read of it."""

    def __init__(self, token_ids: Sequence[int]):
        self._token_ids = token_ids
        self.reads = 0

    def __len__(self) -> int:
        return len(self._token_ids)

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[int]: ...
    def __getitem__(self, at: int | slice) -> int | Sequence[int]:
        self.reads += 1 if isinstance(at, int) else len(self._token_ids[at])
        return self._token_ids[at]


def test_of_a_long_prompt_only_the_end_is_read() -> None:
    prompt = ReadCounts(BYTE_LEVEL.encode("the quick brown fox " * 500 + "the lazy").ids)
    detokenizer = Detokenizer(Decoding(BYTE_LEVEL), SPECIAL_IDS, context=prompt)
    assert detokenizer.push(BYTE_LEVEL.encode(" dog").ids) == " dog"
    assert prompt.reads <= CONTEXT_TOKENS + 1


def _byte_tokens(text: str) -> list[str]:
    split = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)
    return [byte for piece, _ in split for byte in piece]
