"""Reads answers in OpenAI's harmony format, as the gpt-oss models write it: messages, each with a header.

    <|start|>assistant<|channel|>analysis<|message|>I look.<|end|>                                     thoughts
    <|start|>assistant<|channel|>commentary<|message|>One moment.<|end|>                               content
    <|start|>assistant<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}<|call|>    a call
    <|start|>assistant<|channel|>final<|message|>It is 4.<|return|>                                    content

The prompt ends with the first `<|start|>assistant`. The recipient (`to=`) may stand before the channel, and on any
channel. Messages of one kind are joined by a blank line. A recipient that is no tool of the request's calls nothing:
its message is of its channel.

Models leave marks out. A header ends with what cannot belong to one, so text that has no header, or none that is whole,
is content, or of the channel that was named; a message ends where another one's header begins. A text is split into
marks and what stands between them, and a header is judged at each character: it makes no difference how text is cut.

Where marks are tokens, each comes behind a guard, and a text that spells one is text. The format:
https://github.com/openai/harmony.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any, Literal, NamedTuple

from router.parsers.answer_deltas import AnswerDelta, DeltaList

HEADER_CHARS = 512  # what is longer is no header
BETWEEN = "\n\n"  # messages of one kind

_IN_HEADERS = ("<|channel|>", "<|message|>", "<|constrain|>")
_MARKS = ("<|start|>", *_IN_HEADERS, "<|end|>", "<|return|>", "<|call|>")
_MARK = "|".join(map(re.escape, _MARKS))
_NAMESPACE = "functions."
_CHANNELS = ("analysis", "commentary", "final")
_ROLES = ("assistant", "user", "system", "developer", "tool")
_TYPES = ("json", "code", "text")  # of contents, where `<|constrain|>` was left out


def _beginning(word: str) -> str:
    """Pattern of what a longer word may begin with."""
    return f"(?:{re.escape(word[0])}{_beginning(word[1:])})?" if word else ""


def _part(*names: str) -> str:
    """Pattern of one part of a header, with groups of these names."""
    channel, recipient, bare = names or ("",) * 3
    groups = {name: f"?P<{name}>" if name else "?:" for name in (channel, recipient, bare)}
    return (
        rf"\s{{0,8}}(?:<\|channel\|>\s{{0,8}}({groups[channel]}{'|'.join(_CHANNELS)}|[A-Za-z_]{{0,16}})"
        rf"|to=({groups[recipient]}[\w.:-]{{0,256}})"
        rf"|<\|constrain\|>(?:\s{{0,8}}(?:{'|'.join(_TYPES)}|\w{{0,16}}))"
        rf"|({groups[bare]}(?:{'|'.join(_TYPES)})(?!\w))"
        rf"|(?:{'|'.join(_ROLES)})(?!\w)|functions\.[\w.:-]{{1,256}})"
    )


_A_PART = re.compile(_part("channel", "recipient", "bare"))
_HEADER = re.compile(  # or what one begins with; (?>…)*+ tries no other way to divide what it has read
    rf"(?>{_part()})*+\s{{0,8}}(?:{'|'.join(map(_beginning, ('to=', _NAMESPACE, *_ROLES, *_TYPES)))})"
)


Begun = Literal["content", "reasoning"] | None  # a message of this kind


class HeaderParts(NamedTuple):
    """What a header says, and what stands in it that is no part of one."""

    channel: str
    recipient: str
    rest: str  # behind all parts
    text: str  # the same, with what is a part only if `<|message|>` stands behind it


class HarmonyParser:
    """Reads one answer."""

    def __init__(
        self,
        prefix: str,
        tools: Sequence[Any],
        text_tools: Collection[str] = (),
        *,
        calls: bool,
        thoughts: bool,
        has_content: bool = True,
        guard: str = "",
    ):
        """`prefix` is the end of the prompt; without `thoughts` they are content, without `calls` there are none.

        `has_content`: else what is no call is the beginning of one, cut off by max_tokens. `guard` stands before
        each mark, and nowhere else.
        """
        self._guard = guard
        self._pattern = re.compile(f"{guard}({_MARK})")
        self._marks = [guard + mark for mark in _MARKS]
        self.reads_thoughts = thoughts
        self.thought_pieces = 0
        self._reads_calls = calls
        self._has_content = has_content
        self._tools = {tool["function"]["name"] for tool in tools}
        self._deltas = DeltaList(text_tools)
        self._held = ""  # may be the beginning of a mark
        self._header: str | None = ""  # None: a message's text has begun
        self._marked = False  # it is a header for certain
        self._kind: Literal["content", "reasoning", "call"] = "content"  # of the message
        self._has_text = False  # the message
        self._guessed = False  # where the message's header ended
        self._said: set[str] = set()  # kinds of the messages so far
        self._read_prompt(prefix)
        self.begins_in_thoughts = self.in_thoughts
        self.begun = self._begun()  # by the prompt

    def _begun(self) -> Begun:
        if self._header is None and self._kind != "call":
            return self._kind
        return None

    @property
    def in_thoughts(self) -> bool:
        return self._header is None and self._kind == "reasoning"

    @property
    def calls(self) -> int:
        return self._deltas.calls

    def push(self, text: str) -> list[AnswerDelta]:
        """What is certain now."""
        self._read(text)
        return self._deltas.take()

    def finish(self) -> list[AnswerDelta]:
        """The rest. A header that is cut off says nothing."""
        held, self._held = self._held, ""
        self._text(held)
        if self._header is not None and not self._marked:
            self._give_up(self._header)
        self._deltas.end_call()
        return self._deltas.take()

    def _read_prompt(self, prefix: str) -> None:
        _, start, begun = prefix.rpartition(f"{self._guard}<|start|>")
        if prefix and not start:
            self._header = None  # a long message is continued
        self._read(begun)
        self._text(self._held)
        if self._header == "assistant":
            self._header = ""
        self._held, self._said = "", set()
        self._deltas.take()

    # ---- marks, and what stands between them --------------------------------------------------------------------

    def _read(self, text: str) -> None:
        text, at = self._held + text, 0
        for found in self._pattern.finditer(text):
            self._text(text[at : found.start()])
            self._mark(found[1])
            at = found.end()
        cut = text.rfind(self._marks[0][0], at)
        if cut < 0 or not any(mark.startswith(text[cut:]) for mark in self._marks):
            cut = len(text)
        self._held = text[cut:]
        self._text(text[at:cut])

    def _text(self, text: str) -> None:
        if self._header is None:
            self._say(text)
            return
        for at, character in enumerate(text):
            self._header += character
            if len(self._header) >= HEADER_CHARS or not _HEADER.fullmatch(self._header):
                self._give_up(self._parts().text)
                self._say(text[at + 1 :])
                return

    def _mark(self, mark: str) -> None:
        if self._header is not None:
            parts, fits = self._parts(), len(self._header) < HEADER_CHARS
            if mark in _IN_HEADERS and fits and not parts.rest:
                self._mark_in_header(mark, parts)
                return
            if not fits or parts.text.strip() or mark == "<|call|>":  # which may have no arguments
                self._give_up(parts.text)
        if mark in ("<|message|>", "<|constrain|>"):  # no mark here
            self._say("" if self._guessed else mark)
            return
        if self._header is None and self._kind == "call":
            self._deltas.arguments("" if self._has_text else "{}")
            self._deltas.end_call()
        self._header, self._marked = "", mark == "<|start|>"
        if mark == "<|channel|>":
            self._mark_in_header(mark, self._parts())

    def _mark_in_header(self, mark: str, parts: HeaderParts) -> None:
        assert self._header is not None
        if mark == "<|message|>":
            self._begin(parts)
        else:
            self._header, self._marked = self._header + mark, True

    # ---- messages -----------------------------------------------------------------------------------------------

    def _parts(self) -> HeaderParts:
        header, channel, recipient = self._header or "", "", ""
        at, loose = 0, -1  # where begins what may be text
        while found := _A_PART.match(header, at):
            unknown = found["channel"] and found["channel"] not in _CHANNELS
            if unknown or (found["bare"] and not recipient):
                group = "channel" if unknown else "bare"
                loose = found.start(group) if loose < 0 else loose
            elif "<|" in found[0] or found["recipient"]:
                loose = -1
            channel, recipient = found["channel"] or channel, found["recipient"] or recipient
            at = found.end()
        rest = header[at:]
        if not self._marked:
            return HeaderParts(channel, recipient, rest.strip(), header)
        return HeaderParts(channel, recipient, rest.strip(), header[at if loose < 0 else loose :].lstrip())

    def _begin(self, parts: HeaderParts) -> None:
        """The message's text begins here."""
        name = self._called(parts.recipient)
        thinks = parts.channel == "analysis" and self.reads_thoughts
        self._kind = "call" if name else "reasoning" if thinks else "content"
        self._header, self._has_text, self._guessed = None, False, False
        if name:
            self._deltas.call(name)

    def _give_up(self, text: str) -> None:
        """The header has ended without its mark, and this stands behind it."""
        if self._marked:
            self._begin(self._parts())
        else:
            self._kind, self._header, self._has_text = "content", None, True
            text = text.lstrip() if self._said and "content" not in self._said else text
        self._guessed = True
        self._say(text)

    def _called(self, recipient: str) -> str | None:
        """The tool that a recipient is."""
        if not self._reads_calls:
            return None
        name = recipient.removeprefix(_NAMESPACE)
        for one in (name, name.removesuffix("json")):  # the type of the arguments, without a space before
            if one in self._tools:
                return one
        return name if name and recipient.startswith(_NAMESPACE) else None

    def _say(self, text: str) -> None:
        """More of the message's text."""
        if not text:
            return
        first, self._has_text = not self._has_text, True
        if self._kind == "call":
            self._deltas.arguments(text)
            return
        if self._kind == "reasoning":
            self.thought_pieces += 1
        elif not self._has_content:
            return
        if first and self._kind in self._said:
            self._deltas.put(self._kind, BETWEEN)
        self._said.add(self._kind)
        self._deltas.put(self._kind, text)
