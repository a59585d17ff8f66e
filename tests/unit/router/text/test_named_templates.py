"""A folder may have a chat template of its own for chats with tools, by name: as those of Hermes 2 Pro and Hermes 3."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from router.text.chat_template import SAMPLE_TOOL, ChatOptions
from router.text.tokenizer import Tokenizer
from tests.unit.router.tiny_model import CHAT_TEMPLATE, write_folder

TOOLS = (
    "<|start|>system\n{% for tool in tools %}{{ tool.function.name }}{% endfor %} in <tool_call><|end|>\n"
    + CHAT_TEMPLATE
)
CHAT = [{"role": "user", "content": "the <|end|> fox"}]
WITH_TOOLS = ChatOptions(tools=[SAMPLE_TOOL])


@pytest.fixture(params=["a list in tokenizer_config.json", "files"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    """Of a folder that has its two templates in one of both ways."""
    write_folder(tmp_path, chat_template=None)
    if request.param == "files":
        (tmp_path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(TOOLS)
    else:
        path = tmp_path / "tokenizer_config.json"
        templates = [
            {"name": "default", "template": CHAT_TEMPLATE},
            {"name": "tool_use", "template": TOOLS},
        ]
        path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": templates}))
    return Tokenizer(tmp_path, template_seconds_max=10.0)


def test_tools_are_shown_by_the_template_for_them(tokenizer: Tokenizer) -> None:
    assert tokenizer.shows_tools
    assert tokenizer.answers.format.calls, "the format of its calls stands in that template alone"
    system = "<|start|>system\nsample in <tool_call><|end|>\n"
    shown = tokenizer.decode_all(tokenizer.encode_chat(CHAT, WITH_TOOLS))
    assert shown == system + tokenizer.decode_all(tokenizer.encode_chat(CHAT))


def test_without_tools_a_chat_is_written_by_the_default_one(tokenizer: Tokenizer) -> None:
    text = tokenizer.decode_all(tokenizer.encode_chat(CHAT))
    assert text == "<|start|>user\nthe <|end|> fox<|end|>\n<|start|>assistant\n"


def test_what_a_user_types_is_no_control_token_in_either(tokenizer: Tokenizer) -> None:
    end = tokenizer.marks(frozenset({"<|end|>"}))
    for options, ends in ((ChatOptions(), 1), (WITH_TOOLS, 2)):
        ids = tokenizer.encode_chat(CHAT, options)
        assert sum(token_id in end for token_id in ids) == ends


def test_a_model_that_also_reads_images_may_keep_its_template_apart(tmp_path: Path) -> None:
    write_folder(tmp_path, chat_template=None)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    tokenizer = Tokenizer(tmp_path, template_seconds_max=10.0)
    assert tokenizer.has_chat_template
    assert tokenizer.info["chat_template"] == CHAT_TEMPLATE
    assert tokenizer.decode_all(tokenizer.encode_chat(CHAT)).startswith("<|start|>user\n")
