"""The tools of a request, and what it says about their use.

    tool_choice    none       the tools are not shown to the model, and its answer is text
                   auto       the model calls or does not
                   required   one call at least, of any tool          kept by a grammar, see `forced_calls`
                   a tool     one call of it                          the same

OpenAI's older `functions` and `function_call` say the same.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from router.http.fields.spelling import check_names
from router.http.request_body import decode
from shared.errors import RequestError
from shared.grammar_bounds import check_nesting

TOOLS_MAX = 128  # as OpenAI's

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
NULL = msgspec.Raw(b"null")
_EMPTY = (b"null", b"[]", b"")


class ToolFields(msgspec.Struct, kw_only=True):
    """The fields of a request that are about tools."""

    tools: msgspec.Raw = NULL
    tool_choice: msgspec.Raw = NULL
    parallel_tool_calls: bool | None = None
    functions: msgspec.Raw = NULL
    function_call: msgspec.Raw = NULL


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools that a model may call in one answer."""

    tools: Sequence[dict[str, Any]] = ()  # as templates want them
    choice: Literal["auto", "required"] = "auto"
    parallel: bool = True
    forced: tuple[str, ...] = ()  # names of those of which one must be called

    @property
    def strict(self) -> tuple[str, ...]:
        """Names of tools whose calls are to be kept to their schemas."""
        return tuple(
            tool["function"]["name"] for tool in self.tools if tool["function"].get("strict") is True
        )


NO_TOOLS = ToolUse()


def tool_use(fields: ToolFields) -> ToolUse:
    """What a request asks for; raises `RequestError` naming what is wrong."""
    tools, param = _tools(fields)
    names = [tool["function"]["name"] for tool in tools]
    choice, choice_param = fields.tool_choice, "tool_choice"
    if bytes(choice) in _EMPTY and param == "functions":
        choice, choice_param = fields.function_call, "function_call"
    asked = decode(choice, object, choice_param) if bytes(choice) not in _EMPTY else None
    if asked in (None, "auto", "none"):
        if asked == "none" or not tools:
            return NO_TOOLS
        return ToolUse(tools=tools, parallel=fields.parallel_tool_calls is not False)
    if not tools:
        raise RequestError(f"{choice_param} needs tools to choose from", param=choice_param)
    if asked == "required":
        return ToolUse(
            tools=tools,
            choice="required",
            parallel=fields.parallel_tool_calls is not False,
            forced=tuple(names),
        )
    name = _chosen(asked, choice_param)
    if name not in names:
        raise RequestError(f"{choice_param} names a tool that is not among tools", param=choice_param)
    return ToolUse(tools=tools, choice="required", parallel=False, forced=(name,))


def _chosen(asked: object, param: str) -> str:
    match asked:
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return name
        case {"name": str(name)} if param == "function_call":
            return name
    raise RequestError(
        f'{param} must be "none", "auto", "required" or {{"type": "function", "function": {{"name": …}}}}',
        param=param,
    )


def _tools(fields: ToolFields) -> tuple[list[dict[str, Any]], str]:
    """The tools, and the name of the field that has them."""
    if bytes(fields.tools) not in _EMPTY:
        raw, param = bytes(fields.tools), "tools"
    elif bytes(fields.functions) not in _EMPTY:
        raw, param = bytes(fields.functions), "functions"
    else:
        return [], "tools"
    check_nesting(raw.decode(errors="replace"), param)
    given = decode(raw, list[dict[str, Any]], param)
    if len(given) > TOOLS_MAX:
        raise RequestError(f"{param} takes at most {TOOLS_MAX} tools, got {len(given)}", param=param)
    if param == "functions":
        given = [{"type": "function", "function": function} for function in given]
    tools = [_tool(tool, f"{param}[{at}]") for at, tool in enumerate(given)]
    names = [tool["function"]["name"] for tool in tools]
    if len(set(names)) < len(names):
        raise RequestError(f"{param} must have different names", param=param)
    return tools, param


def _tool(tool: dict[str, Any], param: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise RequestError(
            f"{param}.type must be function: this server has no tools of its own", param=f"{param}.type"
        )
    function = tool.get("function")
    if not isinstance(function, dict):
        raise RequestError(f"{param}.function must be an object", param=f"{param}.function")
    check_names(tool, param, "tool")
    check_names(function, f"{param}.function", "function")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(
            f"{param}.function.name must have 1 to 64 letters, digits, _, - or .",
            param=f"{param}.function.name",
        )
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise RequestError(
            f"{param}.function.parameters must be a JSON schema", param=f"{param}.function.parameters"
        )
    if not isinstance(function.get("description", ""), str | None):
        raise RequestError(
            f"{param}.function.description must be a string", param=f"{param}.function.description"
        )
    described = {"name": name, "description": function.get("description") or ""}
    shown = described | {"parameters": parameters or {"type": "object", "properties": {}}}
    return {"type": "function", "function": shown | ({"strict": True} if function.get("strict") else {})}
