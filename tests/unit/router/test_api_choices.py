"""Several answers to a prompt: OpenAI's own client against the running server, with workers that say their seed."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from router.text.tokenizer import Tokenizer
from shared.messages import Prefill
from tests.unit.router.scripted_workers import MODEL, RunningRouter, Script
from tests.unit.router.tiny_model import END_ID

SEED = 40


@pytest.fixture
def client(router: RunningRouter, tokenizer: Tokenizer) -> Iterator[openai.OpenAI]:
    def output(prefill: Prefill) -> tuple[int, ...]:
        prompt = tokenizer.decode_all(prefill.token_ids)
        words = f"{prefill.params.seed} of {prompt[-1]}"
        return (*tokenizer.encode(words, add_special_tokens=False), END_ID)

    router.workers.script = Script(output=output)
    with openai.OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def tokenizer(model_folder: object) -> Tokenizer:
    return Tokenizer(model_folder, template_seconds_max=5)  # type: ignore[arg-type]


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
    for number in (65, 10**9, 2**63):
        with pytest.raises(openai.BadRequestError, match="n must be between 1 and 64"):
            client.completions.create(model=MODEL, prompt="fox", n=number)
    with pytest.raises(openai.BadRequestError, match="answers are not ranked"):
        client.completions.create(model=MODEL, prompt="fox", n=1, best_of=20)
    assert len(router.workers.prefills) == before
