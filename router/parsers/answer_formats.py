"""How a model writes its thoughts and its calls of tools, and how that is found out.

The families' ways are data: `response_templates` beside this file, in the words of transformers' own. A model's
own template goes before them, then the names in the settings, then the marks in its chat template.
A model of which nothing is known writes text alone.

`AnswerFormat` is the outcome, for all requests of a router; `AnswerParser` reads one answer by it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from importlib import resources
from types import MappingProxyType
from typing import Any, Literal, cast

import msgspec

from shared.primitives.errors import ModelError

Body = Literal["json", "named", "value"]
ToolCallParser = Literal[
    "auto",
    "none",
    "hermes",
    "qwen25",
    "qwen3_xml",
    "qwen3_coder",
    "glm45",
    "glm47",
    "seed_oss",
    "granite",
    "llama3_json",
    "llama3",
    "mistral",
    "gemma4",
    "functiongemma",
    "harmony",
    "openai",
    "gpt-oss",
    "gpt_oss",
]
ReasoningParser = Literal[
    "auto",
    "none",
    "deepseek_r1",
    "deepseek-r1",
    "qwen3",
    "glm45",
    "gemma4",
    "seed_oss",
    "harmony",
    "openai_gptoss",
    "gpt-oss",
    "gpt_oss",
]

GUARD = "\ufdd0"  # no character: stands before marks that are tokens, so a text that spells one is none
PREFIX_TOKENS = 64  # at the end of a prompt: what the template begins an answer with
_HARMONY = "harmony"
_SAME_THOUGHTS = dict.fromkeys(("deepseek-r1", "qwen3", "glm45"), "deepseek_r1")  # they are written alike
_SAME = {
    "qwen25": "hermes",
    "qwen3_coder": "qwen3_xml",
    "glm47": "glm45",
    "llama3": "llama3_json",
    **dict.fromkeys(("openai", "openai_gptoss", "gpt-oss", "gpt_oss"), _HARMONY),  # vLLM's and SGLang's names
}
_CHANNEL_TOKENS = {"<|channel|>", "<|message|>", "<|return|>", "<|call|>"}
_CONTENT = {"content": "text", "content_args": {"strip": False}}
# Where an assistant's message begins in a prompt, behind which its template may have begun the answer.
_ANCHOR = (
    r"(?i:assistant|model)(?:<\|end_header_id\|>|<\|end_of_role\|>|\|>|\uff5c>|>)?\s{0,2}|\[/INST\]\s{0,1}"
)


class CallWriting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How calls stand around JSON: `open`, then `begin NAME between ARGUMENTS end` for each, then `close`."""

    begin: str
    between: str
    end: str
    open: str = ""
    close: str = ""
    separator: str = "\n"  # between two calls
    trigger: str = ""  # with which they begin behind other text; empty: they are the whole answer
    quoted: bool = True  # the name is a JSON string
    call_id: str = ""  # mark of nine letters and digits that may stand behind the name
    needs: tuple[str, ...] = ()  # what stands in the chat templates of the models that write so

    def one_call(self, name: str, arguments: str) -> str:
        """A call as it is written alone."""
        head = f"{self.open}{self.begin}{json.dumps(name) if self.quoted else name}{self.between}"
        return f"{head}{arguments}{self.end}{self.close}"


