"""The grammar of an answer that calls tools, and of one that stands behind thoughts.

A call that the request forces is written as the model's format writes calls, or as Hermes does where that is no JSON:

    <tool_call>
    {"name": "weather", "arguments": {"city": "Paris"}}
    </tool_call>

    tools              the answer
    forced             calls and nothing else, their arguments of the tools' schemas
    strict             free text up to a call, whose arguments are of the schema
    with a schema      calls, or what the request's own grammar says

Thoughts are free: the grammar begins behind them.
"""

from __future__ import annotations

import json
import re
from typing import Any

from llguidance import StructTag

from router.http.structured_output import ANY_OBJECT, check_grammar, json_grammar
from router.http.tools import ToolUse
from router.text.answer_formats import AnswerFormat
from shared.errors import RequestError
from shared.grammar import Grammar
from shared.grammar_bounds import check_bounds

CALLS = 16  # in one forced answer

_START = re.compile(r"^start\s*:", re.MULTILINE)


def answer_grammar(
    use: ToolUse, answer_format: AnswerFormat, begun: bool, structured: Grammar | None
) -> Grammar | None:
    """The grammar of a chat's answer; None: it is free.

    `begun`: the prompt has begun the answer's thoughts. `structured` is the grammar that the request asks for. Raises
    `RequestError` for a schema that cannot be kept to.
    """
    if not use.forced and not use.strict:
        if structured is None or not (answer_format.thinks and answer_format.thought):
            return structured
        return Grammar("lark", _behind_thoughts("answer_body", answer_format, begun) + _body(structured))
    if not use.forced and structured is None:
        return _checked(_free_until_a_call(use, answer_format))
    calls, rules = _calls(use, answer_format)
    if structured is not None and not use.forced:
        calls, rules = f"({calls} | answer_body)", rules + _body(structured)
    return _checked(Grammar("lark", _behind_thoughts(calls, answer_format, begun) + rules))


def _checked(grammar: Grammar) -> Grammar:
    check_grammar(grammar, "tools")
    return grammar


def _calls(use: ToolUse, answer_format: AnswerFormat) -> tuple[str, str]:
    """What stands in the rule `start`, and the rules for it."""
    begin, between, end = _marks(answer_format)
    rules = ""
    functions = [tool["function"] for tool in use.tools]
    named = [one for one in functions if not use.forced or one["name"] in use.forced]
    for at, function in enumerate(named):
        head = _literal(begin + json.dumps(function["name"]) + between)
        rules += f"call_{at}: {head} arguments_{at} {_literal(end)}\n"
        rules += f"arguments_{at}: %json {_schema(function, exact=bool(use.forced)).text}\n"
    rules += "call: " + " | ".join(f"call_{at}" for at in range(len(named))) + "\n"
    return (f'call ("\\n" call){{0,{CALLS - 1}}}' if use.parallel else "call"), rules


def _free_until_a_call(use: ToolUse, answer_format: AnswerFormat) -> Grammar:
    """Free text, in which the mark of a call begins one."""
    if not answer_format.call:
        raise RequestError(
            "strict tools cannot be kept to with this model's way to write calls unless one is forced: set tool_choice"
            ' to "required" or to a tool, or leave strict out',
            param="tools",
        )
    begin, between, end = answer_format.call
    if begin.startswith("{"):  # a call is the whole answer
        calls, rules = _calls(use, answer_format)
        return Grammar("lark", f"start: {calls} | free\nfree: /([^{{](?s:.*))?/\n{rules}")
    trigger = begin.split("\n")[0]
    tags = [
        StructTag(
            trigger=trigger,
            begin=begin + json.dumps(tool["function"]["name"]) + between,
            grammar=_schema(tool["function"], exact=False).text,
            end=end,
        )
        for tool in use.tools
    ]
    return Grammar("lark", StructTag.to_grammar(tags, assume_special=False))


def _schema(function: dict[str, Any], *, exact: bool) -> Grammar:
    """Of a tool's arguments; any object for those that are neither forced nor strict."""
    strict = function.get("strict") is True
    schema = {"type": "object"} | function["parameters"] if exact or strict else ANY_OBJECT
    grammar = json_grammar(schema, "tools", lenient=not strict)
    check_bounds(grammar, "tools")
    return grammar


def _marks(answer_format: AnswerFormat) -> tuple[str, str, str]:
    assert answer_format.call is not None  # `AnswerFormatReader.forced` has them
    return answer_format.call


def _behind_thoughts(body: str, answer_format: AnswerFormat, begun: bool) -> str:
    """Lark's rule `start` for what may stand behind thoughts."""
    if answer_format.thought is None:
        return f"start: {body}\n"
    opened, closed = answer_format.thought
    rules = f"thought[suffix={_literal(closed)}]: /(?s:.*)/\nblank: /\\n{{0,2}}/\n"
    begin = "thought blank" if begun else f"({_literal(opened)} thought blank)?"
    return f"start: {begin} {body}\n{rules}"


def _body(structured: Grammar) -> str:
    """The request's own grammar as Lark's rule `answer_body`."""
    match structured.kind:
        case "json":
            return f"answer_body: %json {structured.text}\n"
        case "regex":
            return f"answer_body: /{structured.text.replace('/', chr(92) + '/')}/\n"
        case "lark":
            return _START.sub("answer_body:", structured.text) + "\n"


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
