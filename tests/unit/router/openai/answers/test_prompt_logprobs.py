"""What an answer tells of its prompt: `echo` and `prompt_logprobs`, and what a stream does not tell."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import openai
import pytest

from router.openai.answers.logprob_objects import BATCH_LOGPROBS
from router.text.tokenizer import Tokenizer
from tests.unit.router.scripted_workers import MODEL, RunningRouter, Script
from tests.unit.router.tiny_model import END_ID

PROMPT = "the lazy 🙂 dog"
OUTPUT = " sleeps"
USER: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture
def prompt_ids(tokenizer: Tokenizer) -> list[int]:
    return list(tokenizer.encode(PROMPT, add_special_tokens=True))


@pytest.fixture(autouse=True)
def output_ids(router: RunningRouter, tokenizer: Tokenizer) -> list[int]:
    output = (*tokenizer.encode(OUTPUT, add_special_tokens=False), END_ID)
    router.workers.script = Script(output=lambda _: output, tokens_a_row=2)
    return list(output)


def asked(client: openai.OpenAI, **fields: Any) -> Any:
    create: Any = client.completions.create
    return create(**{"model": MODEL, "prompt": PROMPT, "max_tokens": 99} | fields)


def test_an_echo_begins_the_answer_with_the_prompt(client: openai.OpenAI) -> None:
    answer = asked(client, echo=True)
    assert answer.choices[0].text == PROMPT + OUTPUT
    assert answer.choices[0].logprobs is None


def test_an_echo_is_streamed(client: openai.OpenAI) -> None:
    chunks = asked(client, echo=True, stream=True)
    texts = [choice.text for chunk in chunks for choice in chunk.choices]
    assert "".join(texts) == PROMPT + OUTPUT
    assert len(texts) > 2


def test_an_echo_has_the_logprobs_of_the_prompt_but_for_its_first_token(
    client: openai.OpenAI, prompt_ids: list[int], output_ids: list[int]
) -> None:
    told = asked(client, echo=True, logprobs=1).choices[0].logprobs
    assert told.token_logprobs == [
        None,
        *(-token_id / 16 for token_id in prompt_ids[1:]),
        *(-token_id / 8 for token_id in output_ids),
    ]
    assert len(told.tokens) == len(told.text_offset) == len(prompt_ids) + len(output_ids)
    assert told.top_logprobs[0] is None
    assert all(token in top for token, top in zip(told.tokens[1:], told.top_logprobs[1:], strict=True))
    starts = [0, *accumulate(map(len, told.tokens))]
    whole = next(at for at, token in enumerate(told.tokens) if "\N{REPLACEMENT CHARACTER}" in token)
    assert told.text_offset[:whole] == starts[:whole]
    assert told.text_offset[len(prompt_ids)] == len(PROMPT)


def test_no_tokens_at_all_may_be_asked_for_with_an_echo(
    client: openai.OpenAI, router: RunningRouter, prompt_ids: list[int]
) -> None:
    answer = asked(client, echo=True, logprobs=0, max_tokens=0)
    assert answer.choices[0].text == PROMPT
    assert len(answer.choices[0].logprobs.tokens) == len(prompt_ids)
    assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (0, len(prompt_ids))
    assert router.last_prefill.params.max_new_tokens == 1


def test_each_choice_of_several_has_the_prompt(client: openai.OpenAI) -> None:
    answer = asked(client, echo=True, logprobs=0, n=2, prompt=[PROMPT, PROMPT], max_tokens=0)
    assert [choice.text for choice in answer.choices] == [PROMPT] * 4
    assert all(choice.logprobs == answer.choices[0].logprobs for choice in answer.choices)


def test_prompt_logprobs_come_beside_a_completion(client: openai.OpenAI, prompt_ids: list[int]) -> None:
    answer = asked(client, extra_body={"prompt_logprobs": 2})
    assert answer.choices[0].text == OUTPUT
    told = answer.choices[0].prompt_logprobs
    assert told[0] is None
    for token_id, entry in zip(prompt_ids[1:], told[1:], strict=True):
        own = entry[str(token_id)]
        assert (own["logprob"], own["rank"]) == (-token_id / 16, 2)
        assert [one["rank"] for name, one in entry.items() if name != str(token_id)] == [1, 2]


def test_a_prompt_is_scored_once_however_many_choices_show_it(
    client: openai.OpenAI, router: RunningRouter, prompt_ids: list[int]
) -> None:
    before = len(router.workers.prefills)
    answer = asked(client, n=4, prompt=[PROMPT, PROMPT], extra_body={"prompt_logprobs": 2})
    scored = [prefill.params.prompt_logprobs for prefill in router.workers.prefills[before:]]
    assert sorted(scored) == [-1] * 6 + [2, 2]
    assert len(answer.choices) == 8
    for choice in answer.choices:
        assert choice.text == OUTPUT
        assert len(choice.prompt_logprobs) == len(prompt_ids)
        assert choice.prompt_logprobs == answer.choices[0].prompt_logprobs


def test_prompt_logprobs_come_beside_a_chat(client: openai.OpenAI, router: RunningRouter) -> None:
    answer: Any = client.chat.completions.create(
        model=MODEL, messages=USER, extra_body={"prompt_logprobs": 0}
    )
    rendered = router.last_prefill.token_ids
    assert [list(entry) for entry in answer.prompt_logprobs[1:]] == [[str(each)] for each in rendered[1:]]
    assert answer.choices[0].logprobs is None


def test_a_prompt_of_many_batches_is_told_whole(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    prompt = PROMPT * 12
    tokens = len(tokenizer.encode(prompt, add_special_tokens=True))
    assert tokens * 21 > BATCH_LOGPROBS
    answer = asked(
        client, echo=True, logprobs=2, prompt=prompt, max_tokens=2, n=2, extra_body={"prompt_logprobs": 20}
    )
    assert [choice.text[: len(prompt)] for choice in answer.choices] == [prompt] * 2
    for choice in answer.choices:
        told = choice.logprobs
        lists = (told.tokens, told.token_logprobs, told.top_logprobs, told.text_offset)
        assert [len(each) for each in lists] == [tokens + 2] * 4
        assert [len(each or ()) for each in told.top_logprobs[:3]] == [0, 3, 3]
        assert len(choice.prompt_logprobs) == tokens
        assert [len(each or ()) for each in choice.prompt_logprobs[:3]] == [0, 21, 21]
    assert answer.choices[0].prompt_logprobs == answer.choices[1].prompt_logprobs


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"echo": True, "max_tokens": -1}, "max_tokens"),
        ({"extra_body": {"prompt_logprobs": 21}}, "prompt_logprobs"),
        ({"extra_body": {"prompt_logprobs": -1}}, "prompt_logprobs"),
        ({"extra_body": {"prompt_logprobs": 0}, "stream": True}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 0, "stream": True}, "echo"),
    ],
)
def test_what_is_not_told_is_refused(client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        asked(client, **fields)
    assert refused.value.param == param


def test_a_prompt_that_is_not_told_is_not_scored(client: openai.OpenAI, router: RunningRouter) -> None:
    asked(client, logprobs=2)
    asked(client, echo=True)
    assert [prefill.params.prompt_logprobs for prefill in router.workers.prefills[-2:]] == [-1, -1]
