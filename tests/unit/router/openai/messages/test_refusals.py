"""What of a request to /v1/messages is refused, under the name that its client knows, and slips among it."""

from __future__ import annotations

import time
from typing import Any

import pytest

from router.openai.fields.spelling import check_names_of_each
from tests.unit.router.openai.messages.asking import TOOL, post, refusal, user
from tests.unit.router.scripted_workers import RunningRouter

DEEP: Any = {"a": 1}
for _ in range(200):
    DEEP = {"a": DEEP}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no max_tokens": ({"max_tokens": None}, "max_tokens is required"),
    "max_tokens 0": ({"max_tokens": 0}, "max_tokens must be at least 1"),
    "no messages": ({"messages": []}, "messages must be"),
    "messages that are text": ({"messages": "hi"}, "messages"),
    "a role that nobody has": ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    "content that is a number": ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    "a block that is text": ({"messages": [user("hi")]}, "messages[0].content[0]"),
    "a block without a type": ({"messages": [user({"text": "a"})]}, "messages[0].content[0].type"),
    "a block of no known type": ({"messages": [user({"type": "x"})]}, "messages[0].content[0].type"),
    "a block of text without text": ({"messages": [user({"type": "text"})]}, "content[0].text is required"),
    "an image": ({"messages": [user({"type": "image", "source": {}})]}, "content[0] is an image"),
    "an image in a result": (
        {
            "messages": [
                user({"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}),
            ]
        },
        "messages[0].content[0].content[0] is an image",
    ),
    "a PDF": (
        {"messages": [user({"type": "document", "source": {"type": "base64", "data": ""}})]},
        "content[0] is a document that is not text",
    ),
    "a document in a document": (
        {
            "messages": [
                user({"type": "document", "source": {"type": "content", "content": [{"type": "document"}]}})
            ]
        },
        "source.content[0].type",
    ),
    "a result without its call": (
        {"messages": [user({"type": "tool_result", "content": "x"})]},
        "messages[0].content[0].tool_use_id",
    ),
    "a call without a name": (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "input": {}}]}]},
        "content[0].name",
    ),
    "a call without an input": (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f"}]}]},
        "content[0].input",
    ),
    "an input nested 200 deep": (
        {
            "messages": [
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "a", "name": "f", "input": DEEP}],
                }
            ]
        },
        "content[0].input",
    ),
    "a call of the user": (
        {"messages": [user({"type": "tool_use", "id": "a", "name": "f", "input": {}})]},
        "content[0].type",
    ),
    "nothing but a tool that is removed": (
        {
            "messages": [
                user({"type": "tool_removal", "tool": {"type": "tool_reference", "name": "a"}}),
                user({"type": "tool_addition", "tool": {"type": "tool_reference", "name": "a"}}),
            ]
        },
        "messages must hold text, a call or a result",
    ),
    "a system prompt that is a number": ({"system": 5}, "system"),
    "an image as system prompt": ({"system": [{"type": "image"}]}, "system[0] is an image"),
    "a tool without a schema": ({"tools": [{"name": "f"}]}, "tools[0].input_schema is required"),
    "a tool without a name": ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
    "a schema that is a list": ({"tools": [{"name": "f", "input_schema": []}]}, "tools[0].input_schema"),
    "two tools of one name": ({"tools": [TOOL, TOOL]}, "tools"),
    "a choice without tools": ({"tool_choice": {"type": "any"}}, "tool_choice"),
    "a choice of a tool that is not there": (
        {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}},
        "tool_choice",
    ),
    "a choice of no name": ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    "a choice of a kind that nobody has": (
        {"tools": [TOOL], "tool_choice": {"type": "x"}},
        "tool_choice.type",
    ),
    "1,000 stop sequences": ({"stop_sequences": ["x"] * 1000}, "stop_sequences takes"),
    "an empty stop sequence": ({"stop_sequences": [""]}, "stop_sequences"),
    "temperature 1001": ({"temperature": 1001}, "temperature"),
    "top_k -2": ({"top_k": -2}, "top_k"),
    "a format of no known type": ({"output_config": {"format": {"type": "x"}}}, "output_config.format.type"),
    "thinking that is true": ({"thinking": True}, "thinking"),
    "thinking that nobody has": (
        {"thinking": {"type": "enabeld"}},
        "thinking.type must be enabled, disabled or adaptive",
    ),
    "a slip within thinking": (
        {"thinking": {"type": "enabled", "budget_token": 1}},
        "thinking.budget_token is not a field; did you mean budget_tokens?",
    ),
    "a slip within output_config": ({"output_config": {"efort": "high"}}, "did you mean effort?"),
    "a slip within a format": (
        {"output_config": {"format": {"type": "json_schema", "shema": {}}}},
        "output_config.format.shema is not a field; did you mean schema?",
    ),
    "a slip within a tool": (
        {"tools": [TOOL, TOOL | {"name": "b", "descripton": "x"}]},
        "tools[1].descripton is not a field; did you mean description?",
    ),
    "another slip within a tool": ({"tools": [TOOL | {"stirct": True}]}, "did you mean strict?"),
    "a type of tool with a slip": (
        {"tools": [TOOL | {"type": "custm"}]},
        "tools[0].type is unknown; did you mean custom?",
    ),
    "a format without a schema": (
        {"output_config": {"format": {"type": "json_schema"}}},
        "output_config.format must be an object that has schema",
    ),
    "a format of chats": (
        {"response_format": {"type": "json_object"}},
        "response_format is not supported: the name here is output_config.format",
    ),
    "an effort of chats": ({"reasoning_effort": "high"}, "the name here is output_config.effort"),
    "two answers": ({"n": 2}, "n is not supported: a message is one answer"),
    "a stop sequence of another type": ({"stop": 5}, "stop: Expected"),
    "1,000 stop sequences by another name": ({"stop": ["x"] * 1000}, "stop_sequences takes"),
    "a schema that cannot be kept": (
        {"tools": [TOOL | {"strict": True, "input_schema": {"not": {}}}], "tool_choice": {"type": "any"}},
        "tools[0].input_schema cannot be kept to",
    ),
}


