"""Every format's answers are read alike whole and cut at every character, and as the fixtures say."""

from __future__ import annotations

import itertools
import json
import tracemalloc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from router.parsers.answer_deltas import AnswerDelta, AnswerParser
from router.parsers.answer_formats import AnswerFormat, choose_format, joined
from router.parsers.answer_parser import AnswerFormatReader
from shared.primitives.errors import ModelError

FIXTURES = Path(__file__).parent / "answers"


class WrittenAnswer(msgspec.Struct, forbid_unknown_fields=True):
    """A text as a model writes it, and what is in it."""

    what: str
    text: str
    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = []  # name and arguments
    prefix: str = ""
    tools: list[dict[str, Any]] = []


class FormatFixtures(msgspec.Struct, forbid_unknown_fields=True):
    """One file."""

    tools: str
    reasoning: str
    answers: list[WrittenAnswer]


def fixtures() -> list[tuple[str, FormatFixtures]]:
    return [
        (path.stem, msgspec.json.decode(path.read_bytes(), type=FormatFixtures))
        for path in sorted(FIXTURES.glob("*.json"))
    ]


ANSWERS = [
    pytest.param(read, answer, id=f"{name}: {answer.what}")
    for name, read in fixtures()
    for answer in read.answers
]


@dataclass
class ReadAnswer:
    """The joined pieces of one answer."""

    content: str
    reasoning: str
    calls: list[tuple[str, str]]


@cache
def reader_of(tools: str, reasoning: str) -> AnswerFormatReader:
    """Reader of a format: one makes the parsers of all answers, as in a router."""
    return AnswerFormatReader(joined(tools, reasoning))


def parser_of(read: FormatFixtures, answer: WrittenAnswer) -> AnswerParser:
    parser = reader_of(read.tools, read.reasoning).parser(
        calls=read.tools != "none", prefix=answer.prefix, tools=answer.tools
    )
    assert parser is not None
    return parser


def pieces(parser: AnswerParser, parts: Iterable[str]) -> list[AnswerDelta]:
    return [delta for part in parts for delta in parser.push(part)] + parser.finish()


def join(deltas: Sequence[AnswerDelta]) -> ReadAnswer:
    read = ReadAnswer("", "", [])
    for delta in deltas:
        match delta.kind:
            case "content":
                read.content += delta.text
            case "reasoning":
                read.reasoning += delta.text
            case "call":
                assert delta.call == len(read.calls)
                read.calls.append((delta.text, ""))
            case "arguments":
                name, arguments = read.calls[delta.call]
                read.calls[delta.call] = name, arguments + delta.text
    return read


@pytest.mark.parametrize(("read", "answer"), ANSWERS)
def test_an_answer_is_read_as_its_fixture_says(read: FormatFixtures, answer: WrittenAnswer) -> None:
    met = join(pieces(parser_of(read, answer), [answer.text]))
    assert met == ReadAnswer(answer.content, answer.reasoning, answer.calls)


@pytest.mark.parametrize(("read", "answer"), ANSWERS)
def test_the_arguments_of_a_call_that_is_whole_are_json(read: FormatFixtures, answer: WrittenAnswer) -> None:
    if "cut" in answer.what or "no JSON" in answer.what:
        pytest.skip("it is not whole, or the model wrote something else")
    for _, arguments in join(pieces(parser_of(read, answer), [answer.text])).calls:
        json.loads(arguments)


@pytest.mark.parametrize(("read", "answer"), ANSWERS)
def test_an_answer_is_read_alike_however_it_is_cut(read: FormatFixtures, answer: WrittenAnswer) -> None:
    whole = join(pieces(parser_of(read, answer), [answer.text]))
    assert join(pieces(parser_of(read, answer), answer.text)) == whole
    for at in range(len(answer.text)):
        assert join(pieces(parser_of(read, answer), [answer.text[:at], answer.text[at:]])) == whole, at


