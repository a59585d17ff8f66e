"""langchain's ChatOpenAI: answers, streams, batches, a bound tool with its result, structured output."""

from __future__ import annotations

from typing import Any, Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field
from told import BASE_URL, KEY, MODEL, Sums


class CityWeather(BaseModel):
    """A report of the weather."""

    city: str = Field(max_length=24)
    unit: Literal["celsius", "fahrenheit"]


@tool(args_schema=CityWeather)
def weather(city: str, unit: str) -> str:
    """The weather of a city."""
    return f"rain in {city}, 12 {unit}"


def main() -> None:
    told = Sums()
    asked: Any = {"base_url": BASE_URL, "api_key": KEY, "model": MODEL, "max_retries": 0, "seed": 1}
    model = ChatOpenAI(max_tokens=24, **asked)
    whole = model.invoke("Why is the sky blue?")
    assert whole.usage_metadata
    told.add(whole.usage_metadata["output_tokens"])
    streamed: Any = None
    for chunk in model.stream("Why is the sky blue?", stream_usage=True):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed.content == whole.content
    told.add(streamed.usage_metadata["output_tokens"])
    for answer in model.batch(["One.", "Two.", "Three."]):
        assert answer.usage_metadata
        told.add(answer.usage_metadata["output_tokens"])
    long = ChatOpenAI(max_tokens=200, **asked)
    turns: list[Any] = [HumanMessage("What is the weather in Oslo?")]
    called = long.bind_tools([weather], tool_choice="any", parallel_tool_calls=False).invoke(turns)
    (call,) = called.tool_calls
    result = weather.invoke(call)
    assert isinstance(result, ToolMessage)
    assert str(result.content).startswith("rain in ")
    assert called.usage_metadata
    told.add(called.usage_metadata["output_tokens"])
    last = model.bind_tools([weather]).invoke([*turns, called, result])
    assert last.usage_metadata
    told.add(last.usage_metadata["output_tokens"])
    for method in ("json_schema", "function_calling"):
        found: Any = long.with_structured_output(CityWeather, method=method, include_raw=True).invoke(
            "Weather in Oslo?"
        )
        assert isinstance(found["parsed"], CityWeather), found
        told.add(found["raw"].usage_metadata["output_tokens"])
    logprobs = model.bind(logprobs=True, top_logprobs=2).invoke("Hello.").response_metadata["logprobs"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in logprobs["content"])
    told.write()


main()
