"""What the model is shown of a request to /v1/messages, and what of it is passed over or refused."""

from __future__ import annotations

from typing import Any

import pytest

from router.openai.fields.table import fields_of
from router.openai.messages.fields import MessagesFields
from router.openai.messages.history import OBJECTS_PER_TOKEN_MAX
from router.text.tokenizer import Tokenizer
from tests.unit.router.openai.messages.asking import (
    HEADERS,
    QUESTION,
    TOOL,
    body,
    post,
    refusal,
    text,
    user,
    whole,
)
from tests.unit.router.openai.messages.claude_code import claude_code_body
from tests.unit.router.openai.tools.agents import CALL, CONTEXT_LEN
from tests.unit.router.scripted_workers import MODEL, RunningRouter

# Of the `anthropic` package 2.14, of its beta client too; those of the client itself are left out.
PARAMETERS = {
    "betas",
    "billing_policy",
    "cache_control",
    "compaction",
    "container",
    "context_management",
    "diagnostics",
    "fallback_credit_token",
    "fallbacks",
    "inference_geo",
    "max_tokens",
    "mcp_servers",
    "messages",
    "metadata",
    "model",
    "output_config",
    "output_format",
    "service_tier",
    "speed",
    "stop_sequences",
    "stream",
    "system",
    "temperature",
    "thinking",
    "thread",
    "tool_choice",
    "tools",
    "top_k",
    "top_p",
    "user_profile_id",
    "workspace_id",
}
EPHEMERAL = {"type": "ephemeral"}


def prompt_of(router: RunningRouter, *messages: Any, **fields: Any) -> str:
    whole(router, messages=list(messages) or [QUESTION], **fields)
    return router.prompt


def test_system_prompts_are_one_message(router: RunningRouter) -> None:
    plain = prompt_of(router, system="Be brief.")
    assert plain.startswith("<|start|>system\nBe brief.<|end|><|start|>user\nHow is it in Paris?<|end|>")
    blocks = [text("Be brief.", cache_control=EPHEMERAL), text("Be kind.")]
    assert "<|start|>system\nBe brief.\nBe kind.<|end|>" in prompt_of(router, system=blocks)


def test_a_line_that_differs_in_each_request_does_not_spoil_the_cache(router: RunningRouter) -> None:
    prompts = {
        prompt_of(router, system=[text(f"x-anthropic-billing-header: cc={at};"), text("Be brief.")])
        for at in range(2)
    }
    assert len(prompts) == 1
    assert "billing" not in prompts.pop()


def test_a_conversation_with_tools_comes_back_whole(router: RunningRouter, tokenizer: Tokenizer) -> None:
    router.says(f"<think>\nSo.\n</think>\n\nI look:\n{CALL}\n{CALL.replace('Paris', 'Bonn')}")
    first = whole(router, tools=[TOOL])
    calls = [block for block in first["content"] if block["type"] == "tool_use"]
    results = [
        {"type": "tool_result", "tool_use_id": calls[0]["id"], "content": "<|end|> rain"},
        {
            "type": "tool_result",
            "tool_use_id": calls[1]["id"],
            "content": [text("no"), text("such city")],
            "is_error": True,
        },
        text("Well?"),
    ]
    said = {"role": "assistant", "content": first["content"]}
    prompt = prompt_of(router, QUESTION, said, user(*results), tools=[TOOL])
    assert "I look:<weather Paris><weather Bonn><|end|>" in prompt
    assert f"<|start|>tool\n<|end|> rain of {calls[0]['id']}<|end|>" in prompt
    assert f"<|start|>tool\nError: no\nsuch city of {calls[1]['id']}<|end|>" in prompt
    assert prompt.endswith("<|start|>user\nWell?<|end|><|start|>assistant\n")
    ends = router.last_prefill.token_ids.count(tokenizer.encode("<|end|>", False)[0])
    assert ends == prompt.count("<|end|>") - 1, "what a tool says is text"