@pytest.mark.parametrize(("read", "answer"), ANSWERS)
def test_an_answer_that_ends_anywhere_loses_no_call_that_was_told(
    read: FormatFixtures, answer: WrittenAnswer
) -> None:
    for at in range(len(answer.text)):
        parser = parser_of(read, answer)
        told = join(parser.push(answer.text[:at]))
        ended = join(pieces(parser_of(read, answer), [answer.text[:at]]))
        for (name, arguments), (told_name, told_arguments) in zip(ended.calls, told.calls, strict=False):
            assert (name, arguments.startswith(told_arguments)) == (told_name, True)
        assert len(ended.calls) >= len(told.calls)
        assert ended.content.startswith(told.content)


FORCED = '<tool_call>\n{"name": "f", "arguments": {"a": "b"}}\n</tool_call>'


@pytest.mark.parametrize("cut", range(len(FORCED) + 1))
@pytest.mark.parametrize("before", ["", FORCED + "\n"])
def test_a_forced_call_that_is_cut_off_leaves_no_marks_in_the_content(cut: int, before: str) -> None:
    reader = AnswerFormatReader(joined("hermes", "none")).forced
    parser = reader.parser(calls=True, prefix="", nothing_else=True)
    assert parser is not None
    read = join(pieces(parser, [before + FORCED[:cut]]))
    assert read.content == ""
    assert len(read.calls) >= (cut == len(FORCED)) + bool(before)
    assert all(name == "f" for name, _ in read.calls)


def test_every_format_has_fixtures() -> None:
    tested = set(itertools.chain.from_iterable((read.tools, read.reasoning) for _, read in fixtures()))
    data = Path(__file__).parents[4] / "router" / "parsers" / "response_templates"
    assert {path.stem for path in data.glob("*.json")} <= tested


MARKS = [
    "<tool_call>", "</tool_call>", '{"name": "f", ', '"arguments": {"a": "b"}}', "<think>", "</think>", "{", "}",
    '"', "\\", " ", "\n\n", "word", "<function=f>", "<parameter=a>", "</parameter>", "</function>", "[TOOL_CALLS]",
    "[ARGS]", "[", "]", ",", ":", '"name"', "<|tool_call>call:f", "<tool_call|>", "<|python_tag|>", "1",
    "<tool_call>f\n", "<arg_key>a</arg_key>", "<arg_value>", "</arg_value>", "<|tool_call|>",
]  # fmt: skip


@given(
    tools=st.sampled_from(["hermes", "qwen3_xml", "glm45", "granite", "llama3_json", "mistral", "gemma4"]),
    known=st.sampled_from(["f", "g"]),
    parts=st.lists(st.sampled_from(MARKS), max_size=25),
)
def test_any_mixture_of_marks_is_read_alike_however_it_is_cut(
    tools: str, known: str, parts: list[str]
) -> None:
    reader = AnswerFormatReader(joined(tools, "gemma4" if tools == "gemma4" else "deepseek_r1"))
    text = "".join(parts)
    read = []
    for cut in ([text], parts, list(text)):
        parser = reader.parser(calls=True, prefix="", tools=[{"function": {"name": known}}])
        assert parser is not None
        read.append(join(pieces(parser, cut)))
    assert read[0] == read[1] == read[2]


def test_text_without_marks_comes_out_as_it_came() -> None:
    text = "  Two lines,\n\n and {braces} [too] < > \n"
    parser = AnswerFormatReader(joined("hermes", "deepseek_r1")).parser(calls=True, prefix="")
    assert parser is not None
    assert join(pieces(parser, text)) == ReadAnswer(text, "", [])


@pytest.mark.parametrize("opened", ["", "<think>"], ids=["content", "thoughts"])
def test_of_a_long_answer_no_text_is_kept(opened: str) -> None:
    parser = AnswerFormatReader(joined("hermes", "deepseek_r1")).parser(calls=True, prefix="")
    assert parser is not None
    word = " " + "x" * 99
    parser.push(f"{opened}a{word * 100}")
    tracemalloc.start()
    try:
        chars = sum(len(delta.text) for _ in range(10_000) for delta in parser.push(word))
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert chars == 1_000_000
    assert kept < 100_000


