"""A chat becomes one text: the model's own chat template, rendered in transformers' sandbox, within a time limit.

A client never supplies a template. Control tokens can be given other names: they are replaced in the template's source
and in the variables that carry them (`bos_token`, …), so a template that writes a control token then writes its other
name. What a message says is not touched.

This file knows no token ids.
"""

from __future__ import annotations

import ctypes
import inspect
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from jinja2 import TemplateSyntaxError

from shared.primitives.errors import RequestError

T = TypeVar("T")

Message = Mapping[str, Any]  # role and content, and what else templates read


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """How a chat is rendered; `variables` and `documents` are the client's own, for the template."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False  # the last message has no end: the answer continues it
    variables: Mapping[str, Any] = field(default_factory=dict)
    documents: Sequence[Mapping[str, Any]] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None

    def texts(self) -> Iterator[str]:
        """Every text in it that a client sent, however deep."""
        return texts_of([self.variables, self.documents, self.tools])


class TemplateLimitError(RequestError):
    """The template takes more time or memory with these messages than it may."""


PLAIN_CHAT = ChatOptions()
_SAMPLE_CHAT = [{"role": "user", "content": "word"}]
_SAMPLE_VALUES: dict[str, tuple[Any, Any]] = {
    "enable_thinking": (True, False),
    "thinking": (True, False),
    "reasoning_effort": ("low", "high"),
}
SAMPLE_TOOL = {
    "type": "function",
    "function": {
        "name": "sample",
        "description": "A sample.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "description": "A word."}},
        },
    },
}


def texts_of(value: Any) -> Iterator[str]:
    """The strings in a value of JSON, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield key
            yield from texts_of(inner)
    elif isinstance(value, Sequence):
        for inner in value:
            yield from texts_of(inner)


def client_texts(message: Message) -> Iterator[str]:
    """What the client wrote in a message: all but its role and the names of its fields."""
    return texts_of([value for name, value in message.items() if name != "role"])


def chat_templates(tokenizer: Any) -> tuple[str | None, str | None]:
    """The templates of a folder for chats without tools, and with tools: most folders have one for both.

    Some have several by name (Hermes 2 Pro, Hermes 3), as `transformers` has them in a dict.
    """
    found = tokenizer.chat_template
    if not isinstance(found, Mapping):
        return found, found
    plain = found.get("default")
    return plain, found.get("tool_use", plain)


class ChatTemplate:
    """The template of one model folder. May be used from any thread."""

    def __init__(self, tokenizer: Any, limit: TimeLimit, names: Mapping[str, str] | None = None):
        """`tokenizer` is transformers' own; where it writes a key of `names`, the text is the key's value."""
        self._tokenizer = tokenizer
        self._limit = limit
        names = names or {}
        plain, with_tools = chat_templates(tokenizer)
        self._source = replace_all(plain, names) if plain is not None else None
        self._with_tools = replace_all(with_tools, names) if with_tools is not None else None
        variables = tokenizer.special_tokens_map.items()
        own = inspect.signature(tokenizer.apply_chat_template).parameters
        self._reserved = frozenset((*own, *tokenizer.special_tokens_map, "messages", "raise_exception"))
        self._variables = {variable: replace_all(text, names) for variable, text in variables}

    @property
    def exists(self) -> bool:
        """Whether the folder has one."""
        return self._source is not None

    def renamed(self, names: Mapping[str, str]) -> ChatTemplate:
        """Copy of the template with other names for some tokens."""
        return ChatTemplate(self._tokenizer, self._limit, names)

    @property
    def reserved(self) -> frozenset[str]:
        """Names that a client's variables may not have: they are this server's, or the tokenizer's."""
        return self._reserved

    @cached_property
    def shows_tools(self) -> bool:
        """Whether what it writes depends on the tools that it is given."""
        try:
            plain, shown = (
                self.render(_SAMPLE_CHAT, ChatOptions(tools=tools)) for tools in (None, [SAMPLE_TOOL])
            )
        except RequestError:
            return False
        return plain != shown

    @cached_property
    def takes_late_system(self) -> bool:
        """Whether it shows a system message that stands behind another message; many refuse one."""
        late = {"role": "system", "content": "late"}
        try:
            return late["content"] in self.render([*_SAMPLE_CHAT, late])
        except RequestError:
            return False

    @cached_property
    def variables_read(self) -> frozenset[str]:
        """Which of `enable_thinking`, `thinking` and `reasoning_effort` change what it writes."""
        return frozenset(name for name, values in _SAMPLE_VALUES.items() if self._reads(name, values))

    def _reads(self, name: str, values: tuple[Any, Any]) -> bool:
        try:
            one, other = (self.render(_SAMPLE_CHAT, ChatOptions(variables={name: value})) for value in values)
        except RequestError:
            return False
        return one != other

    def render(self, messages: Sequence[Message], options: ChatOptions = PLAIN_CHAT) -> str:
        """The text of a chat; raises `RequestError` if the template refuses it or does not end.

        The template's own words are not repeated: they may quote the messages.
        """
        if self._source is None:
            raise RequestError("this model has no chat template: use /v1/completions", param="messages")
        try:
            return self._limit.run(lambda: self._render(messages, options))
        except TimeLimitError as error:
            message = f"the model's chat template does not end with these messages: {error}"
            raise TemplateLimitError(message, param="messages") from None
        except MemoryError:
            message = "the model's chat template takes more memory with these messages than there is"
            raise TemplateLimitError(message, param="messages") from None
        except Exception:  # jinja2's errors, and whatever a template's expressions raise
            raise RequestError(
                "the model's chat template does not accept these messages: check the order of their roles",
                param="messages",
            ) from None

    @property
    def fault(self) -> str | None:
        """Why the template cannot be read, with the line; None if it can, whatever it accepts."""
        try:
            self._render(_SAMPLE_CHAT, PLAIN_CHAT)
        except TemplateSyntaxError as error:
            return f"line {error.lineno}: {error.message}"
        except Exception:  # it may want other messages
            pass
        return None

    def _render(self, messages: Sequence[Message], options: ChatOptions) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                chat_template=self._with_tools if options.tools else self._source,
                tokenize=False,
                add_generation_prompt=options.add_generation_prompt and not options.continue_final_message,
                continue_final_message=options.continue_final_message,
                documents=options.documents,
                tools=list(options.tools) if options.tools else None,
                **(dict(options.variables) | self._variables),
            )
        )


