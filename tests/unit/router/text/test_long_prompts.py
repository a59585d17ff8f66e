"""A text that is too long costs no more than what shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from router.text.tokenizer import CHARS_PER_TOKEN, Tokenizer, TooLongError


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
