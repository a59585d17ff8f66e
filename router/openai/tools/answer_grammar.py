"""The grammar of an answer that calls tools, and of one that stands behind thoughts.

A call that the request forces is written as the model's format writes calls, or as Hermes does where that is no JSON,
and so is a strict one, if the model begins it with Hermes' mark:

    <tool_call>
    {"name": "weather", "arguments": {"city": "Paris"}}
    </tool_call>

    tools              the answer
    forced             calls and nothing else, their arguments of the tools' schemas
    strict             free text up to a call, whose arguments are of the schema
    with a schema      calls, or what the request's own grammar says, whether tools are strict or not

Thoughts are free: the grammar begins behind them. Answers of messages have grammars of their own: `channel_grammar`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import partial

from router.openai.fields.ignored import Ignored
from router.openai.tools.choice import ToolUse
from router.openai.tools.declared import Tool
from router.openai.tools.structured_output import (
    ANY_OBJECT,
    check_grammar,
    has_pattern_annotations,
    json_grammar,
)
from router.parsers.answer_formats import AnswerFormat, CallWriting
from shared.limits import grammars
from shared.limits.grammars import check_bounds
from shared.primitives.errors import RequestError
from shared.wire.grammar import Grammar

CALLS = 16  # in one forced answer

_UNESCAPED_SLASH = re.compile(r"\\.|/", re.DOTALL)  # or what is escaped already, which stays


def answer_grammar(
    use: ToolUse, answer_format: AnswerFormat, begun: bool, structured: Grammar | None, ignored: Ignored
) -> Grammar | None:
    """The grammar of a chat's answer; None: it is free.

    `begun`: the prompt has begun the answer's thoughts. `structured` is the grammar that the request asks for. Raises
    `RequestError` for a schema that cannot be kept to; what a lenient one is not kept to goes to `ignored`.
    """
    if structured is None and not use.forced:
        return checked_calls(_free_until_a_call(use, answer_format), use, ignored) if use.strict else None
    if not use.tools:
        assert structured is not None
        if not (answer_format.thinks and answer_format.thought):
            return structured
        return checked_body(
            Grammar("lark", _behind_thoughts("answer_body", answer_format, begun) + body_rule(structured))
        )
    calls, rules = _calls(use, answer_format)
    if structured is not None and not use.forced:
        calls, rules = f"({calls} | answer_body)", rules + body_rule(structured)
    return checked_calls(Grammar("lark", _behind_thoughts(calls, answer_format, begun) + rules), use, ignored)


def checked_body(grammar: Grammar) -> Grammar:
    """The grammar of an answer without tools, once it is known to compile."""
    check_bounds(grammar, "response_format")
    if why := grammars.problem(grammar):
        raise RequestError(
            f"response_format cannot be kept to: {why}", param="response_format", code="invalid_grammar"
        )
    return grammar


def checked_calls(grammar: Grammar, use: ToolUse, ignored: Ignored) -> Grammar:
    """The grammar of calls, once it is known to compile. Where it says more than is kept, each schema tells what."""
    check_bounds(grammar, "tools")
    judgement = grammars.judged(grammar)
    if judgement.problem or judgement.unkept or has_pattern_annotations(grammar):
        for tool in use.tools:
            check_grammar(schema_of(tool, exact=tool.name in use.forced), tool.param, ignored)
    if judgement.problem:
        why = judgement.problem.split("\n", 1)[0]
        raise RequestError(f"tools cannot be kept to together: {why}", param="tools", code="invalid_grammar")
    return grammar


def _calls(use: ToolUse, answer_format: AnswerFormat, written: str = "") -> tuple[str, str]:
    """What stands in a rule for calls, and the rules for it. `written` of their beginning stands there already."""
    writing = _writing(answer_format)
    term = partial(lark_term, mark_ids=answer_format.mark_ids)
    opened = writing.open.removeprefix(written)
    begin = writing.begin if writing.open else writing.begin.removeprefix(written)
    several = use.parallel and (bool(writing.open) or not written)
    rules = ""
    named = [tool for tool in use.tools if not use.forced or tool.name in use.forced]
    for at, tool in enumerate(named):
        name = json.dumps(tool.name) if writing.quoted else tool.name
        call_id = f"({term(writing.call_id)} /[A-Za-z0-9]{{9}}/)?" if writing.call_id else ""
        head = f"{term(begin + name)} {call_id} {term(writing.between)}"
        rules += f"call_{at}: {head} arguments_{at} {term(writing.end)}\n"
        rules += f"arguments_{at}: %json {schema_of(tool, exact=bool(use.forced)).text}\n"
    rules += "call: " + " | ".join(f"call_{at}" for at in range(len(named))) + "\n"
    calls = f"call ({term(writing.separator)} call){{0,{CALLS - 1}}}" if several else "call"
    return f"{term(opened)} {calls} {term(writing.close)}".strip(), rules


def _free_until_a_call(use: ToolUse, answer_format: AnswerFormat) -> Grammar:
    """Free text, in which the mark of a call begins one."""
    trigger = _writing(answer_format).trigger
    calls, rules = _calls(use, answer_format, written=trigger)
    if not trigger:  # a call is the whole answer
        return Grammar("lark", f"start: {calls} | free\nfree: /([^{{](?s:.*))?/\n{rules}")
    mark_ids = answer_format.mark_ids
    if trigger in mark_ids:
        head = f"head: free {lark_term(trigger, mark_ids)}"
    else:
        head = f"head[lazy]: /(?s:.*)/ {_literal(trigger)}"  # ends with the first mark
    special = [lark_term(mark, mark_ids) for mark in answer_format.thought or () if mark in mark_ids]
    aside = f"(free ({' | '.join(special)}))* " if special else ""  # text alone holds no special token
    start = f"called* {aside}free" if use.parallel else f"called | {aside}free"
    return Grammar("lark", f"start: {start}\nfree: /(?s:.*)/\n{head}\ncalled: {aside}head {calls}\n{rules}")


def schema_of(tool: Tool, *, exact: bool) -> Grammar:
    """Grammar of a tool's arguments; any object for those that are neither forced nor strict."""
    schema = {"type": "object"} | tool.schema if exact or tool.strict else ANY_OBJECT
    grammar = json_grammar(schema, tool.param, lenient=not tool.strict)
    check_bounds(grammar, tool.param)
    return grammar


