"""What an answer will hold is reckoned before it is computed, is no less than what it holds, and has a budget."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.access.byte_budget import ByteBudget
from router.openai.answers.answer_bytes import FREE_BYTES, STEP_BYTES, AskedAnswer, HeldBytes
from router.openai.answers.kept_answer import KeptAnswer, KeptChoice
from router.openai.answers.logprob_objects import LogprobObjects, PackedList, TokenBytes, TokenEntry
from router.openai.answers.openai_objects import PromptTexts
from router.openai.answers.prompt_echo import EchoedText, PromptEcho
from router.openai.answers.response_stream import TextDelta
from router.replies import OverloadedError
from router.text.tokenizer import Tokenizer
from shared.primitives.errors import RequestError
from shared.wire.sampled import TokenLogprobs
from tests.fuzzing import fuzzed
from tests.unit.router.scripted_workers import MODEL, RunningRouter

MIB = 1 << 20
NOTHING = AskedAnswer(
    prompts=[10],
    choices=1,
    output_tokens=100,
    limited=True,
    likeliest=-1,
    echoes=False,
    echo_likeliest=-1,
    scored_likeliest=-1,
    stream=False,
    typed=False,
)
VOCABULARY = 1 << 21


def score(token_id: int, likeliest: int) -> TokenLogprobs:
    """As large as one can be: all figures have all their digits."""
    top = tuple((VOCABULARY - 1 - at, -12.345678901234567 - at / 3) for at in range(likeliest))
    return TokenLogprobs(-12.345678901234567 - token_id, VOCABULARY - 1, top)


def test_nothing_is_reckoned_of_an_answer_that_tells_of_no_token() -> None:
    assert NOTHING.prompt_bytes() == NOTHING.output_bytes() == 0


def test_a_stream_holds_no_output_unless_its_last_events_repeat_it() -> None:
    told = replace(NOTHING, likeliest=20)
    assert replace(told, stream=True).output_bytes() == 0
    assert replace(told, stream=True, typed=True).output_bytes() > told.output_bytes() > 0


def test_every_multiplier_counts() -> None:
    told = replace(NOTHING, likeliest=20, scored_likeliest=20)
    outputs, tellings = told.output_bytes(), told.prompt_bytes()
    assert replace(told, choices=64).output_bytes() == 64 * outputs
    assert replace(told, prompts=[10] * 64).output_bytes() == 64 * outputs
    assert replace(told, prompts=[10] * 64).prompt_bytes() == 64 * tellings
    assert replace(told, output_tokens=200).output_bytes() == 2 * outputs
    assert replace(told, likeliest=0).output_bytes() < outputs / 3
    assert replace(told, scored_likeliest=0).prompt_bytes() < tellings / 5
    two, many = (replace(told, choices=count).prompt_bytes() for count in (2, 64))
    assert tellings < two == many, "a prompt is told from one text, however many choices show it"


@fuzzed
@given(st.integers(2, 60), st.integers(1, 3), st.integers(0, 20), st.booleans(), st.booleans())
def test_no_less_is_reckoned_of_a_prompt_than_is_held(
    tokens: int, choices: int, likeliest: int, echoes: bool, tells: bool
) -> None:
    asked = replace(
        NOTHING,
        prompts=[tokens * 50],
        choices=choices,
        echoes=echoes,
        echo_likeliest=likeliest if echoes else -1,
        scored_likeliest=likeliest if tells or not echoes else -1,
    )
    ids = tuple(range(1, tokens * 50 + 1))
    scores = PackedList(TokenLogprobs, likeliest)
    echo = EchoedText()
    if echoes:
        echo = EchoedText("word" * len(ids))
        echo.lengths.extend([4] * len(ids))
    prompt = PromptEcho(
        ids,
        echo if echoes else None,
        asked.echo_likeliest,
        asked.scored_likeliest >= 0,
        True,
        choices,
        scores,
    )
    for begin in range(1, len(ids), 256):
        scores.add([score(one, likeliest) for one in ids[begin : begin + 256]])
    held = scores.held_bytes + len(echo.text) + echo.lengths.itemsize * len(echo.lengths)
    if choices > 1:
        texts = PromptTexts(prompt, LogprobObjects(FourLetters()))
        held += sum(len(text) for each in (*texts.echo.values(), texts.logprobs) for text in each)
    assert held <= asked.prompt_bytes()


class FourLetters(TokenBytes):
    """Tokens of a space and four letters."""

    def __init__(self) -> None:
        super().__init__(lambda: "")

    def of(self, token_id: int) -> bytes:
        return b" %04x" % (token_id % 65536)


@fuzzed
@given(st.integers(1, 40), st.integers(1, 3), st.integers(0, 20))
def test_no_less_is_reckoned_of_an_output_than_is_held(tokens: int, choices: int, likeliest: int) -> None:
    asked = replace(NOTHING, choices=choices, output_tokens=tokens, likeliest=likeliest)
    budget = ByteBudget(MIB, "full", "bytes")
    with budget.hold("a") as holding:
        kept = KeptAnswer((), likeliest, HeldBytes(holding, asked, MIB))
        for at in range(tokens):
            entries = (TokenEntry(VOCABULARY - 1, at * 4, score(at, likeliest)),)
            kept.add(TextDelta(index, "", entries=entries) for index in range(choices))
        assert sum(choice.entries.held_bytes for choice in kept.choices()) <= asked.output_bytes()


def test_an_answer_beyond_what_one_may_hold_is_refused_by_its_fields_and_figures() -> None:
    asked = replace(NOTHING, prompts=[8000] * 8, choices=8, likeliest=20, scored_likeliest=20)
    asked.check(64 * MIB)
    with pytest.raises(RequestError) as refused:
        asked.check(32 * MIB)
    error = refused.value
    assert (error.status, error.code, error.param) == (400, "answer_too_large", "prompt_logprobs")
    for figure in ("8 prompts of 64000 tokens", "n 8", "prompt_logprobs 20", "max_tokens 100", "32.0 MiB"):
        assert figure in error.message
    with pytest.raises(RequestError) as refused:
        replace(NOTHING, choices=64, output_tokens=8000, likeliest=20).check(32 * MIB)
    assert refused.value.param == "max_tokens"


def test_an_output_without_a_limit_is_reckoned_as_a_usual_one_and_counted_as_it_comes() -> None:
    unlimited = replace(NOTHING, likeliest=20, output_tokens=120_000, limited=False)
    unlimited.check(32 * MIB)
    budget = ByteBudget(8 * MIB, "full", "bytes")
    with budget.hold("a") as holding:
        held = HeldBytes(holding, unlimited, 2 * MIB)
        before = budget.held_bytes
        held.grow(before)
        assert budget.held_bytes == before
        held.grow(1)
        assert budget.held_bytes == before + STEP_BYTES
        with pytest.raises(RequestError) as refused:
            held.grow(2 * MIB)
    assert refused.value.code == "answer_too_large"
    assert budget.held_bytes == 0


def test_a_short_answer_is_served_however_full_the_budget_is() -> None:
    budget = ByteBudget(MIB, "full", "bytes")
    with budget.hold("a") as others, budget.hold("b") as more, budget.hold("c") as holding:
        others.add(MIB // 2)
        more.add(MIB // 2)
        held = HeldBytes(holding, NOTHING, MIB // 4)
        held.grow(FREE_BYTES)
        with pytest.raises(OverloadedError, match="full"):
            held.grow(1)
    assert budget.held_bytes == 0


def test_what_an_answer_repeats_of_its_request_counts_beside_what_comes() -> None:
    budget = ByteBudget(8 * MIB, "full", "bytes")
    with budget.hold("a") as holding:
        held = HeldBytes(holding, replace(NOTHING, repeated_bytes=MIB), 2 * MIB)
        assert MIB <= budget.held_bytes + FREE_BYTES <= MIB + STEP_BYTES
        before = budget.held_bytes
        held.reach(MIB // 2)
        assert budget.held_bytes >= before + MIB // 2
        with pytest.raises(RequestError):
            held.reach(MIB + 1)
    with budget.hold("a") as holding, pytest.raises(RequestError) as refused:
        HeldBytes(holding, replace(NOTHING, repeated_bytes=MIB), MIB // 2)
    assert (refused.value.status, budget.held_bytes) == (400, 0)


def test_text_of_many_pieces_counts_as_much_as_it_holds() -> None:
    def traced(choice: KeptChoice) -> int:
        tracemalloc.start()
        for at in range(20_000):
            choice.add(TextDelta(0, "🙂" if at == 0 else f" {at % 10}", reasoning=f"{at % 10} "))
        size = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        return size

    choice = KeptChoice(0, None, -1)
    size = traced(choice)
    assert choice.joined().text.startswith("🙂 1 2")
    assert size <= choice.held_bytes * 1.2 + 4096, "a growing text reserves an eighth more"


@pytest.fixture
def small(model_folder: Path) -> Iterator[RunningRouter]:
    with RunningRouter(model_folder, answers_bytes_max=256 << 10) as router:
        yield router


def ask(router: RunningRouter, **fields: Any) -> Any:
    with openai.OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        create: Any = client.completions.create
        answer = create(**{"model": MODEL, "prompt": "fox", "max_tokens": 200} | fields)
        return list(answer) if fields.get("stream") else answer


def test_the_budget_is_empty_after_every_end(small: RunningRouter, tokenizer: Tokenizer) -> None:
    prompt = "the lazy dog " * 10
    assert len(tokenizer.encode(prompt, add_special_tokens=True)) > 30
    told = {"prompt": prompt, "echo": True, "logprobs": 5, "max_tokens": 1}
    assert len(ask(small, **told).choices[0].logprobs.tokens) > 30
    with pytest.raises(openai.BadRequestError) as large:
        ask(small, logprobs=20, n=16)
    assert large.value.code == "answer_too_large"
    assert "16" in large.value.message
    budget = small.serving.answers
    with budget.hold("127.0.0.1") as holding:
        holding.add(128 << 10)
        with pytest.raises(openai.RateLimitError, match="try again later, or stream"):
            ask(small, **told)
        assert ask(small, max_tokens=8).choices[0].text
        assert ask(small, max_tokens=8, logprobs=5, stream=True)
    assert budget.held_bytes == 0


def test_a_client_that_leaves_while_its_answer_is_written_gives_it_back(small: RunningRouter) -> None:
    async def leave() -> None:
        port = int(small.url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = json.dumps({"model": MODEL, "prompt": "the fox " * 20, "n": 8, "max_tokens": 1, "echo": True})
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        await reader.read(1)
        writer.transport.abort()

    for _ in range(3):
        asyncio.run(leave())
    assert ask(small, max_tokens=1).choices
    small.call(lambda: None)
    assert small.serving.answers.held_bytes == 0
