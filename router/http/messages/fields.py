"""The fields of POST /v1/messages, and the chat request that they mean.

Thoughts are Anthropic's way: a request that does not ask for `thinking` gets none, so `content[0]` is what its client
expects. What is passed over although Anthropic would act on it is named in `ignored`.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

from router.http.fields.ignored import Ignored
from router.http.fields.spelling import UNKNOWN
from router.http.fields.table import read_by_table
from router.http.fields.thinking import SWITCHES
from router.http.messages.blocks import NULL
from router.http.messages.history import read_history
from router.http.messages.tools import ToolChoiceFields, chat_choice, chat_tools
from router.http.request_body import missing_field
from router.http.request_fields import ChatFields
from shared.errors import RequestError

Json = dict[str, Any]

# What a client of this API finds under another name in the sentences about chats.
_CHAT_NAMES = {
    "a function or custom tool": "a tool",
    "function.parameters": "input_schema",
    "function.": "",
    "response_format": "output_config.format",
    "chat_template_kwargs": "thinking",
}


class ThinkingFields(msgspec.Struct):
    """Whether the model shall think."""

    type: str
    budget_tokens: int | None = None
    display: str | None = None


class FormatFields(msgspec.Struct):
    """What the text must look like."""

    type: Literal["json_schema"]
    schema: msgspec.Raw = NULL


class OutputFields(msgspec.Struct):
    """How much a model thinks, and what its text must look like."""

    effort: str | None = None
    format: FormatFields | None = None


class MessagesFields(msgspec.Struct, kw_only=True):
    """The body of POST /v1/messages, and of its count_tokens; null means the default everywhere."""

    model: str | None = None  # there is one
    messages: msgspec.Raw
    max_tokens: int | None = None  # required, but where tokens are counted
    system: msgspec.Raw = NULL
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    tools: msgspec.Raw = NULL
    tool_choice: ToolChoiceFields | None = None
    thinking: ThinkingFields | None = None
    output_config: OutputFields | None = None
    output_format: FormatFields | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    cache_salt: str | None = None


class ChatOfMessages(ChatFields, kw_only=True):
    """The chat request, in which `max_tokens` is a bound."""

    caps_max_tokens: ClassVar[bool] = True


def read_messages(body: bytes | bytearray, context_len: int, ignored: Ignored) -> ChatOfMessages:
    """The chat request that a body means; what is passed over goes to `ignored`.

    Raises `RequestError` naming the field that is wrong.
    """
    asked = read_by_table(body, "messages", MessagesFields, ignored)
    if asked.max_tokens is None:
        raise missing_field("max_tokens")
    return as_chat(asked, context_len, ignored)


def as_chat(asked: MessagesFields, context_len: int, ignored: Ignored) -> ChatOfMessages:
    """The same of fields that were read."""
    history = read_history(asked.messages, asked.system, context_len, ignored)
    asked.messages = asked.system = NULL  # the fields live on, the body need not
    tools = chat_tools(asked.tools, asked.tool_choice, history, ignored)
    thinks, shows = _thinking(asked.thinking, ignored)
    output = asked.output_config or OutputFields()
    return ChatOfMessages(
        model=asked.model,
        messages=msgspec.Raw(msgspec.json.encode(history.messages)),
        stream=asked.stream,
        max_tokens=asked.max_tokens,
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        min_p=asked.min_p,
        repetition_penalty=asked.repetition_penalty,
        seed=asked.seed,
        stop=asked.stop_sequences,
        tools=tools,
        tool_choice=chat_choice(asked.tool_choice),
        parallel_tool_calls=not (asked.tool_choice and asked.tool_choice.disable_parallel_tool_use),
        response_format=_response_format(output.format or asked.output_format),
        reasoning_effort=output.effort if thinks else None,
        chat_template_kwargs=dict.fromkeys(SWITCHES, thinks),
        include_reasoning=shows,
        add_generation_prompt=not history.continues,
        continue_final_message=history.continues,
        cache_salt=asked.cache_salt,
    )


def in_messages_words(error: RequestError) -> RequestError:
    """The same error with this API's names for the fields of a chat.

    A prompt beyond the context begins with the words by which Anthropic's clients know that they must shorten it.
    """
    if error.code == UNKNOWN:
        return error
    message, param = error.message, error.param
    for name, own in _CHAT_NAMES.items():
        message = message.replace(name, own)
        param = param.replace(name, own) if param else param
    if param == "stop":
        message, param = message.replace("stop", "stop_sequences", 1), "stop_sequences"
    if error.code == "context_length_exceeded":
        message = f"prompt is too long: {message}"
    return error.reworded(message, param)


def _thinking(asked: ThinkingFields | None, ignored: Ignored) -> tuple[bool, bool]:
    """Whether the model shall think, and whether the answer shows it."""
    if asked is None or asked.type == "disabled":
        return False, False
    if asked.budget_tokens is not None:
        ignored.own("thinking.budget_tokens")
    return True, asked.display != "omitted"


def _response_format(asked: FormatFields | None) -> msgspec.Raw:
    if asked is None:
        return NULL
    schema = {"name": "answer", "schema": asked.schema, "strict": True}
    return msgspec.Raw(msgspec.json.encode({"type": "json_schema", "json_schema": schema}))
