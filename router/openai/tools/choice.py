"""What a request says about the use of its tools.

    tool_choice      none       the tools are not shown to the model, and its answer is text
                     auto       the model calls or does not
                     required   one call at least, of any tool          kept by a grammar, see `answer_grammar`
                     a tool     one call of it                          the same
                     allowed    as if these tools were all that there are, with auto or required

A tool that was left out can neither be chosen nor required. OpenAI's older `functions` and `function_call` say the
same, of one call at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from router.openai.fields.generation_fields import ChatFields
from router.openai.fields.ignored import Ignored
from router.openai.fields.request_body import decode
from router.openai.tools.declared import Json, Tool, declared_tools, joined_name
from shared.limits.grammars import check_nesting
from shared.primitives.errors import RequestError

_EMPTY = (b"null", b"[]", b"")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools that a model may call in one answer."""

    tools: Sequence[Tool] = ()
    choice: Literal["auto", "required"] = "auto"
    parallel: bool = True
    forced: tuple[str, ...] = ()  # names of those of which one must be called
    older: bool = False  # asked for as `functions`: the answer has one `function_call`, and no `tool_calls`

    @property
    def shown(self) -> list[Json]:
        """The tools as chat templates want them."""
        return [tool.shown for tool in self.tools]

    @property
    def strict(self) -> bool:
        """Whether free calls of some of the tools are to be kept to their schemas."""
        return any(tool.strict for tool in self.tools)

    @property
    def custom(self) -> frozenset[str]:
        """Names of the tools that take a text."""
        return frozenset(tool.name for tool in self.tools if tool.custom)

    def called(self, name: str) -> Tool | None:
        """The tool that a model called by this name; None: it made the name up."""
        return next((tool for tool in self.tools if tool.name == name), None)

    def free(self, ignored: Ignored) -> ToolUse:
        """Tool use without strict schemas, for where no free call can be kept to one; notes what is not kept to."""
        for tool in self.tools:
            if tool.strict:
                ignored.own(tool.param)
        return replace(self, tools=tuple(replace(tool, strict=False) for tool in self.tools))


NO_TOOLS = ToolUse()


def tool_use(fields: ChatFields, ignored: Ignored) -> ToolUse:
    """What a request asks for; raises `RequestError` naming what is wrong. What is left out goes to `ignored`."""
    tools, param = _tools(fields, ignored)
    older = param == "functions"
    parallel = fields.parallel_tool_calls is not False and not older
    choice, choice_param = fields.tool_choice, "tool_choice"
    if bytes(choice) in _EMPTY and older:
        choice, choice_param = fields.function_call, "function_call"
    asked = decode(choice, object, choice_param) if bytes(choice) not in _EMPTY else None
    if isinstance(asked, dict) and asked.get("type") == "allowed_tools":
        tools, asked = _allowed(asked.get("allowed_tools", asked), tools, choice_param)
    if asked in (None, "auto", "none"):
        if asked == "none" or not tools:
            return NO_TOOLS
        return ToolUse(tools=tools, parallel=parallel, older=older)
    if not tools:
        raise RequestError(
            f"{choice_param} needs a tool that the client runs: this server runs no tools of its own",
            param=choice_param,
        )
    if asked == "required":
        return ToolUse(
            tools=tools,
            choice="required",
            parallel=parallel,
            forced=tuple(tool.name for tool in tools),
            older=older,
        )
    tool = _named(asked, tools, choice_param)
    return ToolUse(tools=tools, choice="required", parallel=False, forced=(tool.name,), older=older)


def _allowed(asked: Any, tools: Sequence[Tool], param: str) -> tuple[tuple[Tool, ...], str]:
    """The tools that a filter leaves, and its mode."""
    mode = asked.get("mode", "auto") if isinstance(asked, dict) else None
    entries = asked.get("tools") if isinstance(asked, dict) else None
    if mode not in ("auto", "required") or not isinstance(entries, list):
        raise RequestError(f'{param} must have a list of tools, and a mode "auto" or "required"', param=param)
    left: set[str] = set()
    for entry in entries:
        match entry:
            case {"type": "namespace", "name": str(name)}:
                left |= {tool.name for tool in tools if tool.namespace == name}
            case {"type": "function" | "custom"}:
                left.add(_named(entry, tools, param).name)
            case {"type": str()}:
                pass  # a server's own tool, which was left out
            case _:
                raise RequestError(f"{param}.tools must be tools, each with its type", param=param)
    return tuple(tool for tool in tools if tool.name in left), mode


def _named(asked: object, tools: Sequence[Tool], param: str) -> Tool:
    """The one tool that is asked for."""
    namespace = asked.get("namespace") if isinstance(asked, dict) else None
    match asked:
        case {"type": "function", "function": {"name": str(name)}} | {
            "type": "custom",
            "custom": {"name": str(name)},
        }:
            pass
        case {"type": "function" | "custom", "name": str(name)}:
            pass
        case {"name": str(name)} if param == "function_call":
            pass
        case {"type": str(kind)} if kind not in ("function", "custom"):
            raise RequestError(
                f"{param} forces a tool that this server does not run: choose a function or custom tool",
                param=param,
            )
        case _:
            raise RequestError(
                f'{param} must be "none", "auto", "required" or {{"type": "function", "function": {{"name": …}}}}',
                param=param,
            )
    name = joined_name(namespace if isinstance(namespace, str) else None, name)
    found = [tool for tool in tools if tool.name == name] or [tool for tool in tools if tool.own_name == name]
    if len(found) != 1:
        raise RequestError(f"{param} names a tool that is not among tools", param=param)
    return found[0]


def _tools(fields: ChatFields, ignored: Ignored) -> tuple[tuple[Tool, ...], str]:
    """The tools, and the name of the field that has them."""
    if bytes(fields.tools) not in _EMPTY:
        raw, param = bytes(fields.tools), "tools"
    elif bytes(fields.functions) not in _EMPTY:
        raw, param = bytes(fields.functions), "functions"
    else:
        return (), "tools"
    check_nesting(raw.decode(errors="replace"), param)
    given = decode(raw, list[Json], param)
    if param == "functions":
        given = [{"type": "function", "function": function} for function in given]
    return declared_tools(given, param, ignored), param
