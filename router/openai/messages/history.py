"""The messages of a Messages request become the messages of a chat.

    system                     a message of role system
    text, of any role          the content of its role's message
    tool_use                   a call in the assistant's message
    tool_result                a message of role tool, before the text that stands beside it
    thinking                   the thoughts of the assistant's message
    tool_addition, _removal    the tool is shown to the model, or is not

Messages of one role in a row are one, as at Anthropic: many templates want the roles to take turns. A last message of
the assistant is continued by the answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from router.openai.fields.ignored import Ignored
from router.openai.fields.request_body import decode, missing_field
from router.openai.messages.blocks import NULL, BlockFields, BlockReader, blocks_of
from shared.limits.grammars import check_nesting
from shared.primitives.errors import RequestError

OBJECTS_PER_TOKEN_MAX = 4  # of the context: a message, each of its blocks and what is in them is an object

Json = dict[str, Any]

# A line of Claude Code's that differs in each request. No model reads it, and behind it nothing would be cached.
BILLING = "x-anthropic-billing-header"
ERROR_MARK = "Error: "  # templates have no other way to show `is_error`


class TurnFields(msgspec.Struct):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: msgspec.Raw = NULL


def read_history(given: msgspec.Raw, system: msgspec.Raw, context_len: int, ignored: Ignored) -> History:
    """The history of a request; `ignored` gets what is left out. Raises `RequestError` naming what is wrong."""
    if bytes(given).count(b"{") + bytes(system).count(b"{") > OBJECTS_PER_TOKEN_MAX * context_len:
        raise RequestError(
            f"messages has more blocks than the model's context of {context_len} tokens can hold",
            param="messages",
            code="context_length_exceeded",
        )
    history = History(ignored)
    history.add_system(system)
    turns = decode(given, list[TurnFields], "messages")
    if not turns:
        raise RequestError("messages must be a list of at least one message", param="messages")
    for at, message in enumerate(turns):
        history.add(message, f"messages[{at}]")
    history.end()
    return history


@dataclass(slots=True)
class Turn:
    """What messages of one role say in a row, in pieces: they are joined once, when all are there."""

    role: str
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[Json] = field(default_factory=list)

    def message(self) -> Json:
        """The message of the chat."""
        made: Json = {"role": self.role, "content": "\n".join(self.texts)}
        if self.calls:
            made["tool_calls"] = self.calls
        if self.thoughts:
            made["reasoning_content"] = "\n".join(self.thoughts)
        return made


class History:
    """The messages of the chat so far, and what they say about tools. The last turn is among them after `end`."""

    def __init__(self, ignored: Ignored):
        self.messages: list[Json] = []
        self.removed_tools: set[str] = set()
        self._turn: Turn | None = None  # the last, which may go on
        self._reader = BlockReader(ignored)
        self._ignored = ignored

    @property
    def found_tools(self) -> set[str]:
        """Names of the tools that a search found, or a message added."""
        return self._reader.found_tools

    @property
    def continues(self) -> bool:
        """Whether the answer goes on where the last message ends."""
        last = self.messages[-1]
        return last["role"] == "assistant" and bool(last["content"]) and "tool_calls" not in last

    def add_system(self, system: msgspec.Raw) -> None:
        """The request's own system prompt."""
        texts = self._texts(blocks_of(system, "system"), "system")
        kept = [text for text in texts if not text.startswith(f"{BILLING}:")]
        if len(kept) < len(texts):
            self._ignored.own(BILLING)
        if kept:
            self._say("system").texts += kept

    def add(self, message: TurnFields, param: str) -> None:
        """One message more."""
        blocks = blocks_of(message.content, f"{param}.content")
        if message.role == "assistant":
            self._add_assistant(blocks, f"{param}.content")
            return
        texts, others = [], 0
        for at, block in enumerate(blocks):
            where = f"{param}.content[{at}]"
            if block.type == "tool_result" and message.role == "user":
                self._close_turn()
                self.messages.append(self._result(block, where))
                others += 1
            elif block.type in ("tool_addition", "tool_removal"):
                self._change_tools(block, where)
                others += 1
            elif text := self._reader.text(block, where):
                texts.append(text)
        if texts or not others:
            self._say(message.role).texts += texts

    def end(self) -> None:
        """No message follows; raises `RequestError` if there was nothing but changes of tools."""
        self._close_turn()
        if not self.messages:
            raise RequestError("messages must hold text, a call or a result", param="messages")

    def _add_assistant(self, blocks: list[BlockFields], param: str) -> None:
        turn = self._say("assistant")
        for at, block in enumerate(blocks):
            if block.type == "tool_use":
                turn.calls.append(_call(block, f"{param}[{at}]"))
            elif block.type == "thinking":
                turn.thoughts += [block.thinking] if block.thinking else []
            elif text := self._reader.text(block, f"{param}[{at}]"):
                turn.texts.append(text)

    def _say(self, role: str) -> Turn:
        """The last turn, if it is of this role; else a new one."""
        if self._turn is None or self._turn.role != role:
            self._close_turn()
            self._turn = Turn(role)
        return self._turn

    def _close_turn(self) -> None:
        if self._turn is not None:
            self.messages.append(self._turn.message())
            self._turn = None

    def _result(self, block: BlockFields, param: str) -> Json:
        """What a tool gave."""
        if block.tool_use_id is None:
            raise missing_field(f"{param}.tool_use_id")
        inner = f"{param}.content"
        content = "\n".join(self._texts(blocks_of(block.content, inner), inner))
        return {
            "role": "tool",
            "tool_call_id": block.tool_use_id,
            "content": ERROR_MARK + content if block.is_error else content,
        }

    def _change_tools(self, block: BlockFields, param: str) -> None:
        """Show a tool or hide it; a definition that stands in a message is left out."""
        if block.tool is None:
            raise missing_field(f"{param}.tool")
        if block.tool.type != "tool_reference" or block.tool.name is None:
            self._ignored.own(block.type)
        elif block.type == "tool_addition":
            self._reader.found_tools.add(block.tool.name)
            self.removed_tools.discard(block.tool.name)
        else:
            self.removed_tools.add(block.tool.name)

    def _texts(self, blocks: list[BlockFields], param: str) -> list[str]:
        texts = (self._reader.text(block, f"{param}[{at}]") for at, block in enumerate(blocks))
        return [text for text in texts if text]


def _call(block: BlockFields, param: str) -> Json:
    """What the assistant called."""
    if block.name is None or block.id is None:
        raise missing_field(f"{param}.{'name' if block.name is None else 'id'}")
    given = bytes(block.input)
    if not given.startswith(b"{"):
        raise RequestError(f"{param}.input must be an object", param=f"{param}.input")
    check_nesting(given.decode(errors="replace"), f"{param}.input")
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}
