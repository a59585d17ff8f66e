"""A chat template may be given as a file of its own, and takes the place of the model folder's."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.text.folder_trial import try_folder
from router.text.tokenizer import Tokenizer
from shared.primitives.errors import ModelError
from tests.unit.router.tiny_model import CHAT_TEMPLATE, write_folder

SHORT = "{% for message in messages %}{{ message.content }}<|end|>{% endfor %}"
TOOLS = "{% for tool in tools or [] %}<tool_call>{{ tool.function.name }}{% endfor %}" + SHORT
CHAT = [{"role": "user", "content": "the fox"}]


@pytest.mark.parametrize("own", [None, CHAT_TEMPLATE])
def test_it_writes_the_chats_of_a_folder_with_and_without_one(own: str | None, tmp_path: Path) -> None:
    folder, given = _folder_and_template(tmp_path, SHORT, own)
    try_folder(folder, 10.0, given)
    tokenizer = Tokenizer(folder, 10.0, chat_template=given)
    assert tokenizer.decode_all(tokenizer.encode_chat(CHAT)) == "the fox<|end|>"
    assert tokenizer.info["chat_template"] == SHORT


def test_the_format_of_calls_is_that_of_the_given_one(tmp_path: Path) -> None:
    folder, given = _folder_and_template(tmp_path, TOOLS, CHAT_TEMPLATE)
    tokenizer = Tokenizer(folder, 10.0, chat_template=given)
    assert tokenizer.shows_tools
    assert tokenizer.answers.format.calls
    assert not Tokenizer(folder, 10.0).shows_tools


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"{% for message in messages %}\n{{ message.content ", "should be a Jinja template: line 2"),
        (b"{% for \xff", "should be text in UTF-8: byte 7"),
        (b"#" * ((1 << 20) + 1), "has more than 1 MiB, the most that such a file may have"),
        (None, "cannot be read: No such file or directory"),
    ],
)
def test_what_cannot_be_one_is_said_before_anything_is_served(
    content: bytes | None, sentence: str, tmp_path: Path
) -> None:
    folder, given = _folder_and_template(tmp_path, SHORT, CHAT_TEMPLATE)
    given.unlink() if content is None else given.write_bytes(content)
    with pytest.raises(ModelError) as raised:
        try_folder(folder, 10.0, given)
    assert str(given) in str(raised.value)
    assert sentence in str(raised.value)


def test_one_that_asks_for_more_than_the_samples_have_is_served(tmp_path: Path) -> None:
    refusing = "{% if messages[0].role != 'developer' %}{{ raise_exception('no') }}{% endif %}"
    folder, given = _folder_and_template(tmp_path, refusing, CHAT_TEMPLATE)
    try_folder(folder, 10.0, given)


def _folder_and_template(tmp_path: Path, template: str, own: str | None) -> tuple[Path, Path]:
    folder, given = tmp_path / "model", tmp_path / "given.jinja"
    folder.mkdir()
    given.write_text(template)
    write_folder(folder, chat_template=own)
    return folder, given
