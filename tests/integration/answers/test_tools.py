"""Tools with the real model: whatever it would say, a forced call has arguments of the tool's schema.

The model is too small to call tools of its own accord, and its chat template does not show them. So a setting says how
calls are written, and grammars do the rest. `SEGUE_TOOL_ANSWERS` is how many answers are asked for.
"""

from __future__ import annotations

import json
import os
from typing import Any

import jsonschema
import pytest

from tests.integration.deployments.deployment import LocalDeployment

ANSWERS = int(os.environ.get("SEGUE_TOOL_ANSWERS", "6"))
MODEL = "smollm2"
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 24},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
    },
    "required": ["city", "unit", "days"],
    "additionalProperties": False,
}
NOTE: dict[str, Any] = {
    "type": "object",
    "properties": {"tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 2}},
    "required": ["tags"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "Weather.", "parameters": PARAMETERS},
    },
    {"type": "function", "function": {"name": "note", "description": "Takes a note.", "parameters": NOTE}},
]
NAMED: Any = {"type": "function", "function": {"name": "note"}}
SCHEMAS = {"weather": PARAMETERS, "note": NOTE}


def question(at: int) -> Any:
    return [{"role": "user", "content": f"What will the weather be in city number {at}, and why?"}]


def check(calls: Any, chosen: Any) -> None:
    assert len(calls) >= 1
    for call in calls:
        assert chosen == "required" or call.function.name == "note"
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
@pytest.mark.timeout(3600)
def test_forced_calls_have_valid_arguments(one_each: LocalDeployment, choice: Any) -> None:
    for at in range(ANSWERS // 2):
        answer = one_each.client.chat.completions.create(
            model=MODEL,
            messages=question(at),
            tools=TOOLS,
            tool_choice=choice,
            parallel_tool_calls=False,
            temperature=1.0,
            seed=at,
            max_tokens=300,
        )
        (told,) = answer.choices
        assert told.finish_reason == "tool_calls", told
        assert not told.message.content
        check(told.message.tool_calls, choice)


@pytest.mark.aggregated
def test_a_loop_of_two_turns_streams_what_it_answers_whole(one_each: LocalDeployment) -> None:
    client, messages = one_each.client, question(1)
    asked: Any = {"model": MODEL, "tools": TOOLS, "seed": 3, "temperature": 1.0, "max_tokens": 300}
    whole = client.chat.completions.create(messages=messages, tool_choice="required", **asked)
    with client.chat.completions.stream(messages=messages, tool_choice="required", **asked) as stream:
        streamed = stream.get_final_completion()
    message = whole.choices[0].message
    read = [
        [(call.function.name, call.function.arguments) for call in answer.choices[0].message.tool_calls or ()]
        for answer in (whole, streamed)
    ]
    assert read[0] == read[1] != []
    check(message.tool_calls, "required")
    results: Any = [
        {"role": "tool", "tool_call_id": call.id, "content": '{"rain": "<|im_end|>"}'}
        for call in message.tool_calls or ()
    ]
    turns: Any = [*messages, message.model_dump(exclude_none=True), *results]
    answer = client.chat.completions.create(messages=turns, **{**asked, "max_tokens": 20})
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert whole.usage is not None
    assert answer.usage.prompt_tokens > whole.usage.prompt_tokens + len(results)