def test_messages_of_one_role_are_one(router: RunningRouter) -> None:
    prompt = prompt_of(
        router,
        user(text("a"), text("b")),
        user(text("c")),
        {"role": "assistant", "content": "d"},
        {"role": "assistant", "content": [text("e")]},
        user(text("f")),
    )
    assert "<|start|>user\na\nb\nc<|end|><|start|>assistant\nd\ne<|end|><|start|>user\nf<|end|>" in prompt


def test_the_answer_goes_on_where_the_last_message_ends(router: RunningRouter) -> None:
    prompt = prompt_of(router, QUESTION, {"role": "assistant", "content": "In Paris it"})
    assert prompt.endswith("<|start|>assistant\nIn Paris it")


def test_thoughts_of_earlier_turns_are_taken_back(router: RunningRouter) -> None:
    said = [
        {"type": "thinking", "thinking": "So.", "signature": "x"},
        {"type": "redacted_thinking", "data": "eA=="},
        text("Paris."),
    ]
    answer = post(router, messages=[QUESTION, {"role": "assistant", "content": said}, user(text("Why?"))])
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-segue-ignored"] == "redacted_thinking"


def test_documents_of_text_are_text(router: RunningRouter) -> None:
    plain = {"type": "document", "title": "T", "source": {"type": "text", "data": "D"}}
    blocks = {"type": "document", "source": {"type": "content", "content": [text("E")]}}
    found = {"type": "search_result", "title": "S", "source": "s", "content": [text("F")]}
    assert "<|start|>user\nT\nD\nE\nS\nF\nWell?<|end|>" in prompt_of(
        router, user(plain, blocks, found, text("Well?"))
    )


