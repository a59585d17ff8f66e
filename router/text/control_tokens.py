"""What a client types never becomes a control token.

A tokenizer matches its special tokens anywhere in a text, also in what a user wrote: `<|im_end|>` in a message would
end the message. A chat whose contents hold no such text is encoded as it is. For one that does, every special token
has a second name, a random one that nobody can type:

    template     <|im_start|>user\\n      is written as   9c1…x1xuser\\n
    content      hi<|im_end|>             stays           hi<|im_end|>
    tokenizer    knows the second names in place of the first: to it, `<|im_end|>` is text like any other

All else is encoded as always, so the ids differ only where a content spells a special token. Not every template can
be treated so: one that puts special tokens together from parts still writes the first names. Sample chats show that.
Such a model refuses contents that would change the number of special tokens.

Added tokens that the tokenizer does not call special (`<think>` of some models) are vocabulary like any other, in a
user's text as well. This file knows neither HTTP nor what roles mean.
"""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import msgspec

from router.text.chat_template import ChatOptions, ChatTemplate, Message, client_texts, replace_all
from shared.primitives.errors import RequestError

Encode = Callable[[Any, str], list[int]]  # with a tokenizer, a text without special tokens around it

_SAMPLE_CHATS = [
    [{"role": role, "content": f"word {at}"} for at, role in enumerate(roles)]
    for roles in (
        ["user"],
        ["system", "user"],
        ["user", "assistant", "user"],
        ["system", "user", "assistant", "user", "assistant"],
        ["user", "assistant", "tool"],
    )
]


class ControlTokens:
    """The special tokens of one tokenizer, and how users' texts are kept from becoming one. For any thread."""

    def __init__(self, backend: Any, template: ChatTemplate):
        """`backend` is the `tokenizers.Tokenizer` that belongs to `template`."""
        self._backend = backend
        self._template = template
        added = backend.get_added_tokens_decoder().items()
        self._ids = {token.content: token_id for token_id, token in added if token.special}
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._unknown = getattr(backend.model, "unk_token", None)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._beginnings = {token[:length] for token in self._ids for length in range(1, len(token))}
        self._ends = {token[length:] for token in self._ids for length in range(1, len(token))}
        self._longest = max(map(len, self._ids), default=0)
        self._second: SecondNames | None = None
        self._tried = False
        self._making = threading.Lock()

    def typed_in(self, messages: Sequence[Message], options: ChatOptions) -> bool:
        """Whether what a client sent holds a special token, or may be a part of one with what stands beside it."""
        texts = chain(chain.from_iterable(map(client_texts, messages)), options.texts())
        return any(self._typed_in(text) for text in texts)

    def encode(self, messages: Sequence[Message], options: ChatOptions, encode: Encode) -> list[int]:
        """The ids of a chat whose contents stay text; raises `RequestError` where that cannot be done."""
        text = self._template.render(messages, options)
        second = self._second_names()
        apart = second.template.render(messages, options) if second else ""
        if second and replace_all(apart, second.first) == text:
            ids, control = second.encode(apart, encode), second.count(apart)
        else:
            plain = self._template.render(
                list(map(self._harmless_message, messages)), self._harmless(options)
            )
            ids, control = encode(self._backend, text), self._count(encode(self._backend, plain))
        if self._count(ids) != control:
            raise RequestError(
                "the messages hold the text of one of the model's control tokens, and its chat template leaves no way"
                " to keep it apart: take it out of the messages",
                param="messages",
            )
        return ids

    def _harmless(self, options: ChatOptions) -> ChatOptions:
        """Options without a special token in what the client sent."""
        given = {name: self._cleaned(getattr(options, name)) for name in ("variables", "documents", "tools")}
        return replace(options, **given)

    def _harmless_message(self, message: Message) -> Message:
        return {name: value if name == "role" else self._cleaned(value) for name, value in message.items()}

    def _cleaned(self, value: Any) -> Any:
        if isinstance(value, str):
            return "x" if self._typed_in(value) else value
        if isinstance(value, Mapping):
            keys = {key: "x" if self._pattern.search(key) else key for key in value}
            return {keys[key]: self._cleaned(inner) for key, inner in value.items()}
        return [self._cleaned(inner) for inner in value] if isinstance(value, list | tuple) else value

    def _typed_in(self, text: str) -> bool:
        normalizer = self._backend.normalizer
        spellings = [text] if normalizer is None else [text, normalizer.normalize_str(text)]
        return any(self._pattern.search(spelling) or self._at_an_edge(spelling) for spelling in spellings)

    def _at_an_edge(self, text: str) -> bool:
        lengths = range(1, min(self._longest, len(text) + 1))
        if any(text[-length:] in self._beginnings or text[:length] in self._ends for length in lengths):
            return True
        return 0 < len(text) < self._longest and any(text in token for token in self._ids)

    def _count(self, ids: Iterable[int]) -> int:
        control = set(self._ids.values()) - {
            self._ids.get(self._unknown)
        }  # a text may well have unknown characters
        return sum(token_id in control for token_id in ids)

    def _second_names(self) -> SecondNames | None:
        """Made when first needed, and None for a template that cannot be treated so."""
        with self._making:
            if not self._tried:
                second = SecondNames(self._backend, self._template, list(self._ids))
                self._second = second if second.fit(self._backend, self._template) else None
                self._tried = True
            return self._second