@pytest.mark.parametrize(("fields", "named"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_served_is_refused_by_its_own_name(
    router: RunningRouter, fields: dict[str, Any], named: str
) -> None:
    heard = len(router.workers.prefills)
    error = refusal(router, **fields)
    assert named in error["message"]
    assert "function" not in error["message"], "a word of chats"
    assert len(router.workers.prefills) == heard


@pytest.mark.parametrize("name", ["stop", "stop_sequence"])
@pytest.mark.parametrize("value", ["fox", ["fox"]], ids=str)
def test_stop_sequences_have_other_names(router: RunningRouter, name: str, value: Any) -> None:
    router.says("the fox and the dog")
    answer = post(router, **{name: value})
    assert answer.status_code == 200, answer.text
    assert "x-segue-ignored" not in answer.headers
    message = answer.json()
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "fox")
    assert message["content"][0]["text"] == "the "


def test_names_within_all_tools_are_bounded_as_of_one() -> None:
    # As near to a name as can be without being a slip, in each of a thousand tools: 64 names are compared.
    tools = [[f"descr{at:03}{other:02}n" for other in range(50)] for at in range(1000)]
    began = time.process_time()
    check_names_of_each(tools, "tools", "Anthropic's tool")
    all_of_them = time.process_time() - began
    began = time.process_time()
    for _ in range(50):
        check_names_of_each(tools[:2], "tools", "Anthropic's tool")
    assert all_of_them < (time.process_time() - began)


def test_what_is_passed_over_within_output_config_is_named(router: RunningRouter) -> None:
    answer = post(router, output_config={"task_budget": {"type": "tokens", "total": 1}, "effort": None})
    assert answer.headers["x-segue-ignored"] == "output_config.task_budget"
    schema = {"type": "object", "not": {"required": ["a"]}}
    answer = post(router, output_config={"format": {"type": "json_schema", "schema": schema}})
    assert (answer.status_code, "output_config.format" in answer.text) == (400, True), answer.text
    tool = TOOL | {"input_schema": schema}
    answer = post(router, tools=[tool], tool_choice={"type": "any"})
    assert answer.headers["x-segue-ignored"] == "tools[0].input_schema.not"
