"""The fields of POST /v1/messages, and the chat request that they mean.

Thoughts are Anthropic's way: a request that does not ask for `thinking` gets none, so `content[0]` is what its client
expects. What is passed over although Anthropic would act on it is named in `ignored`.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

from router.openai.fields.generation_fields import ChatFields, SharedSamplingFields
from router.openai.fields.ignored import Ignored
from router.openai.fields.request_body import missing_field
from router.openai.fields.table import read_by_table
from router.openai.fields.thinking import SWITCHES, ThinkingObject
from router.openai.messages.blocks import NULL
from router.openai.messages.history import read_history
from router.openai.messages.tools import ToolChoiceFields, chat_choice, chat_tools
from shared.primitives.errors import RequestError

Json = dict[str, Any]

_THINKS = {"enabled": True, "adaptive": True, "disabled": False}


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
    task_budget: msgspec.Raw = NULL


class MessagesFields(SharedSamplingFields, kw_only=True):
    """The body of POST /v1/messages, and of its count_tokens; null means the default everywhere."""

    model: str | None = None  # there is one
    messages: msgspec.Raw
    max_tokens: int | None = None  # required, but where tokens are counted
    system: msgspec.Raw = NULL
    stream: bool | None = None
    stop_sequences: str | list[str] | None = None
    tools: msgspec.Raw = NULL
    tool_choice: ToolChoiceFields | None = None
    thinking: ThinkingFields | None = None
    output_config: OutputFields | None = None
    output_format: FormatFields | None = None
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
    """Convert fields of the Messages API that were read to those of a chat."""
    history = read_history(asked.messages, asked.system, context_len, ignored)
    asked.messages = asked.system = NULL  # the fields live on, the body need not
    tools = chat_tools(asked.tools, asked.tool_choice, history, ignored)
    thinking = _thinking(asked.thinking)
    output = asked.output_config or OutputFields()
    if bytes(output.task_budget) != b"null":
        ignored.own("output_config.task_budget")
    return ChatOfMessages(
        model=asked.model,
        messages=msgspec.Raw(msgspec.json.encode(history.messages)),
        stream=asked.stream,
        max_tokens=asked.max_tokens,
        seed=asked.seed,
        stop=asked.stop_sequences,
        tools=tools,
        tool_choice=chat_choice(asked.tool_choice),
        parallel_tool_calls=not (asked.tool_choice and asked.tool_choice.disable_parallel_tool_use),
        response_format=_response_format(output.format or asked.output_format),
        reasoning_effort=output.effort,
        thinking=thinking,
        chat_template_kwargs=dict.fromkeys(SWITCHES, False) if thinking is None else None,
        include_reasoning=_shows_thoughts(asked.thinking),
        add_generation_prompt=not history.continues,
        continue_final_message=history.continues,
        cache_salt=asked.cache_salt,
        **asked.given(),
    )


def too_long_error(error: RequestError) -> RequestError:
    """The error; one about a prompt beyond the context begins with the words by which Anthropic's clients know it.

    They shorten the conversation then.
    """
    if error.code != "context_length_exceeded":
        return error
    return error.reworded(f"prompt is too long: {error.message}", error.param)


def _thinking(asked: ThinkingFields | None) -> ThinkingObject | None:
    """The switch for thoughts as chats have it; None: there is to be no thought."""
    if asked is None:
        return None
    if asked.type not in _THINKS:
        raise RequestError("thinking.type must be enabled, disabled or adaptive", param="thinking.type")
    return ThinkingObject("enabled" if _THINKS[asked.type] else "disabled", asked.budget_tokens)


def _shows_thoughts(asked: ThinkingFields | None) -> bool:
    return asked is not None and _THINKS[asked.type] and asked.display != "omitted"


def _response_format(asked: FormatFields | None) -> msgspec.Raw:
    if asked is None:
        return NULL
    schema = {"name": "answer", "schema": asked.schema, "strict": True}
    return msgspec.Raw(msgspec.json.encode({"type": "json_schema", "json_schema": schema}))