def test_a_switch_makes_the_model_think(router: RunningRouter) -> None:
    for thinking in ({"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}):
        assert prompt_of(router, thinking=thinking).endswith("<think>\n")
    for off in ({"type": "disabled"}, None):
        assert not prompt_of(router, thinking=off).endswith("<think>\n")


def test_tools_that_a_client_runs_are_functions(router: RunningRouter) -> None:
    tools = [
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
        {"type": "memory_20250818", "name": "memory"},
        {**TOOL, "type": "custom", "cache_control": EPHEMERAL, "eager_input_streaming": True},
    ]
    prompt = prompt_of(router, tools=tools)
    for name, part in (("bash", "restart"), ("str_replace_based_edit_tool", "view_range")):
        assert name in prompt
        assert part in prompt
    assert "weather" in prompt


def test_tools_that_anthropic_runs_are_left_out_and_named(router: RunningRouter) -> None:
    tools = [
        {"type": "web_search_20250305", "name": "web_search"},
        TOOL,
        {"type": "computer_20250124", "name": "c"},
    ]
    answer = post(router, tools=tools)
    assert answer.headers["x-segue-ignored"] == "tools[0].web_search, tools[2].computer"
    assert "web_search" not in router.prompt
    assert "weather" in router.prompt
    error = refusal(router, tools=tools, tool_choice={"type": "tool", "name": "web_search"})
    assert "tools[0]" in error["message"]


def test_deferred_tools_are_shown_once_they_were_found(router: RunningRouter) -> None:
    search = {"name": "find", "input_schema": {"type": "object"}}
    tools: list[Any] = [search, {**TOOL, "defer_loading": True}]
    assert "weather" not in prompt_of(router, tools=tools)
    call = {"type": "tool_use", "id": "a", "name": "find", "input": {"city": ""}}
    found = {
        "type": "tool_result",
        "tool_use_id": "a",
        "content": [{"type": "tool_reference", "tool_name": "weather"}],
    }
    asked = [QUESTION, {"role": "assistant", "content": [call]}, user(found)]
    assert '"city"' in prompt_of(router, *asked, tools=tools)
    added = {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "weather"}}
    system = {"role": "system", "content": [added]}
    assert '"city"' in prompt_of(router, QUESTION, system, tools=tools)
    removed = {"role": "system", "content": [added | {"type": "tool_removal"}]}
    assert '"city"' not in prompt_of(router, QUESTION, system, removed, tools=tools)
    server_side = [{"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}, tools[1]]
    assert '"city"' in prompt_of(router, tools=server_side)


def test_a_choice_of_tools_is_kept(router: RunningRouter) -> None:
    router.says(CALL)
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}):
        assert whole(router, tools=[TOOL], tool_choice=choice)["stop_reason"] == "tool_use"
        assert router.last_prefill.params.grammar is not None
    router.says("the fox")
    assert "weather" not in prompt_of(router, tools=[TOOL], tool_choice={"type": "none"})


@pytest.mark.parametrize("path", ["messages", "messages/count_tokens"])
def test_the_model_may_be_left_out(router: RunningRouter, path: str) -> None:
    asked = {name: value for name, value in body().items() if name != "model"}
    answer = router.http.post(f"/v1/{path}", json=asked, headers=HEADERS)
    assert answer.status_code == 200, answer.text
    assert answer.json().get("model", MODEL) == MODEL


def test_sampling_is_the_clients(router: RunningRouter) -> None:
    whole(router, temperature=0.5, top_p=0.4, top_k=3, seed=7, min_p=0.1, repetition_penalty=1.5)
    params = router.last_prefill.params
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (0.5, 0.4, 3, 7)
    assert (params.min_p, params.repetition_penalty) == (0.1, 1.5)


def test_claude_codes_body_is_served(router: RunningRouter) -> None:
    headers = HEADERS | {"anthropic-beta": "claude-code-20250219,context-management-2025-06-27"}
    asked = claude_code_body(MODEL)
    answer = router.http.post("/v1/messages?beta=true", json=asked, headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.text.endswith('event: message_stop\ndata: {"type":"message_stop"}\n\n')
    assert answer.headers["x-segue-ignored"] == "context_management, x-anthropic-billing-header"
    prompt = router.prompt
    assert prompt.count("<|start|>system") == 2
    assert "Bash" in prompt
    assert "mcp__notes__add" not in prompt


def test_tokens_are_counted_as_they_are_prefilled(router: RunningRouter) -> None:
    fields: dict[str, Any] = {"tools": [TOOL], "system": "Be brief.", "thinking": {"type": "adaptive"}}
    whole(router, **fields)
    prefilled = len(router.last_prefill.token_ids)
    counted = body(**fields)
    del counted["max_tokens"]
    answer = router.http.post("/v1/messages/count_tokens", json=counted, headers=HEADERS)
    assert answer.json() == {"input_tokens": prefilled}
    heard = len(router.workers.prefills)
    beyond = [{"role": "user", "content": "x🙂" * CONTEXT_LEN}]
    answer = post(router, "/v1/messages/count_tokens", messages=beyond)
    assert answer.json()["input_tokens"] > CONTEXT_LEN
    error = refusal(router, path="/v1/messages/count_tokens", messages=[user({"type": "image"})])
    assert "messages[0].content[0] is an image" in error["message"]
    assert len(router.workers.prefills) == heard


def test_more_blocks_than_the_context_could_hold_are_not_read(router: RunningRouter) -> None:
    most = OBJECTS_PER_TOKEN_MAX * CONTEXT_LEN
    bodies: list[dict[str, Any]] = [{"messages": [user(*[{}] * (most + 1))]}, {"system": [{}] * (most + 1)}]
    for fields in bodies:
        assert refusal(router, **fields)["message"].startswith("prompt is too long: messages has more blocks")


def test_the_served_fields_of_the_table_are_those_of_the_struct() -> None:
    served = {name for name, field in fields_of("messages").items() if field.state == "served"}
    assert served == set(MessagesFields.__struct_fields__)


def test_the_table_has_every_parameter_of_the_anthropic_package() -> None:
    assert PARAMETERS - set(fields_of("messages")) == set()
