"""Thirty prompts that differ in what can go wrong: length around pages, scripts, shared prefixes, chunks."""

from __future__ import annotations

from itertools import cycle, islice
from pathlib import Path

from tokenizers import Tokenizer

PAGE_SIZE = 16
_TEXTS = (
    "The lighthouse keeper wrote one line in the log every night: ",
    "def fibonacci(n):\n    ",
    "Die Straße führt über die Brücke nach ",
    "東京の天気は今日とても",
    "Привет, как дела? Сегодня мы ",
    "😀 emoji and accents: café, naïve, ",
    "1, 1, 2, 3, 5, 8, 13, ",
)
_EXACT = (1, 2, PAGE_SIZE - 1, PAGE_SIZE, PAGE_SIZE + 1, 4 * PAGE_SIZE - 1, 4 * PAGE_SIZE, 4 * PAGE_SIZE + 1)
_LONG = (127, 128, 777, 1000)  # around and above one chunk
_VERY_LONG = (2047, 2048, 3000)


def varied_prompts(model: Path) -> list[list[int]]:
    """Thirty prompts as token ids, 1 to 3,000 tokens long."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    story = tokenizer.encode(_story()).ids

    def cut(length: int, start: int = 0) -> list[int]:
        return list(islice(cycle(story[start:] + story[:start]), length))

    texts = [tokenizer.encode(text).ids for text in _TEXTS]
    exact = [cut(length, 5 * length) for length in _EXACT]
    long = [cut(length, length) for length in _LONG + _VERY_LONG]
    shared = [cut(160) + texts[k] for k in range(5)]  # one prefix of ten pages, five endings
    turns = [cut(48) + texts[0] + cut(k, 31) for k in (3, 30, 90)]
    prompts = texts + exact + long + shared + turns
    assert len(prompts) == 30
    return prompts


def _story() -> str:
    nouns = ("harbour", "engine", "letter", "garden", "clock", "river", "violin", "map", "winter", "bridge")
    verbs = ("carried", "remembered", "opened", "repaired", "followed", "measured", "painted")
    sentences = (
        f"The {nouns[k % 10]} {verbs[k % 7]} the {nouns[(3 * k + 1) % 10]} number {k}, and nobody asked why. "
        for k in range(150)
    )
    return "".join(sentences)
