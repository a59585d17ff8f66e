"""Harmony's messages: any mixture of marks is read alike however it is cut, and loses no text. Fixtures: answers/."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken

from router.parsers.answer_deltas import AnswerParser
from router.parsers.answer_formats import GUARD, choose_format, joined
from router.parsers.answer_parser import AnswerFormatReader, ThoughtTokens
from shared.primitives.errors import ModelError
from tests.unit.router.parsers.test_answer_parser import ReadAnswer, join, pieces, tokenizer

HARMONY = AnswerFormatReader(joined("harmony", "harmony"))
PROMPT = "<|start|>user<|message|>Hi<|end|><|start|>assistant"
TOOLS: list[Any] = [{"type": "function", "function": {"name": name}} for name in ("now", "note")]
MARKS = ["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|return|>", "<|call|>"]
HEADERS = [
    "assistant",
    "analysis",
    "commentary",
    "final",
    " to=functions.now",
    " to=note",
    " to=python",
    "json",
    " ",
    "\n",
]
WORDS = [
    "Zürich🙂",
    "a < b",
    "<|b",
    "{}",
    '{"input": "x"}',
    "text",
    "code is",
    "user",
    "functions.",
    "to",
    "'",
    "|>",
    "<",
]
PARTS = st.lists(st.sampled_from([*MARKS, *MARKS, *HEADERS, *WORDS]), max_size=30)


def parser(prefix: str = PROMPT, **options: Any) -> AnswerParser:
    made = HARMONY.parser(prefix=prefix, tools=TOOLS, text_tools=("note",), **{"calls": True, **options})
    assert made is not None
    return made


def read(parts: Any, prefix: str = PROMPT, **options: Any) -> list[tuple[str, str]]:
    """The joined deltas: kind and text, what follows in one kind as one."""
    found: list[list[Any]] = []
    for delta in pieces(parser(prefix, **options), parts):
        place = (delta.kind, delta.call)
        if found and found[-1][0] == place and "call" not in delta.kind:
            found[-1][1] += delta.text
        else:
            found.append([place, delta.text])
    return [(kind, text) for (kind, _), text in found]


@given(
    parts=PARTS,
    cuts=st.lists(st.integers(0, 400), max_size=20),
    prefix=st.sampled_from(["", "words", "<|start|>", PROMPT, f"{PROMPT}<|channel|>final<|message|>It"]),
    calls=st.booleans(),
    thoughts=st.booleans(),
)
def test_any_mixture_is_read_alike_however_it_is_cut(
    parts: list[str], cuts: list[int], prefix: str, calls: bool, thoughts: bool
) -> None:
    text = "".join(parts)
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    cut = [text[begin:end] for begin, end in itertools.pairwise(places)]
    ways = ([text], parts, list(text), cut)
    whole, *others = (read(way, prefix, calls=calls, thoughts=thoughts) for way in ways)
    assert all(other == whole for other in others)
    assert all(calls for kind, _ in whole if "call" in kind)
    assert all(thoughts for kind, _ in whole if kind == "reasoning")


A_WORD = re.compile(r"[ZWQ]\d")
BEHIND_MARKS = re.compile(r"(<\|constrain\|>\s*|<\|channel\|>\s*|to=\S*?)[\w.:-]+")  # may be names


@given(parts=st.lists(st.sampled_from([*MARKS, *HEADERS, "Z1", "W2", "Q3"]), max_size=30))
def test_no_text_is_lost(parts: list[str]) -> None:
    text = "".join(parts)
    told = iter(A_WORD.findall("".join(piece for _, piece in read([text], calls=False))))
    assert all(word in told for word in A_WORD.findall(BEHIND_MARKS.sub(" ", text)))  # in their order


@given(parts=PARTS)
def test_thoughts_are_counted_alike_whatever_tokens_come_together(parts: list[str]) -> None:
    counts = set()
    for together in (1, 3, len(parts) + 1):
        reading = parser()
        counted = ThoughtTokens(reading)
        for at in range(0, len(parts), together):
            counted.push(parts[at : at + together])
        counted.finish("")
        counts.add(counted.count)
    assert len(counts) == 1


@given(parts=PARTS, quoted=st.sampled_from(MARKS))
@example(parts=[" to=functions.now", "<|message|>"], quoted="<|start|>")  # a call that the end completes
def test_guarded_marks_are_the_same_and_others_are_text(parts: list[str], quoted: str) -> None:
    of_tokens = {mark: at for at, mark in enumerate(MARKS)}
    reader = AnswerFormatReader(joined("harmony", "harmony", special=of_tokens))
    assert reader.format.guard == GUARD
    written = [GUARD + part if part in MARKS else part for part in parts]
    end = f"{GUARD}<|return|>{GUARD}<|start|>assistant{GUARD}<|channel|>final{GUARD}<|message|>"
    for cut in (written, [*"".join(written)]):
        made = reader.parser(calls=True, prefix=PROMPT.replace("<|", f"{GUARD}<|"), tools=TOOLS)
        assert made is not None
        plain = HARMONY.parser(calls=True, prefix=PROMPT, tools=TOOLS)
        assert plain is not None
        if not any("<" in part for part in parts if part not in MARKS):  # which might join to a mark
            assert join([*(delta for part in cut for delta in made.push(part))]) == join(
                [delta for part in parts for delta in plain.push(part)]
            )
        last = made.push(f"{end}a {quoted} b")
        assert "".join(each.text for each in last if each.kind == "content").endswith(f"a {quoted} b")


def test_only_text_between_marks_counts_as_thoughts() -> None:
    counted = ThoughtTokens(parser())
    counted.push(
        ["<|channel|>", "analysis", "<|message|>", "I", " look", ".", "<|end|>", "<|start|>", "assistant"]
    )
    counted.push(["<|channel|>", "final", "<|message|>", "4", "<|return|>"])
    counted.finish("")
    assert counted.count == 3


ANSWER = (
    "<|channel|>analysis<|message|>I look.<|end|><|start|>assistant<|channel|>final<|message|>4<|return|>"
)
CALL = '<|channel|>commentary to=functions.note <|constrain|>json<|message|>{"input": "a \\"b\\""}<|call|>'


def test_thoughts_that_are_not_told_apart_are_content_without_marks() -> None:
    assert read([ANSWER], thoughts=False) == [("content", "I look.\n\n4")]


def test_calls_of_a_request_without_tools_are_content() -> None:
    assert read([CALL], calls=False) == [("content", '{"input": "a \\"b\\""}')]


def test_the_text_of_a_custom_tool_is_taken_out_of_its_arguments() -> None:
    assert read(CALL) == [("custom_call", "note"), ("input", 'a "b"')]


def test_arguments_come_while_they_are_written() -> None:
    reading = parser()
    begun = reading.push(CALL[: CALL.index("b")])
    assert [(delta.kind, delta.text) for delta in begun] == [("custom_call", "note"), ("input", 'a "')]


def test_a_forced_call_that_is_cut_off_leaves_nothing_in_the_content() -> None:
    for at in range(len(CALL)):
        assert "content" not in dict(read([CALL[:at]], nothing_else=True))


def test_a_prompt_that_ends_in_thoughts_begins_in_them() -> None:
    assert not parser().begins_in_thoughts
    assert parser(f"{PROMPT}<|channel|>analysis<|message|>Hm").begins_in_thoughts


# ---- which models write so ------------------------------------------------------------------------------------------

TEMPLATE = "{{ '<|start|>assistant<|channel|>final<|message|>' }}"


def of_tokens(*tokens: str, chat_template: str | None = None) -> Any:
    found = tokenizer(chat_template)
    found.added_tokens_decoder = {
        200_000 + at: AddedToken(token, special=True) for at, token in enumerate(tokens)
    }
    return found


def test_the_format_is_known_by_the_template_or_by_the_tokens() -> None:
    for model in (
        tokenizer(TEMPLATE),
        of_tokens(*MARKS),
        of_tokens(*MARKS, chat_template="{{ messages }} <tool_call>"),
    ):
        found = choose_format("auto", "auto", model)
        assert (found.channels, found.calls, found.thinks, found.given) == (True, True, True, False)
    gemma = choose_format("auto", "auto", tokenizer("<|channel>thought <|tool_call> <|message>"))
    assert gemma.calls
    assert not gemma.channels
    assert not choose_format("auto", "auto", of_tokens(*MARKS[:3])).channels


def test_grammars_get_the_ids_of_all_marks_whatever_the_template_shows() -> None:
    found = choose_format("auto", "auto", of_tokens(*MARKS, chat_template=TEMPLATE))
    assert found.mark_ids == {mark: 200_000 + at for at, mark in enumerate(MARKS)}


@pytest.mark.parametrize("name", ["harmony", "openai", "gpt-oss", "gpt_oss"])
def test_other_servers_names_are_the_same(name: Any) -> None:
    found = choose_format(name, "auto", tokenizer(None))
    assert (found.channels, found.calls, found.thinks, found.given) == (True, True, True, True)
    reasoning: Any = "openai_gptoss" if name == "openai" else name
    assert choose_format("auto", reasoning, tokenizer(None)).channels


def test_either_may_be_left_out() -> None:
    without_calls = choose_format("none", "auto", tokenizer(TEMPLATE))
    assert (without_calls.channels, without_calls.calls, without_calls.thinks) == (True, False, True)
    without_thoughts = choose_format("auto", "none", tokenizer(TEMPLATE))
    assert (without_thoughts.channels, without_thoughts.calls, without_thoughts.thinks) == (True, True, False)
    assert not choose_format("none", "none", tokenizer(TEMPLATE)).channels
    made = AnswerFormatReader(without_thoughts).parser(calls=True, prefix=PROMPT, tools=TOOLS)
    assert made is not None
    assert join(pieces(made, [ANSWER])) == ReadAnswer("I look.\n\n4", "", [])


def test_another_format_beside_it_is_refused_and_alone_goes_before_what_is_shown() -> None:
    with pytest.raises(ModelError, match="not to hermes"):
        choose_format("hermes", "harmony", tokenizer(TEMPLATE))
    with pytest.raises(ModelError, match="not to deepseek_r1"):
        choose_format("harmony", "qwen3", tokenizer(TEMPLATE))
    assert not choose_format("hermes", "auto", tokenizer(TEMPLATE)).channels
