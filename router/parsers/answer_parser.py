"""An answer's text becomes content, thoughts and calls of tools, while it comes.

transformers' `ResponseParser` finds where thoughts and calls begin and end, by an `AnswerFormat`; `call_scanner` reads
what models write as JSON within a call. Whatever way the text is cut into pieces, the same comes out: an answer that
is not streamed is the joined pieces of a stream.

    content     <think>…</think>\\n\\n        text            <tool_call>{"name": …}</tool_call>
    kind                reasoning   (left out)  content     call, then arguments; custom_call, then input

Blank space between the parts belongs to none. A call that cannot be read is content, with the marks around it, and
nothing is logged: it is the client's text. This file knows neither ids of tokens, nor requests, nor stop strings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from router.parsers.answer_deltas import AnswerDelta, AnswerParser, DeltaList
from router.parsers.answer_formats import AnswerFormat, joined
from router.parsers.call_scanner import CallPart, CallScanner, whole_text
from router.parsers.harmony import HarmonyParser
from router.parsers.typed_values import typed_arguments

FORGOTTEN_CHARS = 4096  # of an answer, at a time, once they have passed
BEHIND_CHARS = 64  # of them stay, since a mark may have to stand at the beginning of an answer, or of a line


class AnswerFormatReader:
    """Makes the parsers of one format. The templates are compiled once."""

    def __init__(self, answer_format: AnswerFormat):
        self.format = answer_format
        both = (False, True)
        self._templates = {
            (calls, thoughts): answer_format.template(calls=calls, thoughts=thoughts)
            for calls in both
            for thoughts in both
        }

    @cached_property
    def forced(self) -> AnswerFormatReader:
        """Reader of an answer whose calls a grammar forces: this format if it has channels or JSON, else Hermes."""
        own = self.format
        if own.channels:
            return self
        if own.writing is not None and (own.writing.trigger or not own.thinks):
            return self
        hermes = joined("hermes", "none")
        thoughts = {name: given for name, given in own.fields.items() if name != "tool_calls"}
        fields = {**thoughts, "tool_calls": hermes.fields["tool_calls"]}
        return AnswerFormatReader(
            replace(
                own,
                fields=fields,
                body=hermes.body,
                body_end="",
                close=hermes.close,
                writing=hermes.writing,
                unmarked=False,
            )
        )

    @property
    def strict(self) -> AnswerFormatReader | None:
        """Reader of a free answer whose calls a grammar keeps to schemas from their mark on; None: it cannot."""
        if self.format.writing is not None:
            return self
        return self.forced if self.format.begins_as_hermes else None

    def parser(
        self,
        *,
        calls: bool,
        prefix: str,
        tools: Sequence[Any] = (),
        text_tools: Collection[str] = (),
        thoughts: bool = True,
        nothing_else: bool = False,
    ) -> AnswerParser | None:
        """Reads one answer; None where it is text alone.

        `prefix` is the end of the prompt, which may have begun the answer; `tools` as the model is shown them;
        `text_tools` names those that take one text. `nothing_else`: a grammar keeps the answer to calls.
        """
        if self.format.channels:
            return HarmonyParser(
                prefix,
                tools,
                text_tools,
                calls=calls and self.format.calls,
                thoughts=thoughts and self.format.thinks,
                has_content=not nothing_else,
                guard=self.format.guard,
            )
        template = self._templates[calls, thoughts]
        if template is None:
            return None
        if not template.start_anchor_re.search(prefix):
            prefix = ""
        return MarkParser(self.format, template, prefix, tools, text_tools, has_content=not nothing_else)


class MarkParser:
    """Reads one answer whose thoughts and calls stand between marks."""

    def __init__(
        self,
        answer_format: AnswerFormat,
        template: Any,
        prefix: str,
        tools: Sequence[Any],
        text_tools: Collection[str] = (),
        *,
        has_content: bool = True,
    ):
        """`has_content`: else what is no call is the beginning of one, cut off by max_tokens."""
        from transformers.utils.chat_parsing import ResponseParser

        self._format = answer_format
        self._has_content = has_content
        self._parameters = {str(one["function"]["name"]): one["function"].get("parameters") for one in tools}
        self._names = frozenset(self._parameters if answer_format.unmarked else ())
        self._parser = ResponseParser(template, prefix=prefix)
        self._broken = False
        self._deltas = DeltaList(text_tools)
        self._content = _Blank(keep_first=True)
        self._thoughts = _Blank(keep_first=False)
        self.reads_thoughts = "reasoning_content" in template.fields
        self.in_thoughts = False  # behind what was read so far
        self.thought_pieces = 0  # that were read so far, those of blank space too
        self._body: list[str] = []  # of a call that is read at its end
        self._scanner: CallScanner | None = None
        for event in self._parser.initial_events:  # the prompt's own, but for what is open behind it
            self._event(event, at_end=False)
        self._deltas.take()
        self._content = self._content.continued()
        self.begins_in_thoughts = self.in_thoughts

    @property
    def calls(self) -> int:
        """How many calls have begun."""
        return self._deltas.calls

    def push(self, text: str) -> list[AnswerDelta]:
        """What is certain now."""
        if not text:
            return []
        self._read(text)
        return self._deltas.take()

    def finish(self) -> list[AnswerDelta]:
        """The rest. The text may have ended anywhere."""
        if not self._broken:
            self._read(None)
        self._deltas.end_call()
        self._deltas.put("content", self._content.finish())
        return self._deltas.take()

    def _read(self, text: str | None) -> None:
        """Feed the parser; what it cannot take at all is content from there on."""
        if self._broken:
            self._say_content(text or "")
            return
        try:
            events = self._parser.finalize()[1] if text is None else self._parser.feed(text)
        except Exception:  # of a content parser: numbers with 5,000 digits, 1,000 nested lists
            self._broken, self.in_thoughts = True, False
            self._say_content("".join(self._body) + (text or ""))
            return
        for event in events:
            self._event(event, at_end=text is None)
        self._forget()

    def _forget(self) -> None:
        """Let `ResponseParser` forget text that has passed: it keeps all and copies it with each piece.

        It has no method for that. A version that names these fields otherwise keeps the text.
        """
        parser, passed = self._parser, getattr(self._parser, "_pos", 0)
        if passed < FORGOTTEN_CHARS:
            return
        parser._buffer, parser._pos = parser._buffer[passed - BEHIND_CHARS :], BEHIND_CHARS
        if parser._current != "tool_calls":  # whose text is read when it is whole
            parser._body = ""

    def _event(self, event: dict[str, Any], *, at_end: bool) -> None:
        region, kind = event["field"], event["type"]
        if region == "tool_calls":
            if kind == "region_open":
                self._begin_calls()
            elif kind == "region_chunk":
                self._call_text(event["text"])
            else:
                self._end_calls(event["value"], at_end)
        elif region == "reasoning_content":
            self.in_thoughts = kind != "region_close"
            if kind == "region_open":
                self._thoughts = _Blank(keep_first=False)
            elif kind == "region_chunk":
                self.thought_pieces += 1
                self._deltas.put("reasoning", self._thoughts.push(event["text"]))
            else:
                self._content = _Blank(keep_first=False)
        elif region == "content" and kind == "region_chunk":
            self._say_content(event["text"])

    def _say_content(self, text: str) -> None:
        if self._has_content or self._broken:
            self._deltas.put("content", self._content.push(text))

    # ---- calls --------------------------------------------------------------------------------------------------

    def _begin_calls(self) -> None:
        self._body = []
        self._scanner = None
        if self._format.body != "value":
            self._scanner = CallScanner(named=self._format.body == "named", names=self._names)

    def _call_text(self, text: str) -> None:
        self._body.append(text)
        if self._scanner:
            self._call_parts(self._scanner, self._scanner.push(text))

    def _call_parts(self, scanner: CallScanner, parts: list[CallPart]) -> None:
        for part in parts:
            if part.kind == "name":
                self._say_call(part.text)
            elif part.kind == "arguments":
                self._deltas.arguments(part.text)
            elif scanner.calls:
                self._say_content(part.text)

    def _end_calls(self, value: Any, at_end: bool) -> None:
        """A region for calls is closed, or the answer has ended in it."""
        if self._scanner:
            self._call_parts(self._scanner, self._scanner.finish())
            called = self._scanner.calls > 0
        else:
            called = self._say_values(value, at_end)
        if not called:
            mark = value.get("open", "") if isinstance(value, dict) else ""
            self._say_content(mark + "".join(self._body) + ("" if at_end else self._format.close))
        self._deltas.end_call()
        self._body = []

    def _say_values(self, value: Any, at_end: bool) -> bool:
        """The calls that a content parser has read; False if it has read none."""
        values = value if isinstance(value, list) else [value]
        called = [one.get("function") if isinstance(one, dict) else None for one in values]
        pattern = self._format.fields["tool_calls"].get("content_args", {}).get("tag_pattern")
        unread = re.sub(pattern, "", "".join(self._body), flags=re.DOTALL) if pattern else ""
        if (
            unread.strip() != (self._format.body_end if pattern else "")
            or (
                at_end and self._format.close and pattern and not self._format.body_end
            )  # it may be half of one
            or not called
            or not all(map(_is_call, called))
            or (self._is_bare(value) and not all(one and one["name"] in self._names for one in called))
        ):
            return False
        for one in called:
            assert one is not None
            self._say_call(whole_text(one["name"]))
            arguments = typed_arguments(
                one.get("arguments") or {}, self._parameters.get(one["name"]), all_texts=pattern is not None
            )
            self._deltas.arguments(whole_text(_as_json(arguments)))
        return True

    def _is_bare(self, value: Any) -> bool:
        """Whether a call has no mark before it, so that only the name of a tool tells it from a text."""
        opened = value.get("open", "") if isinstance(value, dict) else ""
        return self._format.unmarked and not opened.startswith(tuple(self._format.special_tokens or ()))

    def _say_call(self, name: str) -> None:
        self._content = _Blank(keep_first=False)
        self._deltas.call(name)


class _Blank:
    """Holds blank space back until it is known to stand within a text; leaves it out before, unless `keep_first`."""

    def __init__(self, *, keep_first: bool):
        self.keep_first = keep_first
        self._held: list[str] = []

    def push(self, text: str) -> str:
        """What stands within the text for certain."""
        if not self.keep_first:
            text = text.lstrip()
        ink = text.rstrip()
        if not ink:
            self._held += [text] if text else []
            return ""
        before, self._held = "".join(self._held), [text[len(ink) :]]
        self.keep_first = True
        return before + ink

    def finish(self) -> str:
        """The blank space at the end."""
        held, self._held = "".join(self._held), []
        return held

    def continued(self) -> _Blank:
        """For what follows this text."""
        return _Blank(keep_first=self.keep_first)


def _is_call(value: Any) -> bool:
    """Whether a content parser has read a call."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return False
    arguments = value.get("arguments", {})
    return isinstance(arguments, dict) or value.get("arguments") is None


