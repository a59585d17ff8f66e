"""The grammars of answers in harmony's messages, against the library that keeps to them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from llguidance import LLTokenizer
from tokenizers import Tokenizer

from router.openai.fields.ignored import Ignored
from router.openai.tools.channel_grammar import channel_grammar
from router.openai.tools.choice import NO_TOOLS, ToolUse
from router.parsers.answer_formats import joined
from router.parsers.harmony import Begun
from shared.limits.grammars import compiled
from shared.primitives.errors import RequestError
from shared.wire.grammar import Grammar
from tests.byte_tokenizer import VOCAB_SIZE, write_byte_tokenizer
from tests.unit.grammars.test_tool_grammars import AUTO, AUTO_STRICT, BOOLEAN, NAMED, REQUIRED, accepts

MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|return|>", "<|call|>")
HARMONY = joined("harmony", "harmony", special={mark: 262 + at for at, mark in enumerate(MARKS)})
NEXT = "<|end|><|start|>assistant"
THOUGHT = f"<|channel|>analysis<|message|>I {{look}}.{NEXT}"
PREAMBLE = f"<|channel|>commentary<|message|>One moment.{NEXT}"
FINAL = "<|channel|>final<|message|>"
PARIS = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Paris"}'
THREE = '<|channel|>commentary to=functions.count <|constrain|>json<|message|>{"to": 3}'
WRONG = THREE.replace("3", '"three"')

CASES: dict[str, tuple[ToolUse, Begun, Grammar | None, list[str], list[str]]] = {
    "required": (
        REQUIRED,
        None,
        None,
        [PARIS, THREE, THOUGHT + PARIS, THOUGHT + THOUGHT + THREE],
        [WRONG, "Well", f"{FINAL}Well", f"{THOUGHT}{FINAL}Well", THOUGHT, PREAMBLE + PARIS, f"{PARIS}{NEXT}{PARIS}"],
    ),
    "each way to write a header": (
        NAMED,
        None,
        None,
        [
            ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Paris"}',
            PARIS.replace(" <|constrain|>", "<|constrain|>"),
            PARIS.replace(" <|constrain|>json", " json"),
            PARIS.replace(" <|constrain|>json", ""),
        ],
        [PARIS.replace("weather", "whether"), THREE, PARIS.replace("commentary", "analysis")],
    ),
    "named, behind thoughts that have begun": (
        NAMED,
        "reasoning",
        None,
        [f"so{NEXT}{PARIS}", f"so{NEXT}{THOUGHT}{PARIS}"],
        [PARIS, "so", f"so{NEXT}{FINAL}Well"],
    ),
    "named, behind an answer that has begun": (NAMED, "content", None, [f"{NEXT}{PARIS}"], ["so", PARIS]),
    "strict": (
        AUTO_STRICT,
        None,
        None,
        [f"{FINAL}Well", THREE, THOUGHT + PREAMBLE + THREE, f"{THOUGHT}{FINAL}", PARIS.replace('"city"', '"town"')],
        [WRONG, THOUGHT + WRONG, "Well", f"{FINAL}Well{NEXT}{FINAL}"],
    ),
    "strict, and an answer that has begun": (
        AUTO_STRICT,
        "content",
        None,
        ["so", f"so{NEXT}{THREE}"],
        [f"so{NEXT}{WRONG}"],
    ),
    "a schema": (
        NO_TOOLS,
        None,
        BOOLEAN,
        [f"{FINAL}true", f"{THOUGHT}{FINAL}false", f"{THOUGHT}<|channel|>final <|constrain|>json<|message|>true"],
        ["true", f"{FINAL}7", f"{PREAMBLE}{FINAL}true", THOUGHT],
    ),
    "a schema, and an answer that has begun": (NO_TOOLS, "content", BOOLEAN, ["true"], [f"{FINAL}true", "7"]),
    "a schema or calls": (
        AUTO,
        None,
        BOOLEAN,
        [f"{FINAL}true", WRONG, THOUGHT + THREE],
        [f"{FINAL}7", PREAMBLE + THREE],
    ),
    "a schema or calls, and an answer that has begun": (AUTO, "content", BOOLEAN, ["true", NEXT + THREE], ["7"]),
    "a forced call beside a schema": (NAMED, None, BOOLEAN, [PARIS], [f"{FINAL}true"]),
}  # fmt: skip


@pytest.mark.parametrize(("use", "begun", "structured", "kept", "broken"), CASES.values(), ids=CASES)
def test_a_grammar_keeps_answers_as_their_tools_want_them(
    use: ToolUse, begun: Begun, structured: Grammar | None, kept: list[str], broken: list[str], tmp_path: Path
) -> None:
    file = write_byte_tokenizer(tmp_path, MARKS)
    grammar = channel_grammar(use, HARMONY, begun, structured, Ignored())
    assert grammar is not None
    assert [text for text in kept if not accepts(file, grammar, text)] == []
    assert [text for text in broken if accepts(file, grammar, text)] == []


def test_a_call_ends_with_its_mark_or_with_that_of_an_answer_and_not_as_a_message_does(
    tmp_path: Path,
) -> None:
    backend = Tokenizer.from_file(str(write_byte_tokenizer(tmp_path, MARKS)))
    ids = {mark: backend.encode(mark).ids[0] for mark in MARKS}
    ends = [ids["<|return|>"], ids["<|call|>"]]
    tokenizer = LLTokenizer(backend.to_str(), n_vocab=VOCAB_SIZE, eos_token=ends)
    grammar = channel_grammar(REQUIRED, HARMONY, None, None, Ignored())
    assert grammar is not None
    matcher = compiled(grammar, tokenizer)
    assert all(matcher.consume_token(token_id) for token_id in backend.encode(THOUGHT + PARIS).ids)
    mask = matcher.compute_bitmask()
    assert [token_id for token_id in ids.values() if mask[token_id // 8] >> token_id % 8 & 1] == ends


def test_tools_that_may_be_called_leave_an_answer_free() -> None:
    assert channel_grammar(AUTO, HARMONY, None, None, Ignored()) is None


def test_a_tokenizer_without_the_marks_is_refused() -> None:
    without = replace(HARMONY, mark_ids={mark: 262 for mark in MARKS if mark != "<|channel|>"})
    for use, structured, param in ((REQUIRED, None, "tools"), (NO_TOOLS, BOOLEAN, "response_format")):
        with pytest.raises(
            RequestError, match=r"no token <\|channel\|>, so calls and schemas cannot be kept"
        ) as refused:
            channel_grammar(use, without, None, structured, Ignored())
        assert refused.value.param == param
