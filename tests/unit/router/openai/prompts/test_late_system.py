"""System messages behind others, for chat templates that take them and for those that refuse them."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import pytest

from router.config import RouterConfig
from router.openai.prompts.chat_messages import without_late_system
from router.openai.prompts.prompts import Prompts
from tests.unit.router.conftest import Routers
from tests.unit.router.openai.messages.claude_code import claude_code_body
from tests.unit.router.openai.tools.agents import CITY_MODEL, CITY_TEMPLATE, CONTEXT_LEN
from tests.unit.router.scripted_workers import MODEL
from tests.unit.router.tiny_model import TinyModel

# As Gemma's and Mistral's: the roles take turns behind one system message.
STRICT = (
    """\
{%- set turns = messages[1:] if messages[0].role == 'system' else messages %}
{%- for message in turns %}
{%- if message.role == 'system' or (loop.index0 % 2 == 0) != (message.role == 'user') %}
{{- raise_exception('roles must take turns') }}{% endif %}
{%- endfor %}
"""
    + CITY_TEMPLATE
)


def said(*messages: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in messages]


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ([("system", "a"), ("user", "b")], [("system", "a"), ("user", "b")]),
        ([("system", "a"), ("system", "b"), ("user", "c")], [("system", "a\n\nb"), ("user", "c")]),
        ([("user", "a"), ("system", "b")], [("user", "a\n\nb")]),
        ([("user", "a"), ("system", "b"), ("user", "c")], [("user", "a\n\nb\n\nc")]),
        (
            [("user", "a"), ("assistant", "b"), ("system", "c"), ("user", "d")],
            [("user", "a"), ("assistant", "b"), ("user", "c\n\nd")],
        ),
        (
            [("user", "a"), ("system", "b"), ("assistant", "c"), ("user", "d"), ("user", "e")],
            [("user", "a\n\nb"), ("assistant", "c"), ("user", "d"), ("user", "e")],
        ),
    ],
)
def test_a_late_system_message_is_the_users_text(
    given: list[tuple[str, str]], made: list[tuple[str, str]]
) -> None:
    before = said(*given)
    assert without_late_system(list(before)) == said(*made)
    assert before == said(*given), "what was given stays"


def test_a_template_that_refuses_them_serves_claude_code_and_chats(routers: Routers) -> None:
    router = routers(TinyModel(STRICT, CONTEXT_LEN))
    assert not router.tokenizer.takes_late_system
    chat = {"model": MODEL, "messages": said(("user", "hi"), ("system", "be brief"))}
    for path, asked in (("messages", claude_code_body(MODEL)), ("chat/completions", chat)):
        answer = router.http.post(f"/v1/{path}", json=asked)
        assert answer.status_code == 200, answer.text
    assert "<|start|>user\nhi\n\nbe brief<|end|>" in router.prompt


def test_a_template_that_takes_them_is_given_them(routers: Routers) -> None:
    assert routers(CITY_MODEL).tokenizer.takes_late_system


# ---- a prompt that is refused is freed with its answer: no cycle keeps it until the garbage collector comes by -------


class Prompt:
    """What the work holds."""


async def refused(prompts: Prompts) -> weakref.ref[Prompt]:
    prompt = Prompt()

    def work(prompt: Prompt = prompt) -> None:
        raise ValueError(f"{prompt} is too long")

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError("the client stays")

    with pytest.raises(ValueError, match="too long"):
        await prompts.run("tenant", receive, work)
    return weakref.ref(prompt)


def test_a_refused_prompt_is_freed_at_once() -> None:
    prompts = Prompts(None, RouterConfig())  # type: ignore[arg-type]
    gc.disable()
    try:
        assert asyncio.run(refused(prompts))() is None
    finally:
        gc.enable()
        prompts.close()
