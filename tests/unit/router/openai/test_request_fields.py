"""What lives on of a request when it is tokenized: its small fields and its token ids, not its body."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from router.config import RouterConfig
from router.openai.answers.resumable_streams import AskedStream, Resuming
from router.openai.completions import CompletionEndpoint
from router.openai.fields.ignored import Ignored
from router.openai.fields.table import NEUTRAL_BYTES_MAX, is_neutral
from router.openai.prompts.prompts import Prompts
from router.openai.request_fields import (
    ChatFields,
    CompletionFields,
    read_fields,
)
from router.openai.serving import OpenAIServing
from router.text.tokenizer import Tokenizer
from shared.primitives.errors import RequestError
from tests.unit.router.scripted_workers import MODEL

USER = {"role": "user", "content": "fox"}


@pytest.mark.parametrize("fields", [{"prompt": "fox"}, {"prompt": [5, 6]}, {"messages": [USER]}], ids=str)
def test_a_request_that_is_tokenized_holds_nothing_of_its_body(
    model_folder: Path, fields: dict[str, Any]
) -> None:
    settings = RouterConfig(served_model_name=MODEL)
    tokenizer = Tokenizer(model_folder, template_seconds_max=5)
    prompts = Prompts(tokenizer, settings)
    serving = OpenAIServing(None, tokenizer, prompts, settings, {}, Resuming(b"secret"))  # type: ignore[arg-type]
    endpoint = CompletionEndpoint(serving, "chat" if "messages" in fields else "completions")
    body = bytearray(json.dumps({"model": MODEL, "stop": ["x"]} | fields).encode())
    scope = {"headers": [(b"idempotency-key", b"k")], "path": "/", "segue.rid": "r"}
    asked = AskedStream(serving.resuming, scope, "")
    kept = endpoint._wanted("r", "somebody", body, 256, asked)
    body.clear()  # raises BufferError while anything refers to its bytes
    assert [stop.stop for stop in kept.options.stops] == ["x"]
    assert kept.requests[0].token_ids
    prompts.close()


def test_fields_that_may_be_large_stay_bytes_until_they_are_counted() -> None:
    fields = read_fields(b'{"model": "m", "prompt": [[1], [2]]}', CompletionFields, Ignored())
    assert bytes(fields.prompt) == b"[[1], [2]]"
    chat = read_fields(b'{"model": "m", "messages": []}', ChatFields, Ignored())
    assert bytes(chat.messages) == b"[]"


def test_small_fields_are_bounded_together() -> None:
    long = json.dumps({"model": "m", "prompt": "fox", "stop": ["x" * 200_000] * 3}).encode()
    with pytest.raises(RequestError, match="beside the prompt"):
        read_fields(long, CompletionFields, Ignored())


def test_a_long_value_of_an_unsupported_field_is_not_decoded() -> None:
    assert is_neutral(b" " * (NEUTRAL_BYTES_MAX - 1) + b"1", (1,))
    assert not is_neutral(b" " * NEUTRAL_BYTES_MAX + b"1", (1,))
    assert not is_neutral(b"[" * (NEUTRAL_BYTES_MAX + 1), (1,)), "or it would be malformed"