def _writing(answer_format: AnswerFormat) -> CallWriting:
    assert answer_format.writing is not None  # readers that are `forced` or `strict` have one
    return answer_format.writing


def lark_term(text: str, mark_ids: Mapping[str, int]) -> str:
    """A text in Lark; marks that are special tokens are these tokens."""
    if not mark_ids:
        return _literal(text) if text else ""
    pieces = re.split("(" + "|".join(map(re.escape, mark_ids)) + ")", text)
    return " ".join(f"<[{mark_ids[one]}]>" if one in mark_ids else _literal(one) for one in pieces if one)


def _behind_thoughts(body: str, answer_format: AnswerFormat, begun: bool) -> str:
    """Lark's rule `start` for what may stand behind thoughts."""
    if answer_format.thought is None:
        return f"start: {body}\n"
    opened, closed = answer_format.thought
    mark_ids = answer_format.mark_ids
    if closed in mark_ids:
        rules = f"thought: /(?s:.*)/ {lark_term(closed, mark_ids)}\n"
    else:
        rules = f"thought[suffix={_literal(closed)}]: /(?s:.*)/\n"
    rules += "blank: /\\n{0,2}/\n"
    begin = "thought blank" if begun else f"({lark_term(opened, mark_ids)} thought blank)?"
    return f"start: {begin} {body}\n{rules}"


def body_rule(structured: Grammar) -> str:
    """The request's own grammar as Lark's rule `answer_body`."""
    match structured.kind:
        case "json":
            return f"answer_body: %json {structured.text}\n"
        case "regex":
            return f"answer_body: /{_UNESCAPED_SLASH.sub(_escape_slash, structured.text)}/\n"
        case "lark":
            return f"answer_body: %lark {{\n{structured.text}\n}}\n"  # its rules have names of their own


def _escape_slash(match: re.Match[str]) -> str:
    return r"\/" if match[0] == "/" else match[0]


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
