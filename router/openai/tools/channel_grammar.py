"""The grammar of an answer in OpenAI's harmony format: which messages it may have, and what stands in them.

    forced             thoughts, then one call with arguments of the tool's schema
    strict             thoughts and preambles, then one call, or the final message
    with a schema      thoughts, then the final message of the request's own grammar, or one call if there are tools

A call ends the answer, so there is one at most. Its header may be written in each way that gpt-oss writes it. Headers
hold special tokens, which a text never spells; a tokenizer that has none of them cannot be kept to any of this.
"""

from __future__ import annotations

import re

from router.openai.fields.ignored import Ignored
from router.openai.tools.answer_grammar import body_rule, checked_body, checked_calls, lark_term, schema_of
from router.openai.tools.choice import ToolUse
from router.openai.tools.declared import Tool
from router.parsers.answer_formats import AnswerFormat
from router.parsers.harmony import Begun
from shared.primitives.errors import RequestError
from shared.wire.grammar import Grammar

_MARK = re.compile(r"<\|[a-z]+\|>")
_NEEDED = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
_RULES = {
    "next": '<|end|><|start|>"assistant"',
    "thought": '<|channel|>"analysis"<|message|>text next',
    "preamble": '<|channel|>"commentary"<|message|>text next',
    "final": '<|channel|>"final"<|message|>text',
    "type": '/ ?/<|constrain|>"json" | " json"',
    "text": "/(?s:.*)/",
}


def channel_grammar(
    use: ToolUse, answer_format: AnswerFormat, begun: Begun, structured: Grammar | None, ignored: Ignored
) -> Grammar | None:
    """The grammar of a chat's answer; None: it is free.

    `begun` is what the prompt has begun, and `structured` is the grammar that the request asks for. Raises
    `RequestError` for what cannot be kept to; what a lenient schema is not kept to goes to `ignored`.
    """
    if structured is None and not use.forced and not use.strict:
        return None
    if missing := [mark for mark in _NEEDED if mark not in answer_format.mark_ids]:
        raise RequestError(
            f"this model's tokenizer has no token {missing[0]}, so calls and schemas cannot be kept to in its format:"
            " leave out response_format and strict, and tool_choice too",
            param="tools" if use.tools else "response_format",
        )
    rules = dict(_RULES) | ({"call": _calls(use)} if use.tools else {})
    last = ["call"] if use.tools else []
    if use.forced:
        structured = None
    elif structured is None:
        last.append("final")
    else:
        last.append("shaped")
        rules["shaped"] = '<|channel|>"final"type?<|message|>answer_body'
    rules["start"] = _start(last, begun)
    marked = "".join(f"{name}: {rule}\n" for name, rule in rules.items())
    written = _MARK.sub(lambda mark: f" {lark_term(mark[0], answer_format.mark_ids)} ", marked)
    written += "".join(
        f"arguments_{at}: %json {schema_of(tool, exact=bool(use.forced)).text}\n"
        for at, tool in enumerate(_callable(use))
    )
    grammar = Grammar("lark", written + (body_rule(structured) if structured else ""))
    return checked_calls(grammar, use, ignored) if use.tools else checked_body(grammar)


def _start(last: list[str], begun: Begun) -> str:
    """Which messages there may be; one of `last` ends the answer."""
    aside = "(thought | preamble)*" if last == ["call", "final"] else "thought*"
    messages = f"{aside} ({' | '.join(last)})"
    match begun:
        case None:
            return messages
        case "reasoning":
            return f"text next {messages}"
        case "content":  # which is a final message
            own = {"final": "text (next thought* call)?", "shaped": "answer_body"}.get(last[-1], "")
            calls = "next thought* call" if "call" in last and last[-1] != "final" else ""
            return " | ".join(filter(None, (own, calls)))


def _callable(use: ToolUse) -> list[Tool]:
    return [tool for tool in use.tools if not use.forced or tool.name in use.forced]


def _calls(use: ToolUse) -> str:
    """One call of any tool, its recipient on either side of the channel."""
    names = [(at, f"to=functions.{tool.name}") for at, tool in enumerate(_callable(use))]
    return " | ".join(
        f'(<|channel|>"commentary {to}"type? | " {to}"<|channel|>"commentary"type?)<|message|>arguments_{at}'
        for at, to in names
    )
