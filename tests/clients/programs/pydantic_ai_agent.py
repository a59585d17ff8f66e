"""pydantic-ai: an agent's answer, a stream, and outputs that are models, by tool and by schema."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from told import BASE_URL, KEY, MODEL, Sums


class AgentReport(BaseModel):
    city: str = Field(max_length=24)
    unit: Literal["celsius", "fahrenheit"]


async def run() -> None:
    told = Sums()
    provider = OpenAIProvider(base_url=BASE_URL, api_key=KEY)
    settings: Any = {"max_tokens": 200, "seed": 1}
    for model in (OpenAIChatModel(MODEL, provider=provider), OpenAIResponsesModel(MODEL, provider=provider)):
        short: Any = {"max_tokens": 24, "temperature": 0.0}
        plain: Any = Agent(model, model_settings=short)
        whole = await plain.run("Why is the sky blue?")
        told.add(whole.usage.output_tokens)
        async with plain.run_stream("Why is the sky blue?") as stream:
            assert await stream.get_output() == whole.output
            told.add(stream.usage.output_tokens)
        for output in (AgentReport, NativeOutput(AgentReport)):
            agent: Any = Agent(model, output_type=output, model_settings=settings)
            found = await agent.run("The weather in Oslo is 12 degrees.")
            assert isinstance(found.output, AgentReport)
            told.add(found.usage.output_tokens)
    told.write()


asyncio.run(run())