@pytest.mark.parametrize("tools", ["hermes", "qwen3_xml", "llama3_json", "mistral", "gemma4"])
def test_what_was_forgotten_changes_nothing(tools: str) -> None:
    reader = AnswerFormatReader(joined(tools, "gemma4" if tools == "gemma4" else "deepseek_r1"))
    long, call = "word\n" * 1000, '{"name": "f", "arguments": {"a": "' + "b" * 5000 + '"}}'
    text = f"<think>{long}</think>{long}{call}\n<tool_call>{call}</tool_call>{long}<function=f>\n</function>"
    for pieces_of_text in (text[at : at + 1000] for at in range(0, len(text), 1000)), iter(text):
        parser = reader.parser(calls=True, prefix="", tools=[{"function": {"name": "f"}}])
        whole = reader.parser(calls=True, prefix="", tools=[{"function": {"name": "f"}}])
        assert parser is not None
        assert whole is not None
        assert join(pieces(parser, pieces_of_text)) == join(pieces(whole, [text]))


def test_what_the_content_parser_cannot_take_is_content() -> None:
    text = "<|tool_call>call:f{a:" + "[" * 100_000 + "}<tool_call|> and more"
    parser = AnswerFormatReader(joined("gemma4", "none")).parser(calls=True, prefix="")
    assert parser is not None
    read = join(pieces(parser, [text]))
    assert read.calls == []
    assert read.content.endswith("and more")


@pytest.mark.parametrize(
    ("tools", "text", "calls"),
    [
        ("hermes", r'<tool_call>{"name": "f\ud83d", "arguments": {}}</tool_call>', [("f\ufffd", "{}")]),
        (
            "hermes",
            r'<tool_call>{"name": "f", "arguments": "{\"a\": \"\ud83d\"}"}</tool_call>',
            [("f", '{"a": "\ufffd"}')],
        ),
        (
            "qwen3_xml",
            '<tool_call><function=f><parameter=a>[NaN, -Infinity, 1e999, "\\ud83d"]</parameter></function></tool_call>',
            [("f", '{"a": [null, null, null, "\ufffd"]}')],
        ),
        ("gemma4", '<|tool_call>call:f{a:[NaN, "\\ude42"]}<tool_call|>', [("f", '{"a": [null, "\ufffd"]}')]),
    ],
)
def test_a_call_is_text_and_json_whatever_its_escapes_and_numbers_are(
    tools: str, text: str, calls: list[tuple[str, str]]
) -> None:
    declared = {"function": {"name": "f", "parameters": {"properties": {"a": {"type": "array"}}}}}
    parser = AnswerFormatReader(joined(tools, "none")).parser(calls=True, prefix="", tools=[declared])
    assert parser is not None
    read = join(pieces(parser, text))
    assert read.calls == calls
    msgspec.json.encode([read.content, read.calls])  # half of a surrogate pair is no text
    msgspec.json.decode(read.calls[0][1])


# ---- which format a model has ---------------------------------------------------------------------------------------


def tokenizer(chat_template: str | None, **others: object) -> Any:
    return SimpleNamespace(
        chat_template=chat_template,
        get_chat_template=lambda: chat_template,
        added_tokens_decoder={7: AddedToken("[TOOL_CALLS]", special=True), 8: AddedToken("[ARGS]")},
        **others,
    )


@pytest.mark.parametrize(
    ("chat_template", "tools", "thinks"),
    [
        ("… <tool_call> … <think> …", "</tool_call>", True),
        ("… <tool_call> …", "</tool_call>", False),
        ("… <tool_call> <function= … <think>", "</tool_call>", True),
        ('… {"name": "x", "parameters": dictionary of …', "", False),
        ("… [TOOL_CALLS] …", "", False),
        ("… <|tool_call> …", "<tool_call|>", True),
        ("… <tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key> … <think>", "</tool_call>", True),
        ("… <seed:tool_call> <function=example> … <seed:think>", "</seed:tool_call>", True),
        ("… respond only with <|tool_call|> followed by a JSON list …", "", False),
        ("{{ messages }}", None, False),
        (None, None, False),
    ],
)
def test_a_format_is_known_by_the_chat_template(
    chat_template: str | None, tools: str | None, thinks: bool
) -> None:
    found = choose_format("auto", "auto", tokenizer(chat_template))
    assert (found.close if found.calls else None) == tools
    assert found.thinks == thinks


