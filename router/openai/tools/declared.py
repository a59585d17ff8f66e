"""The tools that a request declares, and those of them that its model can call.

    function     has arguments of a schema
    custom       takes one text: the model is shown a function whose one argument is the string `input`
    namespace    holds functions and custom tools: `lookup` of `crm` is shown as `crm__lookup`
    any other    is a server's own, such as web_search or mcp: this server runs none, so it is left out and named

A chat has the fields of a tool in an object of their own, a response beside `type`. Both are read everywhere.
Whatever name a model calls, the client is answered with the name that it knows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from router.openai.fields.ignored import Ignored
from router.openai.fields.spelling import check_names, is_slip
from router.openai.tools.structured_output import REGEX_FIELD_CHARACTERS_MAX, json_grammar
from router.parsers.call_scanner import INPUT
from shared.limits import grammars
from shared.limits.grammars import check_bounds, too_large
from shared.primitives.errors import RequestError

Json = dict[str, Any]

TOOLS_MAX = 128  # as OpenAI's; those within namespaces count
NAME_CHARS_MAX = 128  # as Anthropic's: names of MCP servers' tools have that of their server before them
NAMESPACE_CHARS_MAX = 64
HOSTED = (  # in a header a tool is named by its type, less its date, only if it is one of these
    *(
        "advisor",
        "code_execution",
        "mcp_toolset",
        "tool_search_tool_bm25",
        "tool_search_tool_regex",
        "web_fetch",
    ),
    *("apply_patch", "code_interpreter", "computer", "computer_use", "computer_use_preview", "file_search"),
    *("image_generation", "local_shell", "mcp", "programmatic_tool_calling", "shell", "tool_search"),
    *("web_search", "web_search_preview"),
)

_KINDS = ("function", "custom", "namespace")
_DATE = re.compile(r"_\d{4}_?\d\d_?\d\d$")  # web_search_20250305, web_search_2025_08_26
_NAME = re.compile(r"[A-Za-z0-9_.-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """One tool that a model can call."""

    name: str  # by which the model calls it
    own_name: str  # by which the client knows it, in its namespace
    namespace: str | None = None
    custom: bool = False
    schema: Json  # of its arguments, to which calls are kept
    strict: bool = False  # free calls are kept to the schema, too
    required: bool = False  # … and are refused where they cannot be
    shown: Json  # as chat templates want it
    param: str  # where its schema stands in the request


def joined_name(namespace: str | None, name: str) -> str:
    """The name by which a model calls a tool of a namespace, as other servers join it."""
    return f"{namespace}__{name}" if namespace else name


def declared_tools(given: list[Json], param: str, ignored: Ignored) -> tuple[Tool, ...]:
    """The tools that a model can call; raises `RequestError` naming what is wrong in the list."""
    tools: list[Tool] = []
    for at, one in enumerate(given):
        for tool in _tools(one, f"{param}[{at}]", ignored):
            tools.append(tool)
            if len(tools) > TOOLS_MAX:
                raise RequestError(f"{param} takes at most {TOOLS_MAX} tools, got more", param=param)
    if len({tool.name for tool in tools}) < len(tools):
        raise RequestError(f"{param} must have different names", param=param)
    return tuple(tools)


def check_kind(kind: str, known: Iterable[str], place: str) -> None:
    """Raise `RequestError` for a type of tool that is a slip of a known one."""
    if near := next((one for one in known if is_slip(kind[:64], one)), None):
        raise RequestError(f"{place}.type is unknown; did you mean {near}?", param=f"{place}.type")


def left_out(place: str, kind: str) -> str:
    """How a header names a tool that is left out: a type that is not known here is the client's word, and not told."""
    name = _DATE.sub("", kind[:64])
    return f"{place}.{name}" if name in HOSTED else place


def _tools(given: Json, place: str, ignored: Ignored) -> Iterator[Tool]:
    """The tools of one entry."""
    kind = given.get("type")
    if kind != "namespace":
        yield from _tool(given, place, None, ignored)
        return
    name, within = _name(given, place, NAMESPACE_CHARS_MAX), given.get("tools")
    if not isinstance(within, list) or not all(isinstance(one, dict) for one in within):
        raise RequestError(f"{place}.tools must be a list of tools", param=f"{place}.tools")
    for at, one in enumerate(within):
        yield from _tool(one, f"{place}.tools[{at}]", name, ignored)