def _as_json(arguments: Any) -> str:
    try:
        return json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except ValueError:  # NaN or Infinity, which Python reads and JSON does not have
        finite = json.loads(json.dumps(arguments), parse_constant=lambda _: None)
        return json.dumps(finite, ensure_ascii=False)


# ---- how many tokens of an answer are thoughts: those with text that the answer's parser finds between the marks -----
# A token with the end of a mark and the beginning of a thought counts, one with no more than a mark's text does not.
# What a parser holds back, as it may be the beginning of a mark, counts once that is known; so does half a character. A
# token without text counts with the thought that comes behind it.


class ThoughtTokens:
    """Reads one answer by its parser, and counts."""

    def __init__(self, parser: AnswerParser):
        self.count = 0
        self._parser = parser
        self._held = 0  # tokens in thoughts, of whose text none was certain

    def push(self, texts: Sequence[str]) -> list[AnswerDelta]:
        """What is certain now. Each text is what one token has added, maybe nothing."""
        if len(texts) == 1:  # nearly always
            return self._push(texts[0])
        return [delta for text in texts for delta in self._push(text)]

    def _push(self, text: str) -> list[AnswerDelta]:
        parser = self._parser
        was_open, pieces = parser.in_thoughts, parser.thought_pieces
        deltas = parser.push(text)
        new = parser.thought_pieces > pieces
        if new and not self._held:
            self.count += 1
        elif new or was_open:
            self._settle(1, new=new)
        return deltas

    def finish(self, text: str) -> list[AnswerDelta]:
        """The rest, with text that the last tokens had held back."""
        pieces = self._parser.thought_pieces
        deltas = self._parser.push(text) + self._parser.finish()
        self._settle(0, new=self._parser.thought_pieces > pieces)
        return deltas

    def _settle(self, tokens: int, *, new: bool) -> None:
        """Count tokens if there is new text of thoughts, else hold them until there is, or a mark ends."""
        held, self._held = self._held + tokens, 0
        if new:
            self.count += held
        elif self._parser.in_thoughts:
            self._held = held
