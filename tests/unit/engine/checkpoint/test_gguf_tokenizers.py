"""A converted GGUF file's tokenizer splits text as llama.cpp does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from gguf import GGUFWriter
from tokenizers import Tokenizer

from shared.engine.gguf.convert import convert
from tests.unit.engine.checkpoint.tiny_gguf import byte_level, pieces, write_tiny_gguf

SPACED = [
    ("the", ["▁the"]),
    ("<s>the</s>the the", ["<s>", "▁the", "</s>", "▁the", "▁the"]),
    ("<s> the", ["<s>", "▁", "▁the"]),
]
PLAIN = [("the", ["t", "he"]), ("<s>the</s>the the", ["<s>", "t", "he", "</s>", "t", "he", "▁the"])]


def converted(folder: Path, describe: Callable[[GGUFWriter], None]) -> Tokenizer:
    """Of a file with this tokenizer."""
    write_tiny_gguf(folder / "tiny.gguf", "llama", describe=describe)
    model = convert(folder / "tiny.gguf", folder / "model", lambda *_: None)
    return Tokenizer.from_file(str(model / "tokenizer.json"))


@pytest.mark.parametrize("spaced", [None, True, False])
def test_a_space_goes_before_each_text_behind_a_special_token(spaced: bool | None, tmp_path: Path) -> None:
    """As of Llama 2, TinyLlama and Mistral 7B, unless the file says otherwise."""

    def describe(writer: GGUFWriter) -> None:
        pieces(writer)
        if spaced is not None:
            writer.add_add_space_prefix(spaced)

    tokenizer = converted(tmp_path, describe)
    for text, tokens in PLAIN if spaced is False else SPACED:
        assert tokenizer.encode(text, add_special_tokens=False).tokens == tokens
    ids = tokenizer.encode("the the", add_special_tokens=False).ids
    assert tokenizer.decode(ids) == "the the"


@pytest.mark.parametrize(("words", "tokens"), [("llama-bpe", ["th", "he"]), ("qwen2", ["th", "h", "e"])])
def test_a_word_of_llama_3_is_a_token_before_merges_are_looked_at(
    words: str, tokens: list[str], tmp_path: Path
) -> None:
    """No merge makes "he": in Llama 3's vocabulary some tokens are no merges of others."""

    def describe(writer: GGUFWriter) -> None:
        byte_level(writer, "he")
        writer.add_tokenizer_pre(words)

    tokenizer = converted(tmp_path, describe)
    assert [each for text in ("th", "he") for each in tokenizer.encode(text).tokens] == tokens
