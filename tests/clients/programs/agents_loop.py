"""openai-agents: a loop of two turns, a tool's call and the answer to its result, over chats and over responses."""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import Field
from told import BASE_URL, KEY, MODEL, Sums

asked: list[str] = []


@function_tool
def weather(city: Annotated[str, Field(max_length=24)], unit: Literal["celsius", "fahrenheit"]) -> str:
    """The weather of a city."""
    asked.append(city)
    return f"rain, 12 {unit}"


async def run() -> None:
    told = Sums()
    set_tracing_disabled(True)
    async with AsyncOpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0) as client:
        for model in (OpenAIChatCompletionsModel(MODEL, client), OpenAIResponsesModel(MODEL, client)):
            settings = ModelSettings(
                tool_choice="required",
                parallel_tool_calls=False,
                max_tokens=200,
                temperature=0.0,
                include_usage=True,
            )
            agent = Agent(name="guide", instructions="Help.", model=model, tools=[weather])
            # the first call is forced; the agent sets the choice back after it
            agent.model_settings = settings
            before = len(asked)
            result = await Runner.run(agent, "What is the weather in Oslo?", max_turns=4)
            assert len(asked) > before, "the tool was never called"
            assert len(result.raw_responses) >= 2
            assert isinstance(result.final_output, str)
            for response in result.raw_responses:
                told.add(response.usage.output_tokens)
            streamed = Runner.run_streamed(agent, "What is the weather in Oslo?", max_turns=4)
            kinds = {event.type async for event in streamed.stream_events()}
            assert {"raw_response_event", "run_item_stream_event"} <= kinds, kinds
            assert streamed.final_output == result.final_output
            for response in streamed.raw_responses:
                told.add(response.usage.output_tokens)
    told.write()


asyncio.run(run())