class FormatData(msgspec.Struct, forbid_unknown_fields=True):
    """One file of `response_templates`."""

    marker: str  # in a chat template, if the model writes so
    fields: dict[str, dict[str, Any]]
    special_tokens: list[str] = []  # its marks that are special tokens in some models
    # what stands in a call: JSON for `call_scanner`, or what the field's content parser reads
    body: Body = "value"
    body_end: str = ""  # stands behind what the content parser reads
    close: str = ""  # stands behind a call
    writings: list[
        CallWriting
    ] = []  # of models that write JSON; the first that a chat template fits, else the last
    begins_as_hermes: bool = False  # a call that is no JSON begins with Hermes' mark
    # a call may have no mark before it: what tells it from a text is a tool's name, or that JSON has arguments
    unmarked: bool = False
    thought: tuple[str, str] | None = None  # what stands around thoughts
    ends: tuple[str, ...] = ()  # marks that end an answer
    channels: bool = False  # `HarmonyParser` reads it, and `fields` name what there is


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormat:
    """One way to write thoughts and calls; with neither, an answer is text."""

    # of a response template, but `content`
    fields: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    anchor: Mapping[str, Any] = field(default_factory=lambda: {"start_anchor_pattern": _ANCHOR})
    body: Body = "value"
    body_end: str = ""
    close: str = ""
    writing: CallWriting | None = None  # None: calls are no JSON
    mark_ids: Mapping[str, int] = field(default_factory=dict)  # of the marks that are special tokens
    begins_as_hermes: bool = False
    unmarked: bool = False
    thought: tuple[str, str] | None = None
    ends: tuple[str, ...] = ()  # marks that end an answer
    channels: bool = False  # thoughts, calls and content are messages, each with a header: `HarmonyParser`
    special_tokens: frozenset[str] | None = frozenset()  # whose text is needed; None: of all but ends
    given: bool = False  # by a setting: tools are put into words where the chat template does not know them

    @property
    def calls(self) -> bool:
        """Whether tools can be called."""
        return "tool_calls" in self.fields

    @property
    def thinks(self) -> bool:
        return "reasoning_content" in self.fields

    @property
    def guard(self) -> str:
        """What stands before each mark in the text of an answer; empty where marks are text as any other."""
        return GUARD if self.channels and (self.special_tokens or set()) <= self.mark_ids.keys() else ""

    def template(self, *, calls: bool, thoughts: bool = True) -> Any:
        """Compiled, for `ResponseParser`; None where that is not needed: an answer is text alone, or has channels."""
        wanted = {"tool_calls": calls, "reasoning_content": thoughts}
        fields = {name: given for name, given in self.fields.items() if wanted.get(name, True)}
        if self.channels or not (wanted.keys() & fields.keys()):
            return None
        from transformers.utils.chat_parsing.response_templates import load_response_template

        spec = {**self.anchor, "fields": {"content": _CONTENT, **fields}}
        return load_response_template(spec)


def choose_format(tools: ToolCallParser, reasoning: ReasoningParser, tokenizer: Any) -> AnswerFormat:
    """The format of a model, by settings, its own response template, and its chat template.

    Raises `ModelError` if the model's own response template is broken, or the settings exclude each other.
    """
    own = getattr(tokenizer, "response_template", None)
    if own is not None and tools == reasoning == "auto":
        return _own_format(own)
    found = tokenizer.chat_template  # of some models several by name, as that for chats with tools
    chat_template = "\n".join(found.values()) if isinstance(found, Mapping) else found or ""
    tokens = {
        token.content: token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special
    }
    tool_name, reasoning_name = _names(
        _SAME.get(tools, tools),
        _SAME.get(reasoning, _SAME_THOUGHTS.get(reasoning, reasoning)),
        chat_template,
        tokens,
    )
    channels = "harmony" in (tool_name, reasoning_name)
    special = {token: token_id for token, token_id in tokens.items() if channels or token in chat_template}
    given = tools not in ("auto", "none")
    return joined(tool_name, reasoning_name, given=given, chat_template=chat_template, special=special)


