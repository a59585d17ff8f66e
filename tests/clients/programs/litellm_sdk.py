"""litellm, the way its proxy and its SDK call any server that speaks OpenAI's API: `openai/MODEL` and an api_base."""

from __future__ import annotations

import asyncio
from typing import Any

import litellm
from told import BASE_URL, KEY, MODEL, WEATHER, Sums, check_weather

ASKED: Any = {
    "model": f"openai/{MODEL}",
    "api_base": BASE_URL,
    "api_key": KEY,
    "messages": [{"role": "user", "content": "Why is the sky blue?"}],
    "num_retries": 0,
    "seed": 1,
}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Weather.", "parameters": WEATHER}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER, "strict": True}}


def main() -> None:
    told = Sums()
    whole: Any = litellm.completion(max_tokens=24, **ASKED)
    told.add(whole.usage.completion_tokens)
    streamed, used = "", 0
    for chunk in litellm.completion(
        max_tokens=24, stream=True, stream_options={"include_usage": True}, **ASKED
    ):
        streamed += chunk.choices[0].delta.content or "" if chunk.choices else ""
        used = chunk.usage.completion_tokens if getattr(chunk, "usage", None) else used
    assert streamed == whole.choices[0].message.content, streamed
    told.add(used)
    called: Any = litellm.completion(
        tools=[TOOL], tool_choice="required", parallel_tool_calls=False, max_tokens=200, **ASKED
    )
    (call,) = called.choices[0].message.tool_calls
    check_weather(call.function.arguments)
    told.add(called.usage.completion_tokens)
    bound: Any = litellm.completion(response_format=SCHEMA, max_tokens=200, **ASKED)
    check_weather(bound.choices[0].message.content)
    told.add(bound.usage.completion_tokens)
    text: Any = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}", api_base=BASE_URL, api_key=KEY, prompt="Once", max_tokens=8
    )
    told.add(text.usage.completion_tokens)
    several: Any = asyncio.run(litellm.acompletion(n=2, max_tokens=8, logprobs=True, top_logprobs=2, **ASKED))
    assert len(several.choices) == 2
    told.add(several.usage.completion_tokens)
    try:
        litellm.completion(max_tokens=8, temperature=-1, **ASKED)
    except litellm.BadRequestError as error:
        said = str(error)
    else:
        raise AssertionError("temperature -1 was answered")
    assert "temperature" in said, said
    told.write()


main()