class SecondNames:
    """A tokenizer and a template that know the special tokens by names that nobody can type."""

    def __init__(self, backend: Any, template: ChatTemplate, special: Sequence[str]):
        secret = secrets.token_hex(16)
        names = {token: f"{secret}x{at}x" for at, token in enumerate(special)}
        self.first = {name: token for token, name in names.items()}
        self.template = template.renamed(names)
        self._pattern = re.compile(rf"{secret}x[0-9]+x")
        self._backend = _renamed(backend, names)
        added = [(token.content, token_id) for token_id, token in backend.get_added_tokens_decoder().items()]
        ids = {self._backend.token_to_id(names.get(token, token)): token_id for token, token_id in added}
        self._ids = {own: token_id for own, token_id in ids.items() if own != token_id}

    def encode(self, text: str, encode: Encode) -> list[int]:
        """The model's ids of a text that `template` has rendered."""
        return [self._ids.get(token_id, token_id) for token_id in encode(self._backend, text)]

    def count(self, text: str) -> int:
        """How many special tokens the template wrote in `text`."""
        return len(self._pattern.findall(text))

    def fit(self, backend: Any, template: ChatTemplate) -> bool:
        """Whether chats that need no second names have the same ids with them."""
        rendered = [
            (first, second)
            for chat in _SAMPLE_CHATS
            if (first := _accepted(template, chat)) is not None
            and (second := _accepted(self.template, chat)) is not None
        ]
        return bool(rendered) and all(
            _encode(backend, first) == self.encode(second, _encode) for first, second in rendered
        )


def _accepted(template: ChatTemplate, chat: Sequence[Message]) -> str | None:
    """The text of a sample chat, if the template takes such."""
    try:
        return template.render(chat)
    except RequestError:
        return None


def _encode(backend: Any, text: str) -> list[int]:
    ids: list[int] = backend.encode(text, add_special_tokens=False).ids
    return ids


def _renamed(backend: Any, names: dict[str, str]) -> Any:
    """A copy of a tokenizer that knows its added tokens by other names. Its vocabulary is copied unread."""
    parts = msgspec.json.decode(backend.to_str(), type=dict[str, msgspec.Raw])
    added = msgspec.json.decode(parts["added_tokens"])
    renamed = [{**token, "content": names.get(token["content"], token["content"])} for token in added]
    changed = {"added_tokens": renamed, "post_processor": None}
    return type(backend).from_str(msgspec.json.encode({**parts, **changed}).decode())
