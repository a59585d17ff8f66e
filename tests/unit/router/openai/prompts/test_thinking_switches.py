"""The switches for thoughts of many servers are one, and messages that frameworks send back are taken as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import httpx2
import pytest

from tests.unit.router.conftest import Routers
from tests.unit.router.scripted_workers import MODEL, RunningRouter
from tests.unit.router.tiny_model import TinyModel

MESSAGES = """\
{%- for message in messages %}[{{ message.role }}{% if message.reasoning_content %} thought \
{{ message.reasoning_content }}{% endif %}:{{ message.content }}]{% endfor %}"""
TEMPLATES = {
    "a switch that is on": MESSAGES
    + "{% if enable_thinking is defined and not enable_thinking %}[off]{% endif %}<think>",
    "DeepSeek's switch, which is off": MESSAGES + "{% if thinking %}[on]<think>{% endif %}",
    "an effort": MESSAGES + "[effort {{ reasoning_effort or 'medium' }}]<think>",
    "none, and thoughts always": MESSAGES + "<|start|>assistant\n<think>\n",
    "none, and no thoughts": MESSAGES,
}
OFF: list[dict[str, Any]] = [
    {"thinking": {"type": "disabled"}},
    {"thinking": False},
    {"enable_thinking": False},
    {"think": False},
    {"reasoning": {"enabled": False}},
    {"reasoning": {"effort": "none"}},
    {"disable_reasoning": True},
    {"reasoning_effort": "none"},
    {"thinking_budget": 0},
    {"thinking_token_budget": 0},
    {"reasoning_budget": 0},
    {"chat_template_kwargs": {"enable_thinking": False, "thinking": False}},
    # Dify's default body, and others that say the same more than once
    {"thinking": {"type": "disabled"}, "chat_template_kwargs": {"enable_thinking": False, "thinking": False}},
    {"enable_thinking": False, "reasoning_effort": "none", "thinking_budget": 0},
]
ON: list[dict[str, Any]] = [
    {"thinking": {"type": "enabled"}},
    {"thinking": True},
    {"enable_thinking": True},
    {"think": True},
    {"reasoning": {"enabled": True}},
    {"chat_template_kwargs": {"enable_thinking": True, "thinking": True}},
]


OFF_IN_MESSAGES: list[dict[str, Any]] = [{}, {"thinking": {"type": "disabled"}}]


@dataclass
class Chats:
    """A router for each template."""

    routers: Routers

    def ask(
        self, template: str, messages: Any = ({"role": "user", "content": "hi"},), **fields: Any
    ) -> httpx2.Response:
        return self.ask_messages(template, "chat/completions", messages=messages, **fields)

    def ask_messages(self, template: str, path: str = "messages", **fields: Any) -> httpx2.Response:
        """The same of /v1/messages, or of another path."""
        message = {"role": "user", "content": "hi"}
        body = {"model": MODEL, "messages": [message], "max_tokens": 8, **fields}
        return self.router(template).http.post(f"/v1/{path}", json=body)

    def prompt(self, template: str) -> str:
        """The last one that a worker got."""
        return self.router(template).prompt

    def router(self, template: str) -> RunningRouter:
        parser = "none" if template == "none, and no thoughts" else "auto"
        return self.routers(TinyModel(TEMPLATES[template], reasoning_parser=parser))


@pytest.fixture
def chats(routers: Routers) -> Chats:
    return Chats(routers)


@pytest.mark.parametrize("fields", OFF, ids=str)
def test_every_dialect_turns_thoughts_off(chats: Chats, fields: dict[str, Any]) -> None:
    answer = chats.ask("a switch that is on", **fields)
    assert answer.status_code == 200, answer.text
    assert "[off]" in chats.prompt("a switch that is on")
    assert "x-segue-ignored" not in answer.headers


@pytest.mark.parametrize("fields", ON, ids=str)
def test_every_dialect_turns_thoughts_on(chats: Chats, fields: dict[str, Any]) -> None:
    answer = chats.ask("DeepSeek's switch, which is off", **fields)
    assert answer.status_code == 200, answer.text
    assert "[on]" in chats.prompt("DeepSeek's switch, which is off")
    assert "x-segue-ignored" not in answer.headers


def test_a_chat_that_says_nothing_of_thoughts_is_the_templates_own(chats: Chats) -> None:
    chats.ask("a switch that is on")
    assert "[off]" not in chats.prompt("a switch that is on")
    chats.ask("DeepSeek's switch, which is off")
    assert "[on]" not in chats.prompt("DeepSeek's switch, which is off")


@pytest.mark.parametrize("fields", OFF, ids=str)
def test_off_asks_for_nothing_of_a_model_that_does_not_think(chats: Chats, fields: dict[str, Any]) -> None:
    answer = chats.ask("none, and no thoughts", **fields)
    assert answer.status_code == 200, answer.text
    assert "x-segue-ignored" not in answer.headers


def test_a_wish_that_the_model_cannot_meet_is_named(chats: Chats) -> None:
    answer = chats.ask("none, and no thoughts", thinking={"type": "enabled", "budget_tokens": 1024})
    assert answer.headers["x-segue-ignored"] == "thinking, thinking.budget_tokens"
    answer = chats.ask("none, and thoughts always", enable_thinking=False)
    assert answer.headers["x-segue-ignored"] == "enable_thinking"
    assert "x-segue-ignored" not in chats.ask("none, and thoughts always", enable_thinking=True).headers
    answer = chats.ask("a switch that is on", thinking_token_budget=64, reasoning={"max_tokens": 5})
    assert answer.headers["x-segue-ignored"] == "thinking_token_budget, reasoning.max_tokens"
    assert (
        chats.ask("a switch that is on", thinking={"type": "loud"}).headers["x-segue-ignored"] == "thinking"
    )


def test_an_effort_goes_to_a_template_that_has_it(chats: Chats) -> None:
    for fields in ({"reasoning_effort": "high"}, {"reasoning": {"effort": "high"}}, {"think": "high"}):
        answer = chats.ask("an effort", **fields)
        assert "x-segue-ignored" not in answer.headers
        assert "[effort high]" in chats.prompt("an effort")
    assert "x-segue-ignored" not in chats.ask("a switch that is on", reasoning_effort="low").headers
    answer = chats.ask("none, and no thoughts", reasoning_effort="low")
    assert answer.headers["x-segue-ignored"] == "reasoning_effort"


@pytest.mark.parametrize(
    ("fields", "off", "named"),
    [
        (
            {"chat_template_kwargs": {"enable_thinking": False}, "thinking": {"type": "enabled"}},
            True,
            "thinking",
        ),
        ({"enable_thinking": True, "thinking": {"type": "disabled"}}, False, "thinking"),
        ({"thinking": {"type": "disabled"}, "think": True}, True, "think"),
        ({"think": True, "reasoning": {"enabled": False}}, False, "reasoning.enabled"),
        ({"reasoning": {"enabled": False}, "disable_reasoning": False}, True, "disable_reasoning"),
        ({"disable_reasoning": False, "reasoning_effort": "none"}, False, "reasoning_effort"),
        ({"enable_thinking": True, "thinking_budget": 0}, False, "thinking_budget"),
    ],
    ids=str,
)
def test_of_contradictions_the_first_in_the_documented_order_counts(
    chats: Chats, fields: dict[str, Any], off: bool, named: str
) -> None:
    answer = chats.ask("a switch that is on", **fields)
    assert answer.headers["x-segue-ignored"] == named
    assert ("[off]" in chats.prompt("a switch that is on")) is off


@pytest.mark.parametrize(
    ("fields", "content", "thoughts"),
    [
        ({}, "fox", "dog"),
        ({"reasoning_format": "parsed"}, "fox", "dog"),
        ({"reasoning_format": "hidden"}, "fox", None),
        ({"reasoning": {"exclude": True}}, "fox", None),
        ({"include_reasoning": False}, "fox", None),
        ({"reasoning_format": "raw"}, "dog</think>fox", None),
        ({"separate_reasoning": False}, "dog</think>fox", None),
    ],
    ids=str,
)
def test_who_sees_thoughts_is_said_in_several_words(
    chats: Chats, fields: dict[str, Any], content: str, thoughts: str | None
) -> None:
    chats.router("none, and thoughts always").says("dog</think>fox")
    answer = chats.ask("none, and thoughts always", max_tokens=100, **fields)
    message = answer.json()["choices"][0]["message"]
    assert (message["content"], message.get("reasoning_content")) == (content, thoughts)


@pytest.mark.parametrize(
    "thinking", [{"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}], ids=str
)
def test_messages_turn_thoughts_on_by_the_templates_own_switch(
    chats: Chats, thinking: dict[str, Any]
) -> None:
    budget = ["thinking.budget_tokens"] if "budget_tokens" in thinking else []
    for template, named in (("DeepSeek's switch, which is off", []), ("none, and no thoughts", ["thinking"])):
        answer = chats.ask_messages(template, thinking=thinking)
        assert answer.status_code == 200, answer.text
        assert answer.headers.get("x-segue-ignored", "") == ", ".join(named + budget)
    assert "[on]" in chats.prompt("DeepSeek's switch, which is off")


def test_messages_name_an_effort_that_is_passed_over(chats: Chats) -> None:
    effort: dict[str, Any] = {"output_config": {"effort": "high"}}
    for template in ("none, and no thoughts", "a switch that is on"):
        answer = chats.ask_messages(template, **effort)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-segue-ignored"] == "output_config.effort"
    assert "[off]" in chats.prompt("a switch that is on"), "nothing asked for thoughts"
    assert "x-segue-ignored" not in chats.ask_messages("an effort", **effort).headers
    assert "[effort high]" in chats.prompt("an effort")
    answer = chats.ask_messages("a switch that is on", **effort, thinking={"type": "adaptive"})
    assert "x-segue-ignored" not in answer.headers


def test_messages_without_a_wish_name_nothing(chats: Chats) -> None:
    for template in TEMPLATES:
        for off in OFF_IN_MESSAGES:
            answer = chats.ask_messages(template, **off)
            unmet = off and template in ("an effort", "none, and thoughts always")
            assert answer.headers.get("x-segue-ignored") == ("thinking" if unmet else None)


def test_an_effort_that_the_template_reads_is_not_named(chats: Chats) -> None:
    answer = chats.ask("an effort", thinking={"type": "disabled"}, reasoning_effort="high")
    assert answer.headers["x-segue-ignored"] == "thinking"
    assert "[effort high]" in chats.prompt("an effort")


def test_a_model_without_tools_is_told_of_in_one_sentence(chats: Chats) -> None:
    template = "none, and no thoughts"
    schema = {"type": "object", "properties": {}}
    function = {"type": "function", "function": {"name": "f", "parameters": schema}}
    answers = [
        chats.ask(template, tools=[function]),
        *(
            chats.ask_messages(template, path, tools=[{"name": "f", "input_schema": schema}])
            for path in ("messages", "messages/count_tokens")
        ),
    ]
    assert {answer.status_code for answer in answers} == {400}
    (said,) = {answer.json()["error"]["message"] for answer in answers}
    assert said.startswith("this model's chat template does not show calls of tools: use a model that")
    assert answers[0].json()["error"]["param"] == "tools"


SENT_BACK: dict[str, tuple[dict[str, Any], str]] = {
    "an answer that was cut in its thoughts": ({"role": "assistant", "content": None}, "[assistant:]"),
    "no content": ({"role": "assistant"}, "[assistant:]"),
    "an empty list": ({"role": "assistant", "content": []}, "[assistant:]"),
    "a result of null": ({"role": "tool", "content": None, "tool_call_id": "1"}, "[tool:]"),
    "a result of nothing": ({"role": "tool", "content": [], "tool_call_id": "1"}, "[tool:]"),
    "Anthropic's thoughts": (
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "redacted_thinking", "data": "zz"},
                {"type": "text", "text": "fox"},
            ],
        },
        "[assistant thought hm:fox]",
    ),
    "Mistral's thoughts": (
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}],
        },
        "[assistant thought hm:]",
    ),
    "a part of refusal": (
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        "[assistant:no]",
    ),
    "a refusal": ({"role": "assistant", "content": None, "refusal": "no"}, "[assistant:no]"),
    "parts of Responses": (
        {"role": "assistant", "content": [{"type": "output_text", "text": "fox", "annotations": []}]},
        "[assistant:fox]",
    ),
    "thoughts of SGLang": (
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": []},
        "[assistant thought hm:]",
    ),
}


@pytest.mark.parametrize(("message", "shown"), SENT_BACK.values(), ids=SENT_BACK)
def test_what_frameworks_send_back_is_taken(chats: Chats, message: dict[str, Any], shown: str) -> None:
    user = {"role": "user", "content": "hi"}
    answer = chats.ask("none, and no thoughts", [user, message, user])
    assert answer.status_code == 200, answer.text
    assert chats.prompt("none, and no thoughts") == f"[user:hi]{shown}[user:hi]"