def _tool(given: Json, place: str, namespace: str | None, ignored: Ignored) -> Iterator[Tool]:
    """The tool of one entry; none if it is left out."""
    kind = given.get("type")
    if not isinstance(kind, str):
        raise RequestError(f"{place}.type is required, such as function", param=f"{place}.type")
    check_names(given, place, "tool")
    if kind not in ("function", "custom"):
        check_kind(kind, _KINDS, place)
        ignored.own(left_out(place, kind))
        return
    fields = given
    if isinstance(given.get(kind), dict):
        fields, place = given[kind], f"{place}.{kind}"
        check_names(fields, place, "function")
    own_name = _name(fields, place)
    description = fields.get("description")
    if not isinstance(description, str | None):
        raise RequestError(f"{place}.description must be a string", param=f"{place}.description")
    head: Json = {"name": joined_name(namespace, own_name), "description": description or ""}
    if kind == "custom":
        yield _custom(fields, place, namespace, head, ignored)
        return
    parameters = fields.get("parameters")
    if not isinstance(parameters, dict | None):
        raise RequestError(f"{place}.parameters must be a JSON schema", param=f"{place}.parameters")
    parameters = parameters or {"type": "object", "properties": {}}
    strict = bool(fields.get("strict"))
    yield Tool(
        name=head["name"],
        own_name=own_name,
        namespace=namespace,
        schema=parameters,
        strict=strict,
        required=strict,
        shown=_shown(head | {"parameters": parameters} | ({"strict": True} if strict else {})),
        param=f"{place}.parameters",
    )


def _custom(fields: Json, place: str, namespace: str | None, head: Json, ignored: Ignored) -> Tool:
    asked = custom_schema(fields.get("format"), f"{place}.format", ignored)
    described = {"type": "string", "description": asked.described}
    shown = {"type": "object", "properties": {INPUT: described}, "required": [INPUT]}
    return Tool(
        name=head["name"],
        own_name=fields["name"],
        namespace=namespace,
        custom=True,
        schema=asked.schema,
        strict=asked.kept,
        shown=_shown(head | {"parameters": shown}),
        param=f"{place}.format",
    )


def _shown(function: Json) -> Json:
    return {"type": "function", "function": function}


def _name(fields: Json, place: str, chars_max: int = NAME_CHARS_MAX) -> str:
    name = fields.get("name")
    if not isinstance(name, str) or len(name) > chars_max or not _NAME.fullmatch(name):
        raise RequestError(
            f"{place}.name must have 1 to {chars_max} letters, digits, _, - or .", param=f"{place}.name"
        )
    return name


# ---- custom tools: what the model is told of the one text, and the schema to which it is kept ------------------------
#     format     the text
#     text       is free
#     regex      matches as a whole, if the pattern can be kept to
#     lark       is free: a grammar's texts cannot be kept to within the quotes of JSON
#
# A format that is not kept to is named in the answer's header; the model is shown it in each case.


@dataclass(frozen=True, slots=True)
class CustomSchema:
    """The schema of a custom tool's arguments. `kept`: it says more than that there is one text."""

    schema: Json
    described: str  # to the model
    kept: bool


def custom_schema(given: Any, param: str, ignored: Ignored) -> CustomSchema:
    """The schema of a `format`; raises `RequestError` naming what is wrong in it."""
    kind = given.get("type") if isinstance(given, dict) else "text" if given is None else None
    if kind == "text":
        return CustomSchema(_schema({}), "The whole text that the tool takes, as it is.", False)
    grammar = given.get("grammar", given) if kind == "grammar" else None
    syntax = grammar.get("syntax") if isinstance(grammar, dict) else None
    definition = grammar.get("definition") if isinstance(grammar, dict) else None
    if syntax not in ("lark", "regex") or not isinstance(definition, str):
        raise RequestError(
            f'{param} must be of type "text", or of type "grammar" with a syntax "lark" or "regex" and a definition',
            param=param,
        )
    if syntax == "regex" and len(definition) > REGEX_FIELD_CHARACTERS_MAX:
        raise too_large(param, "characters", len(definition), REGEX_FIELD_CHARACTERS_MAX)
    described = f"The whole text that the tool takes, by this {syntax} grammar: {definition}"
    if syntax == "regex":
        schema = _schema({"pattern": f"^(?:{definition})$"})
        alone = json_grammar(schema, param)
        check_bounds(alone, param)
        if not grammars.problem(alone):
            return CustomSchema(schema, described, True)
    ignored.own(param)
    return CustomSchema(_schema({}), described, False)


def _schema(text: Json) -> Json:
    return {
        "type": "object",
        "properties": {INPUT: {"type": "string"} | text},
        "required": [INPUT],
        "additionalProperties": False,
    }
