"""The fields of POST /v1/messages, and the chat request that they mean.

Thoughts are Anthropic's way: a request that does not ask for `thinking` gets none, so `content[0]` is what its client
expects. What is passed over although Anthropic would act on it is named in `ignored`.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

from router.openai.fields.generation_fields import ChatFields, SharedSamplingFields
from router.openai.fields.ignored import Ignored
from router.openai.fields.request_body import decode, missing_field
from router.openai.fields.spelling import check_names_of_each
from router.openai.fields.table import read_by_table
from router.openai.fields.thinking import SWITCHES, ThinkingObject
from router.openai.messages.blocks import NULL
from router.openai.messages.history import History, read_history
from router.openai.tools.declared import check_kind, left_out
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
    deadline_seconds: float | None = None


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
        deadline_seconds=asked.deadline_seconds,
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


# ---- the tools of a Messages request, as a chat has them -------------------------------------------------------------
#     type                              becomes
#     custom, or none                   a function
#     bash, text_editor, memory         a function with the schema that Anthropic documents
#     web_search, computer and others   nothing: only Anthropic runs them, or their results are images
#
# A tool that is left out is named to the client in a header; a request that forces one is refused. A tool with
# `defer_loading` is shown once a search of the client's has found it, as Claude Code's does, or a message has added it;
# where the search was Anthropic's, which nobody runs here, all are shown.


_NOTHING = (b"null", b"[]")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class OfferedTool(msgspec.Struct):
    """One tool; Anthropic's own bring no schema."""

    type: str | None = None
    name: str | None = None
    description: str | None = None
    input_schema: msgspec.Raw = NULL
    strict: bool | None = None
    defer_loading: bool | None = None


class ToolChoiceFields(msgspec.Struct):
    """How tools are to be used."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


def chat_tools(
    given: msgspec.Raw, choice: ToolChoiceFields | None, history: History, ignored: Ignored
) -> msgspec.Raw:
    """The tools of the chat; `ignored` gets those left out. Raises `RequestError` for one that is forced."""
    if bytes(given) in _NOTHING:
        return NULL
    functions = []
    check_names_of_each(decode(given, list[dict[str, msgspec.Raw]], "tools"), "tools", "Anthropic's tool")
    tools = decode(given, list[OfferedTool], "tools")
    searched = any((tool.type or "").startswith("tool_search") for tool in tools)
    for at, tool in enumerate(tools):
        if tool.name in history.removed_tools:
            continue
        if tool.defer_loading and not searched and tool.name not in history.found_tools:
            continue
        function = _function(tool, f"tools[{at}]")
        if function is not None:
            functions.append({"type": "function", "function": function})
            continue
        ignored.own(left_out(f"tools[{at}]", tool.type or ""))
        if choice and choice.type == "tool" and choice.name == (tool.name or ""):
            raise RequestError(
                f"tool_choice forces tools[{at}], which this server cannot run: leave out tool_choice",
                param="tool_choice",
            )
    return msgspec.Raw(msgspec.json.encode(functions))


def chat_choice(choice: ToolChoiceFields | None) -> msgspec.Raw:
    """The `tool_choice` of the chat."""
    if choice is None:
        return NULL
    if choice.type == "tool":
        if choice.name is None:
            raise missing_field("tool_choice.name")
        named = {"type": "function", "function": {"name": choice.name}}
        return msgspec.Raw(msgspec.json.encode(named))
    return msgspec.Raw(msgspec.json.encode(_CHOICES[choice.type]))


def _function(tool: OfferedTool, param: str) -> Json | None:
    """The function that a tool is; None: it is none that the client runs. Raises `RequestError` for a slip."""
    if tool.type not in (None, "custom"):
        known = next((shown for kind, shown in CLIENT_TOOLS.items() if tool.type.startswith(kind)), None)
        if known is None:
            check_kind(tool.type, ("custom",), param)
            return None
        description, schema = known
        return {"name": tool.name, "description": description, "parameters": schema}
    if bytes(tool.input_schema) == b"null":
        raise missing_field(f"{param}.input_schema")
    return {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
        "strict": bool(tool.strict),
    }


# ---- tools that Anthropic defines and a client runs: schemas as Anthropic documents them -----------------------------
# A request names such a tool by its type and brings no schema, because Anthropic's models have learnt it. Other models
# have not, so they are shown a function with that schema. A tool whose results are images, as of a computer's screen,
# is left out, like those that Anthropic itself runs.


_TEXT = {"type": "string"}
_PATH = {"type": "string", "description": "Absolute path of a file or folder."}
_EDITED: dict[str, Json] = {
    "path": _PATH,
    "file_text": _TEXT,
    "old_str": _TEXT,
    "new_str": _TEXT,
    "insert_line": {"type": "integer"},
    "insert_text": {"type": "string", "description": "The text to insert."},
}


def _commands(*names: str) -> Json:
    return {"type": "string", "enum": list(names)}


def _schema(required: list[str], **properties: Json) -> Json:
    return {"type": "object", "properties": properties, "required": required}


_BASH = (
    "Run a command in a bash session that goes on from call to call. restart: true begins a new one.",
    _schema([], command=_TEXT, restart={"type": "boolean"}),
)
_TEXT_EDITOR = (
    "View, create and edit text files. view shows a file, or the lines of view_range, or a folder; create writes"
    " file_text; str_replace replaces old_str, which must occur once, by new_str; insert puts insert_text behind the"
    " line insert_line.",
    _schema(
        ["command", "path"],
        command=_commands("view", "create", "str_replace", "insert"),
        **_EDITED,
        view_range={"type": "array", "items": {"type": "integer"}},
    ),
)
_MEMORY = (
    "Keep notes in files under /memories that last longer than this conversation.",
    _schema(
        ["command"],
        command=_commands("view", "create", "str_replace", "insert", "delete", "rename"),
        **_EDITED,
        view_range={"type": "array", "items": {"type": "integer"}},
        old_path=_PATH,
        new_path=_PATH,
    ),
)
# By the beginning of the type, behind which a date stands: the description and the schema.
CLIENT_TOOLS: dict[str, tuple[str, Json]] = {
    "bash_2": _BASH,
    "text_editor_2": _TEXT_EDITOR,
    "memory_2": _MEMORY,
}
