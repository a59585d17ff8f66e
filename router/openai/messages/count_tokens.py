"""POST /v1/messages/count_tokens: how long the prompt of a request is, tools and all. Nothing is computed for it.

A prompt may be longer than the context, up to the bound of one that is to be truncated: a client asks so as to know.
"""

from __future__ import annotations

import msgspec

from router.openai.fields.ignored import Ignored
from router.openai.fields.own_words import errors_in_words_of
from router.openai.fields.table import read_by_table
from router.openai.messages.fields import MessagesFields, as_chat, told_too_long
from router.openai.prompts.prompts import TRUNCATED_CONTEXTS_MAX, Truncation
from router.openai.request_fields import chat_options
from router.openai.serving import OpenAIServing
from shared.primitives.errors import RequestError


def count_tokens(serving: OpenAIServing, body: bytearray, context_len: int) -> msgspec.Raw:
    """The answer; raises `RequestError` naming the field that is wrong. For a tokenizer's thread."""
    try:
        ignored = Ignored()  # an answer of one number names nothing
        asked = read_by_table(body, "messages", MessagesFields, ignored)
        serving.check_model(asked.model)
        longest = TRUNCATED_CONTEXTS_MAX * context_len
        fields = as_chat(asked, longest, ignored)
        whole = Truncation(longest, keeps_end=True)  # nothing is cut off
        with errors_in_words_of("messages"):
            options = chat_options(fields, fields.tool_use(ignored), serving.tokenizer, ignored)
            ids = serving.prompts.chat(fields.messages, context_len, options, whole)
    except RequestError as error:
        raise told_too_long(error) from None
    return msgspec.Raw(msgspec.json.encode({"input_tokens": len(ids)}))