def replace_all(text: str, names: Mapping[str, str]) -> str:
    """`text` with each key of `names` replaced by its value; of two that begin at one place, the longer."""
    if not names:
        return text
    longest_first = sorted(names, key=len, reverse=True)
    return re.sub("|".join(map(re.escape, longest_first)), lambda match: names[match[0]], text)


# ---- a time limit for work in a thread: a chat template may loop without end, and its thread would be lost -----------
# Work that is late is ended by an exception that is raised in its thread (`PyThreadState_SetAsyncExc`), between two
# instructions of Python, so it ends loops of a template, but not one long call into C. Who raises it is a watching
# thread, which lives while something runs.
#
#     run(work) ── enter ──────── work() ──────── leave ──
#                    └ the exception comes only between these two, because both and the watcher take one lock


CHECKS = 4  # within the limit, so work ends at most a quarter late


class TimeLimitError(Exception):
    """The work took longer than its limit."""


class _TimeUp(BaseException):
    """Raised in the thread of the work; no `except Exception` on the way stops it."""


class _Work:
    """One call that is running."""

    def __init__(self, deadline: float):
        self.thread_id = threading.get_ident()
        self.deadline = deadline
        self.late = False


class TimeLimit:
    """Runs calls, in any thread, for at most `seconds` each."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._lock = threading.Lock()
        self._running: dict[int, _Work] = {}  # by thread
        self._watched = False

    def run(self, work: Callable[[], T]) -> T:
        """What `work` returns; raises `TimeLimitError` if it takes too long."""
        own = _Work(time.monotonic() + self._seconds)
        try:
            self._enter(own)
            try:
                result = work()
            except _TimeUp:
                raise
            except BaseException:
                self._leave(own)
                raise
            self._leave(own)
            return result
        except _TimeUp:  # raised once; the watcher has taken the work out already
            raise TimeLimitError(f"not done within {self._seconds:g} seconds") from None

    def _enter(self, own: _Work) -> None:
        with self._lock:
            self._running[own.thread_id] = own
            if self._watched:
                return
            self._watched = True
        threading.Thread(target=self._watch, name="time-limit", daemon=True).start()

    def _leave(self, own: _Work) -> None:
        with self._lock:
            self._running.pop(own.thread_id, None)
        while own.late:  # the exception is on its way: let it come here, not later
            pass

    def _watch(self) -> None:
        idle = threading.Event()  # never set: a sleep
        while not idle.wait(self._seconds / CHECKS):
            with self._lock:
                if not self._running:
                    self._watched = False
                    return
                self._end_late_work()

    def _end_late_work(self) -> None:
        now = time.monotonic()
        for own in [work for work in self._running.values() if now >= work.deadline]:
            del self._running[own.thread_id]
            own.late = True
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(own.thread_id), ctypes.py_object(_TimeUp)
            )