def joined(
    tools: str,
    reasoning: str,
    *,
    given: bool = False,
    chat_template: str = "",
    special: Mapping[str, int] = MappingProxyType({}),
) -> AnswerFormat:
    """The format of two names; `none` for what a model does not do. `special`: ids of the template's special tokens."""
    calls = read_format(tools) if tools != "none" else None
    thoughts = read_format(_SAME_THOUGHTS.get(reasoning, reasoning)) if reasoning != "none" else None
    fields: dict[str, dict[str, Any]] = {}
    if calls:
        fields["tool_calls"] = calls.fields["tool_calls"]
    if thoughts:
        fields["reasoning_content"] = thoughts.fields["reasoning_content"]
    parts = [part for part in (calls, thoughts) if part]
    marks = frozenset(token for part in parts for token in part.special_tokens)
    return AnswerFormat(
        fields=fields,
        body=calls.body if calls else "value",
        body_end=calls.body_end if calls else "",
        close=calls.close if calls else "",
        writing=_writing(calls, chat_template) if calls else None,
        mark_ids={mark: special[mark] for mark in sorted(marks & special.keys())},
        begins_as_hermes=calls is not None and calls.begins_as_hermes,
        unmarked=calls is not None and calls.unmarked,
        thought=thoughts.thought if thoughts else None,
        ends=next((part.ends for part in parts if part.ends), ()),
        channels=any(part.channels for part in parts),
        special_tokens=marks,
        given=given,
    )


def _writing(calls: FormatData, chat_template: str) -> CallWriting | None:
    fitting = (each for each in calls.writings if all(mark in chat_template for mark in each.needs))
    return next(fitting, calls.writings[-1] if calls.writings else None)


def read_format(name: str) -> FormatData:
    """One file of `response_templates`."""
    text = resources.files("router.parsers.response_templates").joinpath(f"{name}.json").read_bytes()
    return msgspec.json.decode(text, type=FormatData)


def _names(tools: str, reasoning: str, chat_template: str, tokens: Collection[str]) -> tuple[str, str]:
    """The names of both formats, by settings and what there is of marks. Harmony's messages are read as a whole."""
    settings = {tools, reasoning}
    if _HARMONY in settings or (settings <= {"auto", "none"} and _has_channels(chat_template, tokens)):
        if other := settings - {_HARMONY, "auto", "none"}:
            raise ModelError(
                f"a model that writes {_HARMONY} writes its calls and its thoughts so: set tool_call_parser and"
                f" reasoning_parser to {_HARMONY}, auto or none, and not to {min(other)}"
            )
        calls, thoughts = ("none" if name == "none" else _HARMONY for name in (tools, reasoning))
        return calls, thoughts
    tools = _recognized(chat_template) if tools == "auto" else tools
    return tools, _reasoning(reasoning, tools, chat_template)


def _has_channels(chat_template: str, tokens: Collection[str]) -> bool:
    return set(tokens) >= _CHANNEL_TOKENS or all(
        mark in chat_template for mark in ("<|channel|>", "<|message|>")
    )


def _recognized(chat_template: str) -> str:
    # XML stands in the marks of JSON, and Seed's has that of Qwen: the more telling mark first
    for name in (
        "glm45",
        "seed_oss",
        "qwen3_xml",
        "granite",
        "gemma4",
        "functiongemma",
        "mistral",
        "hermes",
        "llama3_json",
    ):
        if read_format(name).marker in chat_template:
            return name
    return "none"


def _reasoning(setting: str, tools: str, chat_template: str) -> str:
    if setting != "auto":
        return setting
    if tools in ("gemma4", "seed_oss"):
        return tools
    return "deepseek_r1" if read_format("deepseek_r1").marker in chat_template else "none"


def _own_format(spec: Any) -> AnswerFormat:
    """Format of the response template that came with a tokenizer."""
    from transformers.utils.chat_parsing.response_templates import load_response_template

    try:
        load_response_template(spec)
    except (ValueError, TypeError, KeyError) as error:
        raise ModelError(f"the tokenizer's response_template is broken: {type(error).__name__}") from None
    renamed = {"thinking": "reasoning_content", "reasoning": "reasoning_content"}
    fields = {renamed.get(name, name): given for name, given in spec["fields"].items()}
    anchor = {name: spec[name] for name in ("start_anchor", "start_anchor_pattern") if name in spec}
    return AnswerFormat(fields=cast("dict[str, dict[str, Any]]", fields), anchor=anchor, special_tokens=None)
