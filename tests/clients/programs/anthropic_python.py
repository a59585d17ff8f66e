"""Anthropic's own Python client: messages whole, streamed and asynchronous, tools, tokens counted, errors."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic
import pydantic
from told import BASE_URL, HUB_ID, KEY, MODEL, WEATHER, Sums, check_weather

QUESTION: Any = [{"role": "user", "content": "Why is the sky blue?"}]
TOOL: Any = {"name": "weather", "description": "Weather.", "input_schema": WEATHER}
SYSTEM: Any = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
FORCED: Any = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
HOST = BASE_URL.removesuffix("/v1")  # the SDK adds it
GREEDY: Any = {"temperature": 0}  # the SDK has no word for it any more
WINDOW = 8192  # of the model


def checked(value: pydantic.BaseModel) -> None:
    """The SDK takes any JSON as its types; pydantic judges whether it is one."""
    type(value).model_validate(value.to_dict())


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def texts(client: anthropic.Anthropic, told: Sums) -> None:
    models = list(client.models.list())
    assert [model.id for model in models] == [MODEL, HUB_ID]
    checked(models[0])
    assert client.models.retrieve(MODEL).max_input_tokens == WINDOW
    asked: Any = {
        "model": MODEL,
        "messages": QUESTION,
        "max_tokens": 24,
        "extra_body": GREEDY,
        "system": SYSTEM,
    }
    whole = client.messages.create(**asked, metadata={"user_id": "u"})
    checked(whole)
    assert whole._request_id
    assert whole.stop_reason == "max_tokens"
    assert whole.usage.output_tokens == 24
    told.add(whole.usage.output_tokens)
    counted = client.messages.count_tokens(model=MODEL, messages=QUESTION, system=SYSTEM)
    again = client.messages.create(**asked)
    told.add(again.usage.output_tokens)
    if not again.usage.cache_read_input_tokens:  # it was computed elsewhere, and now both workers have it
        again = client.messages.create(**asked)
        told.add(again.usage.output_tokens)
    assert again.usage.cache_read_input_tokens, "the prompt was there before"
    assert again.usage.input_tokens + again.usage.cache_read_input_tokens == counted.input_tokens
    with client.messages.stream(**asked) as stream:
        events = []
        for event in stream:
            checked(event)
            events.append(event.type)
        final = stream.get_final_message()
    assert {"message_start", "content_block_start", "content_block_delta", "text"} <= set(events)
    assert events[-1] == "message_stop"
    assert text_of(final) == text_of(whole) == text_of(again)
    assert (final.usage.input_tokens, final.stop_reason) == (again.usage.input_tokens, "max_tokens")
    told.add(final.usage.output_tokens)
    stopped = client.messages.create(**asked | {"max_tokens": 200, "stop_sequences": ["sky", "blue"]})
    assert stopped.stop_reason == "stop_sequence"
    assert stopped.stop_sequence in ("sky", "blue")
    told.add(stopped.usage.output_tokens)


def tools(client: anthropic.Anthropic, told: Sums) -> None:
    asked: Any = {"model": MODEL, "tools": [TOOL], "max_tokens": 200, "extra_body": GREEDY}
    whole = client.messages.create(**asked, messages=QUESTION, tool_choice=FORCED)
    checked(whole)
    (call,) = whole.content
    assert call.type == "tool_use"
    assert whole.stop_reason == "tool_use"
    check_weather(call.input)
    told.add(whole.usage.output_tokens)
    with client.messages.stream(**asked, messages=QUESTION, tool_choice=FORCED) as stream:
        deltas = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    assert len(deltas) > 1, "arguments come while they are written"
    (streamed,) = final.content
    assert streamed.type == "tool_use"
    assert streamed.input == call.input
    told.add(final.usage.output_tokens)
    result: Any = {
        "type": "tool_result",
        "tool_use_id": call.id,
        "content": [{"type": "text", "text": "rain"}],
    }
    turns: Any = [
        *QUESTION,
        {"role": "assistant", "content": whole.content},
        {"role": "user", "content": [result]},
    ]
    answer = client.messages.create(**asked | {"max_tokens": 8}, messages=turns)
    told.add(answer.usage.output_tokens)
    searching: Any = {"type": "web_search_20250305", "name": "web_search"}
    raw = client.messages.with_raw_response.create(
        model=MODEL, messages=QUESTION, max_tokens=4, tools=[searching, TOOL]
    )
    assert raw.headers["x-segue-ignored"] == "tools[0].web_search"
    told.add(raw.parse().usage.output_tokens)
    beta = client.beta.messages.create(
        model=MODEL,
        messages=QUESTION,
        max_tokens=4,
        betas=["context-management-2025-06-27"],
        context_management={"edits": [{"type": "clear_tool_uses_20250919"}]},
        thinking={"type": "enabled", "budget_tokens": 1024},
    )
    told.add(beta.usage.output_tokens)


def by_schema(client: anthropic.Anthropic, told: Sums) -> None:
    class Animal(pydantic.BaseModel):
        has_wings: bool

    parsed = client.messages.parse(
        model=MODEL, messages=QUESTION, max_tokens=100, output_format=Animal, extra_body=GREEDY
    )
    assert isinstance(parsed.parsed_output, Animal)
    told.add(parsed.usage.output_tokens)


def errors(client: anthropic.Anthropic, told: Sums) -> None:
    def fails(kind: type[anthropic.APIStatusError], named: str, word: str, **changed: Any) -> None:
        try:
            client.messages.create(**{"model": MODEL, "messages": QUESTION, "max_tokens": 4, **changed})
        except kind as error:
            said, body, request_id = str(error), error.body, error.request_id
        else:
            raise AssertionError(f"no error for {changed}")
        assert isinstance(body, dict), body
        assert (body["type"], body["error"]["type"]) == ("error", named), body
        assert request_id == body["request_id"]
        assert word in said, said

    image: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    fails(anthropic.NotFoundError, "not_found_error", MODEL, model="unknown-model")
    fails(anthropic.BadRequestError, "invalid_request_error", "temperature", extra_body={"temperature": -1})
    fails(
        anthropic.BadRequestError,
        "invalid_request_error",
        "messages[0].content[0] is an image",
        messages=[{"role": "user", "content": [image]}],
    )
    long: Any = [{"role": "user", "content": "sky " * 9000}]
    fails(anthropic.BadRequestError, "invalid_request_error", "prompt is too long", messages=long)
    try:
        client.messages.batches.list()
    except anthropic.NotFoundError as error:
        said = str(error)
    else:
        raise AssertionError("batches were answered")
    assert "batches is not served" in said, said
    bounded = client.messages.create(
        model=MODEL, messages=QUESTION, max_tokens=100_000, stop_sequences=[" "], extra_body=GREEDY
    )
    assert bounded.stop_reason == "stop_sequence", "more than the context has is a bound like others"
    told.add(bounded.usage.output_tokens)


async def asynchronous(told: Sums) -> None:
    async with anthropic.AsyncAnthropic(base_url=HOST, auth_token=KEY, api_key=None, max_retries=0) as client:
        asked = [client.messages.create(model=MODEL, messages=QUESTION, max_tokens=12) for _ in range(4)]
        for answer in await asyncio.gather(*asked):
            told.add(answer.usage.output_tokens)
        async with client.messages.stream(model=MODEL, messages=QUESTION, max_tokens=12) as stream:
            streamed = "".join([text async for text in stream.text_stream])
            final = await stream.get_final_message()
        assert streamed == text_of(final)
        told.add(final.usage.output_tokens)


def main() -> None:
    told = Sums()
    with anthropic.Anthropic(base_url=HOST, api_key=KEY, max_retries=0, timeout=120) as client:
        texts(client, told)
        tools(client, told)
        by_schema(client, told)
        errors(client, told)
    asyncio.run(asynchronous(told))
    told.write()


main()
