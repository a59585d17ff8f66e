"""From text to token ids: the model's tokenizer and its chat template.

Only `tokenizer_file` and the readers of answers (`answer_formats`, `answer_parser`) import transformers. This one knows
the model folder (tokenizer, chat template, config.json) and neither HTTP nor requests. Chats are rendered by
`chat_template`, and `control_tokens` keeps what users typed from becoming one. `router.text.detokenizer` goes back from
ids to text.

Encoding is bounded: a long text is encoded in slices that `split_points` finds, and no further than a number of tokens.

transformers imports torch wherever it is installed, which costs a router seconds and half a gigabyte for nothing.
`hide_torch`, called before the first load, hides torch from this process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

from router.parsers.answer_formats import GUARD, ReasoningParser, ToolCallParser, choose_format
from router.parsers.answer_parser import AnswerFormatReader
from router.text.chat_template import PLAIN_CHAT, ChatOptions, ChatTemplate, Message, TimeLimit
from router.text.control_tokens import ControlTokens
from router.text.model_folder import read_context_len, read_eos_token_ids, token_ids
from router.text.split_points import NoSplitPointError, find_split_points
from router.text.tokenizer_file import load_tokenizer
from shared.limits.model_files import read_config
from shared.primitives.errors import ModelError

CHARS_PER_TOKEN = 8  # of one slice; ordinary text has 3 to 5


class Decoder(Protocol):
    """What turns token ids into text: the side of `Tokenizer` that `detokenizer` needs."""

    def decode(self, token_ids: Sequence[int]) -> str: ...


def hide_torch() -> None:
    """Make torch impossible to import in this process, and transformers silent about its absence."""
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # requests are parallel already
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a router reads a folder, never the network


class TooLongError(Exception):
    """A text has more tokens than asked for, or cannot be cut where that would have to be found out."""


class Tokenizer:
    """The tokenizer of one model folder. All methods may be called from any thread."""

    def __init__(
        self,
        folder: Path,
        template_seconds_max: float,
        tool_call_parser: ToolCallParser = "auto",
        reasoning_parser: ReasoningParser = "auto",
        chat_template: Path | None = None,
    ):
        """Load `folder`, chats by the file `chat_template` if given; raises `ModelError` naming what is broken."""
        config = read_config(folder)
        tokenizer = load_tokenizer(folder, chat_template)
        self._backend = tokenizer.backend_tokenizer
        self._template = ChatTemplate(tokenizer, TimeLimit(template_seconds_max))
        self._info = {
            "tokenizer_class": type(tokenizer).__name__,
            **tokenizer.special_tokens_map,
            "chat_template": tokenizer.chat_template,
        }
        self.answers = AnswerFormatReader(choose_format(tool_call_parser, reasoning_parser, tokenizer))
        self._control = ControlTokens(self._backend, self._template)
        added = self._backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(
            token_id for token_id, token in added.items() if token.special
        ) | frozenset(tokenizer.all_special_ids)
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        self.tokens = max(vocabulary.values()) + 1  # added ones are among them
        self.vocab_size = int(config.get("vocab_size") or 0) or self.tokens  # of the model
        self.longest_token_chars = max(map(len, vocabulary))
        self.context_len = read_context_len(config)  # 0: the folder does not say
        self.eos_token_ids = read_eos_token_ids(folder, config) | token_ids(tokenizer.eos_token_id)
        texts = self._backend.decode_batch([[i] for i in vocabulary.values() if i not in added])
        self._split_points = find_split_points(
            self._encode_once, texts, [token.content for token in added.values()]
        )
        self._before, self._behind = self._frame()
        self._spelling = _SpellingSpecials(self._backend)
        found = self.answers.format
        self._answers = _GuardingMarks(self._spelling, found.mark_ids) if found.guard else self._spelling
        self._numbers = list(range(max(self.vocab_size + 1, self.tokens)))

    @property
    def info(self) -> dict[str, Any]:
        """What a client needs to render and count chats by itself, named as in `tokenizer_config.json`."""
        return self._info

    @property
    def has_chat_template(self) -> bool:
        return self._template.exists

    @property
    def template_fault(self) -> str | None:
        """Why the chat template is no Jinja, if it is not."""
        return self._template.fault

    def as_json(self) -> str:
        """What `tokenizers` reads and writes: some megabytes."""
        return str(self._backend.to_str())

    @property
    def shows_tools(self) -> bool:
        """Whether the chat template shows a model its tools."""
        return self._template.exists and self._template.shows_tools

    @property
    def takes_late_system(self) -> bool:
        """Whether the chat template shows system messages behind others."""
        return self._template.exists and self._template.takes_late_system

    @property
    def variables_read(self) -> frozenset[str]:
        """Variables about thoughts that the chat template looks at; see `ChatTemplate`."""
        return self._template.variables_read if self._template.exists else frozenset()

    def marks(self, special_tokens: frozenset[str] | None) -> frozenset[int]:
        """The ids of special tokens that a text needs; None: of all but those that end it."""
        if special_tokens is None:
            return self.special_token_ids - self.eos_token_ids
        found = (self._backend.token_to_id(token) for token in special_tokens)
        return frozenset(token_id for token_id in found if token_id is not None)

    @property
    def turn_ends(self) -> tuple[int, ...]:
        """Tokens that end an answer of a chat beside `eos_token_ids`, by the model's format."""
        ids = self.answers.format.mark_ids
        ends = {ids[mark] for mark in self.answers.format.ends if mark in ids}
        return tuple(sorted(ends - self.eos_token_ids))

    @property
    def reserved_variables(self) -> frozenset[str]:
        """Names of the chat template's variables that are not a client's to set."""
        return self._template.reserved

    def encode(
        self, text: str, add_special_tokens: bool = True, tokens_max: int | None = None
    ) -> tuple[int, ...]:
        """Token ids of `text`; raises `TooLongError` as soon as there are more than `tokens_max`.

        Memory beside the ids is bounded if `tokens_max` is given: 54 MiB for any text.
        """
        ids = self._encode(self._backend, text, tokens_max)
        return (*self._before, *ids, *self._behind) if add_special_tokens else tuple(ids)

    def encode_chat(
        self,
        messages: Sequence[Message],
        options: ChatOptions = PLAIN_CHAT,
        tokens_max: int | None = None,
        allow_control_tokens: bool = False,
    ) -> tuple[int, ...]:
        """Token ids of a chat, rendered with the model's template; raises `TooLongError` as `encode` does.

        Raises `RequestError` if the template refuses the chat. What clients send is text, whatever it spells, unless
        `allow_control_tokens`.
        """

        def encode(backend: Any, text: str) -> list[int]:
            return self._encode(backend, text, tokens_max)

        if allow_control_tokens or not self._control.typed_in(messages, options):
            return tuple(encode(self._backend, self._template.render(messages, options)))
        return tuple(self._control.encode(messages, options, encode))

    def compact(self, token_ids: Iterable[int]) -> tuple[int, ...]:
        """Store ids of the vocabulary in 8 bytes each: all prompts share one object for a number."""
        return tuple(map(self._numbers.__getitem__, token_ids))

    def _encode(self, backend: Any, text: str, tokens_max: int | None) -> list[int]:
        """Without the special tokens around a text."""
        if tokens_max is None:
            return self._encode_once(text, backend)
        ids: list[int] = []
        try:
            for part in self._split_points.slices(text, CHARS_PER_TOKEN * tokens_max):
                ids += self._encode_once(part, backend)
                if len(ids) > tokens_max:
                    raise TooLongError(f"more than {tokens_max} tokens, which is the model's context")
        except NoSplitPointError as error:
            uncut = f"more than {error.chars} characters without a space or line break at which it can be cut"
            raise TooLongError(f"{uncut}, too many to be tokenized at once") from None
        return ids

    def _encode_once(self, text: str, backend: Any = None) -> list[int]:
        encoding = (backend or self._backend).encode_batch_fast([text], add_special_tokens=False)[0]
        ids: list[int] = encoding.ids
        return ids

    def _frame(self) -> tuple[list[int], list[int]]:
        """The special tokens that the tokenizer puts before and behind a text."""
        plain, framed = self._encode_once("a"), self._backend.encode("a").ids
        for at in range(len(framed) - len(plain) + 1):
            if framed[at : at + len(plain)] == plain:
                return framed[:at], framed[at + len(plain) :]
        raise ModelError("the tokenizer changes a text when it puts special tokens around it: not supported")

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """The vocabulary's own spelling of each id."""
        return [self._backend.id_to_token(token_id) or "" for token_id in token_ids]

    @property
    def spelling_specials(self) -> Decoder:
        """Decoder that spells out special tokens."""
        return self._spelling

    @property
    def of_answers(self) -> Decoder:
        """Decoder of texts that the parser of this model's answers reads: as `spelling_specials`, and marks guarded."""
        return self._answers

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids` without special tokens."""
        return str(self._backend.decode(token_ids, skip_special_tokens=True))

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids`, special tokens spelled out."""
        return self._spelling.decode(token_ids)


class _SpellingSpecials:
    """Decodes with special tokens spelled out."""

    def __init__(self, backend: Any):
        self._backend = backend

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._backend.decode(token_ids, skip_special_tokens=False))


class _GuardingMarks:
    """Decodes with special tokens spelled out, and a guard before marks, which is nowhere else."""

    def __init__(self, spelling: Decoder, mark_ids: Mapping[str, int]):
        self._spelling = spelling
        self._marks = {token_id: GUARD + mark for mark, token_id in mark_ids.items()}

    def decode(self, token_ids: Sequence[int]) -> str:
        if self._marks.keys().isdisjoint(token_ids):
            return self._text(token_ids)
        runs = groupby(token_ids, self._marks.get)
        return "".join(self._text(list(ids)) if mark is None else mark * len(list(ids)) for mark, ids in runs)

    def _text(self, token_ids: Sequence[int]) -> str:
        return self._spelling.decode(token_ids).replace(GUARD, "\N{REPLACEMENT CHARACTER}")
