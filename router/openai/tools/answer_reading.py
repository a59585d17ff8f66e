"""How the answers of one chat request are read: with which tools, in which format.

What a request asks for becomes a parser for each of its choices. A model whose chat template does not show tools is
told of them by `chat_messages.in_words`, if a setting says how it shall write calls; else tools are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.openai.fields.ignored import Ignored
from router.openai.prompts.chat_messages import not_shown
from router.openai.tools.answer_grammar import answer_grammar
from router.openai.tools.channel_grammar import channel_grammar
from router.openai.tools.choice import ToolUse
from router.parsers.answer_deltas import AnswerParser
from router.parsers.answer_formats import PREFIX_TOKENS
from router.parsers.answer_parser import AnswerFormatReader
from router.parsers.harmony import HarmonyParser
from router.text.stop_strings import StopPattern
from router.text.tokenizer import Tokenizer
from shared.primitives.errors import RequestError
from shared.wire.grammar import Grammar


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerReading:
    """How one request's answers are read."""

    reader: AnswerFormatReader
    use: ToolUse
    thoughts: bool = True  # are set apart from the content
    shows_thoughts: bool = True

    def parser(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> AnswerParser | None:
        """Reads one answer to a prompt; None where it is text alone."""
        return self.reader.parser(
            calls=bool(self.use.tools),
            prefix=tokenizer.of_answers.decode(prompt[-PREFIX_TOKENS:]),
            tools=self.use.shown,
            text_tools=self.use.custom,
            thoughts=self.thoughts,
            nothing_else=bool(self.use.forced),
        )

    def grammar(
        self, tokenizer: Tokenizer, prompt: Sequence[int], structured: Grammar | None, ignored: Ignored
    ) -> Grammar | None:
        """What an answer must look like; raises `RequestError` for schemas that cannot be kept to."""
        if structured is None and not self.use.tools:
            return None
        parser = self.parser(tokenizer, prompt)
        if isinstance(parser, HarmonyParser):
            return channel_grammar(self.use, self.reader.format, parser.begun, structured, ignored)
        begun = parser is not None and parser.begins_in_thoughts
        return answer_grammar(self.use, self.reader.format, begun, structured, ignored)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """How the tokens of an answer become its text, thoughts and calls; the same for all its choices."""

    stops: tuple[StopPattern, ...] = ()
    include_stop: bool = False  # what ended the text is a part of it
    skip_special_tokens: bool = True
    continues_prompt: bool = False  # the text goes on where the prompt ends: a completion, or a last message
    token_ids: bool = False  # pieces say of which tokens they are
    reading: AnswerReading | None = None  # thoughts and calls are told apart from the text


def answer_reading(
    tokenizer: Tokenizer,
    use: ToolUse,
    ignored: Ignored,
    *,
    structured: bool,
    thoughts: bool,
    shows_thoughts: bool,
) -> AnswerReading | None:
    """How a request's answers are read; None if they are text alone. `structured`: a grammar constrains them.

    Raises `RequestError` if there are tools, and the model cannot call any, or not as they ask for.
    """
    reader = tokenizer.answers
    if use.tools and not (tokenizer.shows_tools or reader.format.given):
        raise not_shown("tools")
    if use.tools and not reader.format.calls:
        raise RequestError(
            "it is not known how this model writes calls of tools: start the router with --tool-call-parser, such"
            " as hermes",
            param="tools",
        )
    if not use.tools and not (thoughts and reader.format.thinks) and not reader.format.channels:
        return None
    if use.forced or (use.tools and structured):
        reader = reader.forced
    elif use.strict and reader.strict is None and not any(tool.required for tool in use.tools):
        use = use.free(ignored)
    elif use.strict:
        reader = _strict(reader)
    return AnswerReading(reader=reader, use=use, thoughts=thoughts, shows_thoughts=shows_thoughts)


def _strict(reader: AnswerFormatReader) -> AnswerFormatReader:
    if reader.strict is None:
        raise RequestError(
            "strict tools cannot be kept to with this model's way to write calls unless one is forced: set tool_choice"
            ' to "required" or to a tool, or leave strict out',
            param="tools",
        )
    return reader.strict
