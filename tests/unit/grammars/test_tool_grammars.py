"""The grammars of forced and strict calls, against the library that keeps to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from router.openai.fields.ignored import Ignored
from router.openai.tools.answer_grammar import answer_grammar
from router.openai.tools.choice import NO_TOOLS, ToolUse
from router.openai.tools.declared import Tool, declared_tools
from router.openai.tools.structured_output import choice_grammar, json_grammar, lark_grammar, regex_grammar
from router.parsers.answer_formats import AnswerFormat, joined
from router.parsers.answer_parser import AnswerFormatReader
from shared.limits.grammars import compiled
from shared.primitives.errors import RequestError
from shared.wire.grammar import Grammar
from tests.byte_tokenizer import EOS, MARKS, VOCAB_SIZE, write_byte_tokenizer


def tool(name: str, *, strict: bool = False, **properties: Any) -> Tool:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    function = {"name": name, "description": "", "parameters": parameters}
    entry = {"type": "function", "function": function | ({"strict": True} if strict else {})}
    return declared_tools([entry], "tools", Ignored())[0]


WEATHER = tool("weather", city={"type": "string"})
COUNT = tool("count", to={"type": "integer"})
STRICT = tool("count", strict=True, to={"type": "integer"})
PARIS = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
THREE = '<tool_call>\n{"name": "count", "arguments": {"to": 3}}\n</tool_call>'
WRONG = THREE.replace("3", '"three"')

REQUIRED = ToolUse(tools=[WEATHER, COUNT], forced=("weather", "count"))
ONE = ToolUse(tools=[WEATHER, COUNT], parallel=False, forced=("weather", "count"))
NAMED = ToolUse(tools=[WEATHER, COUNT], parallel=False, forced=("weather",))
AUTO = ToolUse(tools=[WEATHER, COUNT])
AUTO_STRICT = ToolUse(tools=[WEATHER, STRICT])
ONE_STRICT = ToolUse(tools=[WEATHER, STRICT], parallel=False)

HERMES = joined("hermes", "none")
THINKER = joined("hermes", "deepseek_r1")
LLAMA = joined("llama3_json", "none")
GEMMA = AnswerFormatReader(joined("gemma4", "none")).forced.format
XML = AnswerFormatReader(joined("qwen3_xml", "none"))
GLM = AnswerFormatReader(joined("glm45", "deepseek_r1"))
GRANITE = joined("granite", "none", chat_template="<|tool_call|>", special={"<|tool_call|>": 262})


def mistral(chat_template: str) -> AnswerFormat:
    return joined("mistral", "none", chat_template=chat_template, special=MARKS)


MISTRAL = mistral("[TOOL_CALLS] [ARGS]")
MISTRAL_IDS = mistral("[TOOL_CALLS] [CALL_ID] [ARGS]")
MISTRAL_LISTS = mistral("[TOOL_CALLS][")
IN_MISTRAL = '[TOOL_CALLS]weather[ARGS]{"city": "Paris"}'
COUNTED = '[TOOL_CALLS]count[ARGS]{"to": 3}'
BOOLEAN = json_grammar({"type": "boolean"}, "response_format")

CASES: dict[str, tuple[ToolUse, AnswerFormat, bool, Grammar | None, list[str], list[str]]] = {
    "required": (
        REQUIRED,
        HERMES,
        False,
        None,
        [PARIS, THREE, f"{PARIS}\n{THREE}"],
        ["Well", WRONG, f"<think></think>{PARIS}", f"{PARIS} "],
    ),
    "one at most": (ONE, HERMES, False, None, [PARIS, THREE], [f"{PARIS}\n{THREE}"]),
    "named": (NAMED, HERMES, False, None, [PARIS], [THREE]),
    "behind thoughts that may come": (
        REQUIRED,
        THINKER,
        False,
        None,
        [PARIS, f"<think>\nI {{look}}.\n</think>\n\n{PARIS}"],
        ["<think>so</think>Well"],
    ),
    "behind thoughts that have begun": (
        NAMED,
        THINKER,
        True,
        None,
        [f"so\n</think>\n\n{PARIS}", f"</think>{PARIS}"],
        ["so</think>Well"],
    ),
    "of Llama": (
        NAMED,
        LLAMA,
        False,
        None,
        ['{"name": "weather", "parameters": {"city": "Paris"}}'],
        [PARIS, '{"name": "count"'],
    ),
    "of a model that writes no JSON": (NAMED, GEMMA, False, None, [PARIS], ["<|tool_call>"]),
    "of GLM": (
        REQUIRED,
        GLM.forced.format,
        False,
        None,
        [PARIS, f"<think>so</think>\n{THREE}"],
        [WRONG, "Well"],
    ),
    "strict, of GLM": (
        AUTO_STRICT,
        GLM.format if GLM.strict is None else GLM.strict.format,
        False,
        None,
        ["Well", f"I count: {THREE}"],
        [WRONG, "<tool_call>count\n<arg_key>to</arg_key>\n<arg_value>three</arg_value>\n</tool_call>"],
    ),
    "of Mistral": (
        REQUIRED,
        MISTRAL,
        False,
        None,
        [IN_MISTRAL, COUNTED, IN_MISTRAL + COUNTED],
        [PARIS, IN_MISTRAL.replace("weather", "whether"), COUNTED.replace("3", '"three"'), f"So{COUNTED}"],
    ),
    "of Mistral, with ids": (
        NAMED,
        MISTRAL_IDS,
        False,
        None,
        [IN_MISTRAL, IN_MISTRAL.replace("[ARGS]", "[CALL_ID]a1B2c3D4e[ARGS]")],
        [IN_MISTRAL.replace("[ARGS]", "[CALL_ID]a1[ARGS]"), IN_MISTRAL + COUNTED],
    ),
    "of an older Mistral": (
        REQUIRED,
        MISTRAL_LISTS,
        False,
        None,
        [
            '[TOOL_CALLS][{"name": "count", "arguments": {"to": 3}}]',
            '[TOOL_CALLS][{"name": "count", "arguments": {"to": 3}}, {"name": "count", "arguments": {"to": 4}}]',
        ],
        ['[TOOL_CALLS][{"name": "count", "arguments": {"to": 3}}'],
    ),
    "strict": (
        AUTO_STRICT,
        HERMES,
        False,
        None,
        ["Well, 1 < 2", f"I count: {THREE}", PARIS, PARIS.replace('"city"', '"town"')],
        [WRONG, f"Well: {WRONG}"],
    ),
    "strict, of Llama": (
        AUTO_STRICT,
        LLAMA,
        False,
        None,
        ["Well, {", '{"name": "count", "parameters": {"to": 3}}'],
        ['{"name": "count", "parameters": {"to": "three"}}'],
    ),
    "strict, and one at most": (
        ONE_STRICT,
        HERMES,
        False,
        None,
        ["Well, 1 < 2", f"I count: {THREE}", PARIS],
        [WRONG, f"{THREE}\n{THREE}", f"{PARIS}\n{WRONG}"],
    ),
    "strict, of a model that writes XML": (
        AUTO_STRICT,
        XML.format if XML.strict is None else XML.strict.format,
        False,
        None,
        ["Well, 1 < 2", f"I count: {THREE}", f"{PARIS}\n{THREE}"],
        [
            WRONG,
            "<tool_call>\n<function=count>\n<parameter=to>\nthree\n</parameter>\n</function>\n</tool_call>",
        ],
    ),
    "strict, of Mistral": (
        AUTO_STRICT,
        MISTRAL,
        False,
        None,
        ["Well", COUNTED, f"I count: {COUNTED}{IN_MISTRAL}", IN_MISTRAL.replace('"city"', '"town"')],
        [COUNTED.replace("3", '"three"'), f"I count: {IN_MISTRAL}{COUNTED.replace('3', 'null')}"],
    ),
    "strict, of Mistral, and one at most": (
        ONE_STRICT,
        MISTRAL,
        False,
        None,
        ["Well", f"I count: {COUNTED}"],
        [COUNTED + COUNTED, COUNTED.replace("3", "true")],
    ),
    "strict, of an older Mistral": (
        AUTO_STRICT,
        MISTRAL_LISTS,
        False,
        None,
        ["Well [", 'So: [TOOL_CALLS][{"name": "count", "arguments": {"to": 3}}]'],
        ['[TOOL_CALLS][{"name": "count", "arguments": {"to": null}}]', "[TOOL_CALLS]count"],
    ),
    "a schema or free calls": (
        AUTO,
        HERMES,
        False,
        BOOLEAN,
        ["true", THREE, WRONG],
        ["Well", WRONG.replace("count", "other")],
    ),
    "a schema or calls": (AUTO_STRICT, HERMES, False, BOOLEAN, ["true", THREE], ["Well", WRONG]),
    "a schema behind thoughts": (NO_TOOLS, THINKER, True, BOOLEAN, ["so</think>\n\ntrue"], ["so</think>7"]),
    "an expression behind thoughts": (
        NO_TOOLS,
        THINKER,
        False,
        regex_grammar(r"\d+/\d+", "regex"),
        ["1/2", "<think>so</think>1/2"],
        ["1"],
    ),
    "a choice behind thoughts": (
        NO_TOOLS,
        THINKER,
        False,
        choice_grammar(["yes", "n/a", "a\\b"], "choice"),
        ["n/a", "<think>so</think>n/a", "a\\b"],
        ["na"],
    ),
    "a recursive grammar behind thoughts": (
        NO_TOOLS,
        THINKER,
        False,
        lark_grammar('root ::= "(" root ")" | "x"', "ebnf"),
        ["((x))", "<think>so</think>(x)"],
        ["(<think>so</think>x)"],
    ),
    "a grammar with names of ours, or calls": (
        AUTO,
        HERMES,
        False,
        Grammar("lark", 'start: call thought\ncall: "{" | /[}]+/ // }\nthought: "yes" | "no"'),
        ["{yes", "}}no", THREE],
        ["{maybe", "yes", "Well"],
    ),
    "a grammar behind thoughts": (
        NO_TOOLS,
        THINKER,
        True,
        Grammar("lark", 'start: word\nword: "yes" | "no"'),
        ["so</think>yes"],
        ["so</think>maybe"],
    ),
}


@pytest.mark.parametrize(("use", "form", "begun", "structured", "kept", "broken"), CASES.values(), ids=CASES)
def test_a_grammar_keeps_answers_as_their_tools_want_them(
    use: ToolUse,
    form: AnswerFormat,
    begun: bool,
    structured: Grammar | None,
    kept: list[str],
    broken: list[str],
    tokenizer_json: Path,
) -> None:
    grammar = answer_grammar(use, form, begun, structured, Ignored())
    assert grammar is not None
    for text in kept:
        assert accepts(tokenizer_json, grammar, text), text
    for text in broken:
        assert not accepts(tokenizer_json, grammar, text), text


def test_marks_that_are_special_tokens_are_these_tokens(tmp_path: Path) -> None:
    marks = ("<tool_call>", "</tool_call>", "<think>", "</think>")
    file = write_byte_tokenizer(tmp_path, marks)
    ids = {mark: 262 + at for at, mark in enumerate(marks)}
    thinker = joined("hermes", "deepseek_r1", chat_template=" ".join(marks), special=ids)
    thought = "<think>\nI {look}.\n</think>\n\n"
    for use, structured, kept, broken in (
        (REQUIRED, None, [PARIS, thought + THREE], [WRONG, f"Well{PARIS}"]),
        (AUTO_STRICT, None, ["Well", THREE, f"{thought}I count: {THREE}{PARIS}", f"{thought}Well"], [WRONG]),
        (NO_TOOLS, BOOLEAN, ["true", f"{thought}true"], [f"{thought}7"]),
    ):
        grammar = answer_grammar(use, thinker, False, structured, Ignored())
        assert grammar is not None
        assert [text for text in kept if not accepts(file, grammar, text)] == []
        assert [text for text in broken if accepts(file, grammar, text)] == []


def accepts(tokenizer_json: Path, grammar: Grammar, text: str) -> bool:
    """Whether an answer may be this text and end there."""
    backend = Tokenizer.from_file(str(tokenizer_json))
    tokenizer = LLTokenizer(backend.to_str(), n_vocab=VOCAB_SIZE, eos_token=EOS)
    matcher = compiled(grammar, tokenizer)
    assert not matcher.is_error(), matcher.get_error()
    return (
        all(_consumed(matcher, token_id) for token_id in backend.encode(text).ids) and matcher.is_accepting()
    )


def _consumed(matcher: LLMatcher, token_id: int) -> bool:
    return matcher.validate_tokens([token_id]) == 1 and matcher.consume_token(token_id)


def test_a_list_of_calls_stands_behind_granites_mark(tmp_path: Path) -> None:
    file = write_byte_tokenizer(tmp_path, ("<|tool_call|>",))
    two = (
        '<|tool_call|>[{"name": "count", "arguments": {"to": 3}}, {"name": "count", "arguments": {"to": 4}}]'
    )
    wrong = '<|tool_call|>[{"name": "count", "arguments": {"to": "three"}}]'
    for use, kept in ((REQUIRED, [two]), (AUTO_STRICT, [two, "Well", f"I count: {two}"])):
        grammar = answer_grammar(use, GRANITE, False, None, Ignored())
        assert grammar is not None
        assert [text for text in kept if not accepts(file, grammar, text)] == []
        assert not accepts(file, grammar, wrong)
    read = AnswerFormatReader(GRANITE).parser(calls=True, prefix="")
    assert read is not None
    assert [delta.text for delta in read.push(two) if delta.kind == "call"] == ["count", "count"]


def test_tools_that_may_be_called_leave_an_answer_free() -> None:
    assert answer_grammar(AUTO, HERMES, False, None, Ignored()) is None
    assert answer_grammar(NO_TOOLS, HERMES, False, BOOLEAN, Ignored()) == BOOLEAN


def test_what_cannot_be_kept_to_is_refused() -> None:
    assert AnswerFormatReader(joined("gemma4", "none")).strict is None
    unknown = tool("f", strict=True, a={"type": "string", "contentEncoding": "base64", "$dynamicRef": "#x"})
    with pytest.raises(RequestError, match=r"parameters cannot be kept to: Unimplemented keys") as refused:
        answer_grammar(ToolUse(tools=[COUNT, unknown], forced=("f",)), HERMES, False, None, Ignored())
    assert refused.value.param == "tools[0].function.parameters"
    assert "start:" not in refused.value.message


def test_many_values_in_a_tools_schema_are_counted() -> None:
    large = tool("f", a={"enum": [f"v{at}" for at in range(60_000)]})
    with pytest.raises(RequestError) as refused:
        answer_grammar(ToolUse(tools=[large], forced=("f",)), HERMES, False, None, Ignored())
    assert refused.value.code == "grammar_too_complex"
