"""How the fields of a chat say that its messages are to be rendered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from router.openai.fields.generation_fields import ChatFields
from router.openai.fields.ignored import Ignored
from router.openai.fields.thinking import template_variables
from router.text.chat_template import ChatOptions
from router.text.tokenizer import Tokenizer
from shared.primitives.errors import RequestError


def chat_options(
    fields: ChatFields, tools: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, ignored: Ignored
) -> ChatOptions:
    """How messages are rendered with `tools`; raises `RequestError` for options that exclude each other."""
    if fields.continue_final_message and fields.add_generation_prompt:
        raise RequestError(
            "continue_final_message continues the last message: add_generation_prompt must be false",
            param="add_generation_prompt",
        )
    return ChatOptions(
        add_generation_prompt=fields.add_generation_prompt is not False,
        continue_final_message=bool(fields.continue_final_message),
        variables=template_variables(fields, tokenizer, ignored),
        documents=fields.documents or None,
        tools=tools or None,
    )
