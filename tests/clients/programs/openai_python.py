"""OpenAI's own Python client: chats, completions and responses; whole, streamed and asynchronous."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import openai
from pydantic import BaseModel, Field
from told import BASE_URL, HUB_ID, KEY, MODEL, WEATHER, Sums, check_weather

QUESTION: Any = [{"role": "user", "content": "Why is the sky blue?"}]
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "Weather.", "parameters": WEATHER}}
]
NAMED: Any = {"type": "function", "function": {"name": "weather"}}


class ParsedAnimal(BaseModel):
    name: str = Field(max_length=24)
    legs: Literal[0, 2, 4, 6, 8]


def texts(client: openai.OpenAI, told: Sums) -> None:
    assert [model.id for model in client.models.list()] == [MODEL, HUB_ID]
    assert client.models.retrieve(HUB_ID).id == HUB_ID
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=QUESTION, max_tokens=24, seed=1
    )
    assert raw.headers["x-request-id"]
    whole = raw.parse()
    assert whole.usage
    told.add(whole.usage.completion_tokens)
    streamed = ""
    for chunk in client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        max_tokens=24,
        seed=1,
        stream=True,
        stream_options={"include_usage": True},
    ):
        if chunk.usage:
            told.add(chunk.usage.completion_tokens)
        streamed += "".join(choice.delta.content or "" for choice in chunk.choices)
    assert streamed == whole.choices[0].message.content
    completion = client.completions.create(
        model=MODEL, prompt="Once upon a time", max_tokens=12, temperature=0, stop=["\n\n"], logprobs=2
    )
    assert completion.usage
    assert completion.choices[0].logprobs
    assert len(completion.choices[0].logprobs.tokens or ()) == completion.usage.completion_tokens
    told.add(completion.usage.completion_tokens)


def choices_and_logprobs(client: openai.OpenAI, told: Sums) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=8, seed=1, n=3, logprobs=True, top_logprobs=3
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice in answer.choices:
        assert choice.logprobs
        for token in choice.logprobs.content or ():
            assert token.logprob <= 0
            assert len(token.top_logprobs) == 3
    assert answer.usage
    told.add(answer.usage.completion_tokens)


def tools(client: openai.OpenAI, told: Sums) -> None:
    for choice in ("required", NAMED):
        asked: Any = {"model": MODEL, "messages": QUESTION, "tools": TOOLS, "tool_choice": choice, "seed": 4}
        asked["max_tokens"] = 200
        whole = client.chat.completions.create(parallel_tool_calls=False, **asked)
        (call,) = whole.choices[0].message.tool_calls or ()
        assert whole.choices[0].finish_reason == "tool_calls"
        assert call.type == "function"
        assert call.function.name == "weather"
        check_weather(call.function.arguments)
        assert whole.usage
        told.add(whole.usage.completion_tokens)
        with client.chat.completions.stream(
            parallel_tool_calls=False, stream_options={"include_usage": True}, **asked
        ) as stream:
            final = stream.get_final_completion()
        (streamed,) = final.choices[0].message.tool_calls or ()
        assert streamed.function.arguments == call.function.arguments
        assert final.usage
        told.add(final.usage.completion_tokens)
    turns = [*QUESTION, whole.choices[0].message.model_dump(exclude_none=True)]
    turns.append({"role": "tool", "tool_call_id": call.id, "content": "rain"})
    answer = client.chat.completions.create(model=MODEL, messages=turns, tools=TOOLS, max_tokens=8, seed=4)
    assert answer.usage
    told.add(answer.usage.completion_tokens)


def schemas(client: openai.OpenAI, told: Sums) -> None:
    parsed = client.chat.completions.parse(
        model=MODEL, messages=QUESTION, response_format=ParsedAnimal, max_tokens=200, seed=2
    )
    assert isinstance(parsed.choices[0].message.parsed, ParsedAnimal)
    assert parsed.usage
    told.add(parsed.usage.completion_tokens)


def responses(client: openai.OpenAI, told: Sums) -> None:
    asked: Any = {"model": MODEL, "input": "Why is the sky blue?", "max_output_tokens": 24, "temperature": 0}
    whole = client.responses.create(**asked)
    assert whole.output_text
    assert whole.usage
    told.add(whole.usage.output_tokens)
    with client.responses.stream(**asked) as stream:
        events = list(stream)
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    ended = events[-1]
    assert ended.type in ("response.completed", "response.incomplete"), ended
    assert text == ended.response.output_text == whole.output_text
    assert ended.response.usage
    told.add(ended.response.usage.output_tokens)
    parsed = client.responses.parse(
        model=MODEL, input="Name an animal.", text_format=ParsedAnimal, max_output_tokens=200
    )
    assert isinstance(parsed.output_parsed, ParsedAnimal)
    assert parsed.usage
    told.add(parsed.usage.output_tokens)
    tool: Any = {"type": "function", "name": "weather", "parameters": WEATHER, "strict": True}
    called = client.responses.create(
        model=MODEL,
        input="Weather?",
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
        max_output_tokens=200,
    )
    (call,) = [item for item in called.output if item.type == "function_call"]
    check_weather(call.arguments)
    assert called.usage
    told.add(called.usage.output_tokens)


def errors(client: openai.OpenAI) -> None:
    def fails(kind: type[openai.APIStatusError], word: str, **changed: Any) -> None:
        try:
            client.chat.completions.create(**{"model": MODEL, "messages": QUESTION, **changed})
        except kind as error:
            said = str(error)
        else:
            raise AssertionError(f"no error for {changed}")
        assert word in said, said

    fails(openai.NotFoundError, MODEL, model="unknown-model")
    fails(openai.BadRequestError, "temperature", temperature=-1)
    fails(openai.BadRequestError, "max_tokens", max_tokens=100_000)
    try:
        client.embeddings.create(model=MODEL, input="x")
    except openai.APIStatusError as error:
        said = str(error)
    else:
        raise AssertionError("embeddings were answered")
    assert "embeddings" in said, said


async def asynchronous(told: Sums) -> None:
    async with openai.AsyncOpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0) as client:
        asked = [
            client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=12, seed=seed)
            for seed in range(4)
        ]
        for answer in await asyncio.gather(*asked):
            assert answer.usage
            told.add(answer.usage.completion_tokens)


def main() -> None:
    told = Sums()
    with openai.OpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0, timeout=120) as client:
        texts(client, told)
        choices_and_logprobs(client, told)
        tools(client, told)
        schemas(client, told)
        responses(client, told)
        errors(client)
    asyncio.run(asynchronous(told))
    told.write()


main()