def test_glms_and_seeds_ways_are_not_taken_for_those_whose_marks_they_have() -> None:
    glm = choose_format("auto", "auto", tokenizer("<tool_call>{name}\n<arg_key>{key}</arg_key> <think>"))
    assert glm == joined("glm45", "deepseek_r1")
    seed = choose_format("auto", "auto", tokenizer("<seed:tool_call> <function=name> <seed:think>"))
    assert seed == joined("seed_oss", "seed_oss")


@pytest.mark.parametrize(
    ("names", "same"),
    [
        (("qwen3_coder", "qwen3"), ("qwen3_xml", "deepseek_r1")),
        (("glm47", "glm45"), ("glm45", "deepseek_r1")),
        (("qwen25", "deepseek-r1"), ("hermes", "deepseek_r1")),
        (("llama3", "none"), ("llama3_json", "none")),
        (("gpt-oss", "gpt_oss"), ("harmony", "harmony")),
    ],
)
def test_names_of_other_servers_mean_the_same(names: tuple[Any, Any], same: tuple[str, str]) -> None:
    assert choose_format(*names, tokenizer("")) == joined(*same, given=True)


def test_settings_go_before_what_a_chat_template_shows() -> None:
    shown = tokenizer("… <tool_call> … <think> …")
    assert not choose_format("none", "none", shown).calls
    chosen = choose_format("mistral", "none", shown)
    assert chosen == joined("mistral", "none", given=True)


@pytest.mark.parametrize(
    ("chat_template", "written"),
    [
        ("… [TOOL_CALLS] … [CALL_ID] … [ARGS] …", "[TOOL_CALLS]f[ARGS]{}"),
        ("… [TOOL_CALLS] … [ARGS] …", "[TOOL_CALLS]f[ARGS]{}"),
        ("… [TOOL_CALLS][ …", '[TOOL_CALLS][{"name": "f", "arguments": {}}]'),
        ("… [TOOL_CALLS] [ …", '[TOOL_CALLS] [{"name": "f", "arguments": {}}]'),
    ],
)
def test_mistrals_way_is_known_by_its_marks(chat_template: str, written: str) -> None:
    found = choose_format("auto", "auto", tokenizer(chat_template))
    assert found.writing is not None
    assert found.writing.one_call("f", "{}") == written
    assert bool(found.writing.call_id) == ("[CALL_ID]" in chat_template)
    assert found.mark_ids == {"[TOOL_CALLS]": 7}  # [ARGS] is no special token here
    parser = AnswerFormatReader(found).parser(calls=True, prefix="")
    assert parser is not None
    assert join(pieces(parser, [written])).calls == [("f", "{}")]


def own_template() -> dict[str, Any]:
    return {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "thinking": {"open": "<t>", "close": "</t>", "content": "text"},
            "tool_calls": {
                "open": "<call>", "close": "</call>", "repeats": True, "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {"content": "text"},
        },
    }  # fmt: skip


def test_a_tokenizers_own_template_is_taken_as_it_is() -> None:
    found = choose_format("auto", "auto", tokenizer(None, response_template=own_template()))
    text = '<t>hm</t>\n\nLook: <call>{"name": "f", "arguments": {"a": 1}}</call>'
    for cut in ([text], list(text)):
        parser = AnswerFormatReader(found).parser(calls=True, prefix="")
        assert parser is not None
        assert join(pieces(parser, cut)) == ReadAnswer("Look:", "hm", [("f", '{"a": 1}')])


def test_a_broken_template_of_a_tokenizer_is_refused() -> None:
    broken = tokenizer(None, response_template={"fields": {}})
    with pytest.raises(ModelError, match="response_template is broken"):
        choose_format("auto", "auto", broken)


def test_a_format_without_calls_or_thoughts_needs_no_parser() -> None:
    assert AnswerFormatReader(AnswerFormat()).parser(calls=False, prefix="") is None
    assert AnswerFormatReader(joined("hermes", "none")).parser(calls=False, prefix="") is None
