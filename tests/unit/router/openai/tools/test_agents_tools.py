"""What agents send beside functions: namespaces, tools of other servers, filters, lenient schemas, old items."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from router.openai.tools.declared import TOOLS_MAX
from tests.unit.router.openai.responses.test_responses import events, refusal, stable, whole
from tests.unit.router.openai.tools.agents import (
    AGENTS,
    FUNCTION,
    HOSTED,
    PATCH_TOOL,
    TOOLS,
    call,
    grammar_of,
    ignored,
    posted,
)
from tests.unit.router.openai.tools.test_tools_over_http import asked
from tests.unit.router.scripted_workers import MODEL, RunningRouter

# ---- tools of other servers


@pytest.mark.parametrize("choice", [None, "auto", "none"])
def test_tools_of_other_servers_are_left_out_and_named(router: RunningRouter, choice: str | None) -> None:
    router.says("Hello")
    fields = {} if choice is None else {"tool_choice": choice}
    answer = posted(router, tools=TOOLS, **fields)
    named = [f"tools[{at}].{one['type']}" for at, one in enumerate(HOSTED[:-1], 3)] + ["tools[11]"]
    assert [name for name in ignored(answer) if name != "tools[1].format"] == named
    assert "web_search" not in router.prompt
    assert ("exec_command" in router.prompt) == (choice != "none")
    told = answer.json()["tools"]
    assert [tool["type"] for tool in told] == ["function", "custom", "namespace"]
    assert "secret" not in answer.text
    assert ignored(posted(router, tools=[FUNCTION])) == []


def test_tools_of_other_servers_alone_are_none(router: RunningRouter) -> None:
    router.says(call("exec_command", cmd="ls"))
    for path in ("responses", "chat/completions"):
        answer = posted(router, path, tools=[{"type": "web_search"}])
        assert ignored(answer) == ["tools[0].web_search"]
        assert "</tool_call>" in answer.text, "without tools a call is text"


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "web_search_preview"},
        {"type": "mcp", "server_label": "a"},
        {"type": "function", "name": "web_search"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "web_search"}]},
    ],
    ids=str,
)
def test_a_forced_tool_that_was_left_out_is_refused(router: RunningRouter, choice: Any) -> None:
    heard = len(router.workers.prefills)
    error = refusal(router, tools=[{"type": "web_search"}], tool_choice=choice)
    assert error["param"] == "tool_choice"
    assert len(router.workers.prefills) == heard


def test_a_choice_that_asks_for_a_tool_of_another_server_says_so(router: RunningRouter) -> None:
    error = refusal(router, tools=TOOLS, tool_choice={"type": "web_search"})
    assert "does not run" in error["message"]


# ---- namespaces


def test_a_tool_of_a_namespace_is_called_by_both_names_and_answered_under_its_own(
    router: RunningRouter,
) -> None:
    router.says(call("multi_agent_v1__spawn_agent", task="x"))
    answer = whole(router, tools=TOOLS)
    assert "multi_agent_v1__spawn_agent" in router.prompt
    (item,) = answer["output"]
    assert (item["type"], item["namespace"], item["name"]) == (
        "function_call",
        "multi_agent_v1",
        "spawn_agent",
    )
    found = events(router, tools=TOOLS)
    assert stable(found[-1]["response"]["output"]) == stable(answer["output"])
    assert {event["name"] for event in found if event["type"].endswith("arguments.done")} == {"spawn_agent"}
    router.says("Done.")
    result = {"type": "function_call_output", "call_id": item["call_id"], "output": "started"}
    whole(router, tools=TOOLS, input=[{"role": "user", "content": "hi"}, item, result])
    shown = router.prompt
    assert '<multi_agent_v1__spawn_agent {"task": "x"}><|end|>' in shown
    assert f"started of {item['call_id']}" in shown


def test_a_name_that_only_looks_joined_stays(router: RunningRouter) -> None:
    plain = {"type": "function", "name": "get__weather"}
    router.says(call("get__weather"))
    (item,) = whole(router, tools=[plain])["output"]
    assert (item["name"], item.get("namespace")) == ("get__weather", None)
    (item,) = whole(router, tools=[plain, AGENTS], tool_choice={"type": "function", "name": "get__weather"})[
        "output"
    ]
    assert item["name"] == "get__weather"


def test_a_tool_of_a_namespace_can_be_forced(router: RunningRouter) -> None:
    router.says(call("multi_agent_v1__spawn_agent"))
    for choice in (
        {"type": "function", "name": "spawn_agent"},
        {"type": "function", "name": "spawn_agent", "namespace": "multi_agent_v1"},
        {"type": "function", "name": "multi_agent_v1__spawn_agent"},
    ):
        (item,) = whole(router, tools=TOOLS, tool_choice=choice)["output"]
        assert item["name"] == "spawn_agent"
        assert "exec_command" not in grammar_of(router)


def test_tools_within_namespaces_count(router: RunningRouter) -> None:
    many = [{"type": "function", "name": f"f{at}"} for at in range(TOOLS_MAX)]
    error = refusal(router, tools=[FUNCTION, {"type": "namespace", "name": "a", "tools": many}])
    assert (error["param"], str(TOOLS_MAX) in error["message"]) == ("tools", True)


# ---- filters


def test_allowed_tools_are_a_filter(client: openai.OpenAI, router: RunningRouter) -> None:
    router.says(call("exec_command", cmd="ls"))
    only = [{"type": "function", "name": "exec_command"}]
    for mode in ("auto", "required"):
        choice = {"type": "allowed_tools", "mode": mode, "tools": only}
        assert [item["type"] for item in whole(router, tools=TOOLS, tool_choice=choice)["output"]] == [
            "function_call"
        ]
        assert ("exec_command" in router.prompt, "apply_patch" in router.prompt) == (
            True,
            False,
        )
        assert ("exec_command" in grammar_of(router)) == (mode == "required")
    nested = [
        {"type": "function", "function": {key: FUNCTION[key] for key in ("name", "parameters")}},
        PATCH_TOOL,
    ]
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "exec_command"}}]}
    message = asked(client, tools=nested, tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert message.choices[0].message.tool_calls[0].function.name == "exec_command"
    assert "apply_patch" not in router.prompt
    spaces = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "namespace", "name": "multi_agent_v1"}],
    }
    whole(router, tools=TOOLS, tool_choice=spaces)
    assert ("note" in router.prompt, "exec_command" in router.prompt) == (True, False)


@pytest.mark.parametrize(
    "allowed",
    [
        {"mode": "always", "tools": []},
        {"mode": "auto"},
        {"mode": "auto", "tools": [{"name": "x"}]},
        {"mode": "auto", "tools": [{"type": "function", "name": "x"}]},
    ],
    ids=str,
)
def test_a_filter_that_is_wrong_is_refused(router: RunningRouter, allowed: dict[str, Any]) -> None:
    error = refusal(router, tools=TOOLS, tool_choice={"type": "allowed_tools", **allowed})
    assert error["param"] == "tool_choice"


# ---- schemas


@pytest.mark.parametrize("path", ["responses", "chat/completions"])
def test_a_schema_that_is_not_strict_is_kept_as_far_as_it_can_be(router: RunningRouter, path: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}, "not": {}}

    def tool(**more: Any) -> dict[str, Any]:
        function = {"name": "f", "parameters": schema, **more}
        return {"type": "function", **(function if path == "responses" else {"function": function})}

    where = "tools[0].parameters" if path == "responses" else "tools[0].function.parameters"
    router.says(call("f", a=[]))
    answer = posted(router, path, tools=[tool()], tool_choice="required")
    assert ignored(answer) == [f"{where}.not", f"{where}.uniqueItems"]
    said = {"input": "x"} if path == "responses" else {"messages": [{"role": "user", "content": "x"}]}
    refused = router.http.post(
        f"/v1/{path}",
        json={"model": MODEL, **said, "tools": [tool(strict=True)]},
        timeout=20,
    )
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, where)
    assert "start:" not in error["message"]


# ---- what else agents send


def test_items_of_other_servers_tools_are_passed_over_and_named(router: RunningRouter) -> None:
    router.says("Hello")
    items = [
        {"role": "user", "content": "hi"},
        {
            "type": "web_search_call",
            "id": "ws_1",
            "status": "completed",
            "action": {"type": "search", "query": "x"},
        },
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": "xyz"},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "So.", "annotations": []}],
        },
        {"role": "user", "content": "on"},
    ]
    assert ignored(posted(router, input=items)) == ["web_search_call"]
    assert "So.<|end|><|start|>user\non" in router.prompt
    error = refusal(router, input=[*items, {"type": "compaction", "encrypted_content": "x"}])
    assert error["param"] == "input[5].type"


def test_what_an_answer_never_has_is_named(router: RunningRouter) -> None:
    router.says("Hello")
    include = ["reasoning.encrypted_content", "message.output_text.logprobs", "made_up"]
    answer = posted(router, include=include, reasoning={"summary": "auto"}, store=True, truncation="auto")
    assert ignored(answer) == [
        "truncation",
        "reasoning.summary",
        "include.reasoning.encrypted_content",
        "include",
    ]
    error = refusal(router, previous_response_id="resp_1")
    assert "send the whole conversation" in error["message"]
