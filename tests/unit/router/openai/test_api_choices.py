"""Several answers to a prompt: OpenAI's own client against the running server, with workers that say their seed."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from router.text.tokenizer import Tokenizer
from shared.wire.messages import Prefill
from tests.unit.router.scripted_workers import MODEL, RunningRouter, Script
from tests.unit.router.tiny_model import END_ID

SEED = 40


@pytest.fixture
def router(router: RunningRouter) -> RunningRouter:
    def output(prefill: Prefill) -> tuple[int, ...]:
        prompt = router.tokenizer.decode_all(prefill.token_ids)
        words = f"{prefill.params.seed} of {prompt[-1]}"
        return (*router.tokenizer.encode(words, add_special_tokens=False), END_ID)

    router.workers.script = Script(output=output)
    return router


def test_choices_have_the_seeds_from_the_one_asked_for(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    answer = client.completions.create(model=MODEL, prompt="fox", n=3, best_of=3, seed=SEED, max_tokens=20)
    assert [choice.text for choice in answer.choices] == ["40 of x", "41 of x", "42 of x"]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(tokenizer.encode("fox"))
    assert answer.usage.completion_tokens == 3 * (len(tokenizer.encode("40 of x")) + 1)


def test_each_prompt_of_a_list_gets_its_own_answers(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    prompts = ["fox", "dog"]
    answer = client.completions.create(model=MODEL, prompt=prompts, n=2, seed=SEED, max_tokens=20)
    assert [choice.text for choice in answer.choices] == ["40 of x", "41 of x", "40 of g", "41 of g"]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(len(tokenizer.encode(prompt)) for prompt in prompts)


def test_choices_of_a_chat_are_streamed_side_by_side(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "fox"}],
        n=4,
        seed=SEED,
        stream=True,
        stream_options={"include_usage": True},
    )
    texts, reasons = ["", "", "", ""], dict[int, str]()
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert [text.partition(" ")[0] for text in texts] == ["40", "41", "42", "43"]
    assert reasons == dict.fromkeys(range(4), "stop")


def test_n_is_refused_before_anything_is_computed(client: openai.OpenAI, router: RunningRouter) -> None:
    """CVE-2024-8939: another server copied the request that often before it looked at the number."""
    before = len(router.workers.prefills)
    for number in (129, 10**9, 2**63):
        with pytest.raises(openai.BadRequestError, match="n must be between 1 and 128"):
            client.completions.create(model=MODEL, prompt="fox", n=number)
    with pytest.raises(openai.BadRequestError, match="answers are not ranked"):
        client.completions.create(model=MODEL, prompt="fox", n=1, best_of=20)
    assert len(router.workers.prefills) == before


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_each_chunk_has_the_usage_of_its_choice_so_far_if_that_is_asked_for(
    router: RunningRouter, tokenizer: Tokenizer, path: str
) -> None:
    output = tokenizer.encode("the quick brown fox, the lazy dog", add_special_tokens=False)
    router.workers.script = Script(output=lambda _: output, tokens_a_row=3)
    message = {"messages": [{"role": "user", "content": "fox"}]}
    asked = {**(message if path.startswith("chat") else {"prompt": "fox"}), "n": 2, "max_tokens": 8}
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = chunks_of(router, path, asked | {"stream_options": options})
    prompt = len(router.last_prefill.token_ids)
    counted: dict[int, list[int]] = {0: [], 1: []}
    for chunk in chunks:
        usage, (choice,) = chunk["usage"], chunk["choices"]
        counted[choice["index"]].append(usage["completion_tokens"])
        assert usage["prompt_tokens"] == prompt
        assert usage["total_tokens"] == prompt + usage["completion_tokens"]
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 16)
    for counts in counted.values():
        assert counts == sorted(counts)
        assert counts[-1] == 8
        assert len({*counts} - {0, 8}) >= 1, "on the way"
    *chunks, last = chunks_of(router, path, asked | {"stream_options": {"include_usage": True}})
    assert {chunk["usage"] for chunk in chunks} == {None}
    assert last["usage"]["completion_tokens"] == 16


def test_usage_in_each_chunk_is_passed_over_without_one_at_the_end(router: RunningRouter) -> None:
    asked = {"prompt": "fox", "stream": True, "stream_options": {"continuous_usage_stats": True}}
    answer = router.http.post("/v1/completions", json={"model": MODEL, **asked})
    assert answer.headers["x-segue-ignored"] == "stream_options.continuous_usage_stats"
    assert '"usage"' not in answer.text


def chunks_of(router: RunningRouter, path: str, asked: dict[str, Any]) -> list[dict[str, Any]]:
    body = {"model": MODEL, "stream": True, **asked}
    answer = router.http.post(f"/v1/{path}", json=body)
    assert answer.status_code == 200, answer.text
    assert "x-segue-ignored" not in answer.headers
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]
