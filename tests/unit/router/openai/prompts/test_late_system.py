"""System messages behind others, for chat templates that take them and for those that refuse them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from router.openai.prompts.chat_messages import without_late_system
from router.text.tokenizer import Tokenizer
from tests.unit.router.openai.messages.claude_code import claude_code_body
from tests.unit.router.openai.tools.test_tools_over_http import CONTEXT_LEN, LIMITS, TEMPLATE
from tests.unit.router.scripted_workers import MODEL, RunningRouter
from tests.unit.router.tiny_model import write_folder

# As Gemma's and Mistral's: the roles take turns behind one system message.
STRICT = (
    """\
{%- set turns = messages[1:] if messages[0].role == 'system' else messages %}
{%- for message in turns %}
{%- if message.role == 'system' or (loop.index0 % 2 == 0) != (message.role == 'user') %}
{{- raise_exception('roles must take turns') }}{% endif %}
{%- endfor %}
"""
    + TEMPLATE
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


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningRouter, Tokenizer]]:
    folder = write_folder(tmp_path_factory.mktemp("strict"), chat_template=STRICT, context_len=CONTEXT_LEN)
    with RunningRouter(folder, limits=LIMITS) as running:
        yield running, Tokenizer(folder, template_seconds_max=5)


def test_a_template_that_refuses_them_serves_claude_code_and_chats(
    strict: tuple[RunningRouter, Tokenizer],
) -> None:
    router, tokenizer = strict
    assert not tokenizer.takes_late_system
    chat = {"model": MODEL, "messages": said(("user", "hi"), ("system", "be brief"))}
    for path, asked in (("messages", claude_code_body(MODEL)), ("chat/completions", chat)):
        answer = httpx2.post(f"{router.url}/v1/{path}", json=asked, timeout=20)
        assert answer.status_code == 200, answer.text
    assert "<|start|>user\nhi\n\nbe brief<|end|>" in tokenizer.decode_all(
        router.workers.prefills[-1].token_ids
    )


def test_a_template_that_takes_them_is_given_them(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, chat_template=TEMPLATE, context_len=CONTEXT_LEN)
    assert Tokenizer(folder, template_seconds_max=5).takes_late_system
