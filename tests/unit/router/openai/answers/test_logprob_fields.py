"""Logprobs as clients get them: one entry a token, with its bytes and its place in the text, streamed or whole."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import openai
import pytest

from router.text.tokenizer import Tokenizer
from tests.unit.router.scripted_workers import MODEL, RunningRouter, Script
from tests.unit.router.tiny_model import END_ID

TEXT = "the quick 🙂 brown fox"
USER: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture(autouse=True)
def output(router: RunningRouter, tokenizer: Tokenizer) -> tuple[int, ...]:
    output = (*tokenizer.encode(TEXT, add_special_tokens=False), END_ID)
    router.workers.script = Script(output=lambda _: output, tokens_a_row=2)
    return output


def chat_entries(client: openai.OpenAI, stream: bool, **fields: Any) -> list[Any]:
    answer: Any = client.chat.completions.create(
        model=MODEL, messages=USER, logprobs=True, stream=stream, **fields
    )
    if not stream:
        return list(answer.choices[0].logprobs.content)
    told = [choice.logprobs for chunk in answer for choice in chunk.choices]
    return [entry for each in told if each for entry in each.content]


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_has_an_entry_for_each_token(
    client: openai.OpenAI, output: tuple[int, ...], stream: bool
) -> None:
    entries = chat_entries(client, stream, top_logprobs=2)
    assert [entry.logprob for entry in entries] == [-token_id / 8 for token_id in output]
    whole = b"".join(bytes(entry.bytes) for entry in entries[:-1])
    assert whole.decode() == TEXT
    assert [len(entry.top_logprobs) for entry in entries] == [2] * len(output)
    assert entries[0].top_logprobs[0].token == entries[0].token


def test_a_token_that_is_half_a_character_shows_its_bytes(client: openai.OpenAI) -> None:
    halves = [entry for entry in chat_entries(client, False) if "\N{REPLACEMENT CHARACTER}" in entry.token]
    assert halves
    assert all(entry.bytes for entry in halves)


@pytest.mark.parametrize("stream", [False, True])
def test_a_completion_says_where_each_token_begins(
    client: openai.OpenAI, output: tuple[int, ...], tokenizer: Tokenizer, stream: bool
) -> None:
    answer: Any = client.completions.create(
        model=MODEL, prompt="fox", max_tokens=99, logprobs=1, stream=stream
    )
    choices = [choice for chunk in answer for choice in chunk.choices] if stream else answer.choices
    told = [choice.logprobs for choice in choices if choice.logprobs]
    tokens = [token for each in told for token in each.tokens]
    offsets = [offset for each in told for offset in each.text_offset]
    assert len(tokens) == len(output)
    plain = [tokenizer.decode([token_id]) for token_id in output[:-1]]
    whole = all("\N{REPLACEMENT CHARACTER}" not in text for text in plain)
    assert not whole, "the text has a character of several tokens"
    upto = next(at for at, text in enumerate(plain) if "\N{REPLACEMENT CHARACTER}" in text)
    assert offsets[: upto + 1] == [0, *accumulate(map(len, plain[:upto]))]
    assert offsets == sorted(offsets)
    top = [entry for each in told for entry in each.top_logprobs]
    assert all(token in entry for token, entry in zip(tokens, top, strict=True))


def test_tokens_may_be_shown_by_their_ids(client: openai.OpenAI, output: tuple[int, ...]) -> None:
    entries = chat_entries(client, False, extra_body={"return_tokens_as_token_ids": True})
    assert [entry.token for entry in entries] == [f"token_id:{token_id}" for token_id in output]


def test_a_stop_string_takes_the_entries_behind_it_along(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=USER, logprobs=True, stop="quick")
    assert answer.choices[0].message.content == "the "
    assert answer.choices[0].logprobs is not None
    entries = answer.choices[0].logprobs.content
    assert entries is not None
    text = "".join(entry.token for entry in entries)
    assert text.startswith("the quick")
    assert "fox" not in text


def test_who_does_not_ask_gets_none(client: openai.OpenAI, router: RunningRouter) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=USER)
    assert answer.choices[0].logprobs is None
    assert router.last_prefill.params.logprobs == -1


@pytest.mark.parametrize("row", [1, 3, 99])
def test_what_is_told_of_tokens_ends_with_the_one_that_completes_a_stop_string(
    client: openai.OpenAI, router: RunningRouter, output: tuple[int, ...], tokenizer: Tokenizer, row: int
) -> None:
    """However many a message had: a worker sends those of some milliseconds together."""
    router.workers.script = Script(output=lambda _: output, tokens_a_row=row)
    answer: Any = client.completions.create(
        model=MODEL, prompt="x", max_tokens=99, logprobs=0, stop="qu", extra_body={"return_token_ids": True}
    )
    (choice,) = answer.choices
    told = choice.token_ids
    assert choice.text == "the "
    assert "qu" in tokenizer.decode(told)
    assert "qu" not in tokenizer.decode(told[:-1])
    assert len(choice.logprobs.tokens) == len(told) == answer.usage.completion_tokens
