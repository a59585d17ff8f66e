"""Answers on their way to clients: the text of each choice, and how much of it the client has not read yet.

A `Choice` is one prompt of one HTTP request: it takes the tokens that the core sends (as the shell's `TokenSink`),
turns them into text, and looks for stop strings. The `ResponseStream` joins the choices of one HTTP request: its
choices put `TextDelta`s in, the one task that writes to the client takes them out. Everything runs on the event loop,
so there are no locks. The JSON of a piece is made in `openai_objects`.

The bound: pieces that were not yet taken and those whose write has not returned may add up to `backlog_bytes_max`;
beyond it the answer is cut, so that a slow reader costs no memory. A burst is allowed to exceed the bound unless a
write to this client is already blocked; while it is written it does not count. Nor does the echo of a prompt, whose
text is there once for all choices: those of many come one after the other, faster than anybody reads. All streams
together are bounded by `client_connections`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

from router.core.effects import Outcome, RequestAborted, RequestFailed, Usage
from router.openai.answers.logprob_objects import TokenEntry
from router.parsers.answer_deltas import AnswerDelta, AnswerParser
from router.parsers.answer_parser import ThoughtTokens
from router.text.detokenizer import Detokenizer
from router.text.stop_strings import StopStrings
from shared.primitives.errors import InvariantError
from shared.wire.sampled import Logprobs

PIECE_BYTES = 256  # what one piece costs on the wire and in memory beside its text
ENTRY_BYTES = 128  # … and a token with its logprob


@dataclass(slots=True)
class TextDelta:
    """New text of one choice; with `finish_reason` the last of it."""

    index: int
    text: str
    finish_reason: Literal["length", "stop", "tool_calls"] | None = None
    stop_reason: str | int | None = None  # the stop string or stop token id that was found
    token_ids: tuple[int, ...] = ()  # that came with it, if they were asked for
    entries: tuple[TokenEntry, ...] = ()  # of these tokens, if logprobs were asked for
    reasoning: str = ""  # thoughts, where they are told apart
    calls: tuple[AnswerDelta, ...] = ()  # names of tools, and pieces of their arguments
    tokens: int = 0  # of the choice, with those of this piece
    size_bytes: int = 0  # what it takes while nobody reads it, at most; counted when it is put in
    echo: bool = False  # the text of a prompt

    @property
    def says_nothing(self) -> bool:
        """Whether it says no more than that tokens have come: they show nothing, or it is not known yet what."""
        return not (
            self.text
            or self.reasoning
            or self.calls
            or self.entries
            or self.token_ids
            or self.finish_reason is not None
        )


class ResponseStream:
    """The text of the choices of one HTTP request that was not yet written.

    `on_abandon` is called once when the client will not read it; `cut` means that its unread backlog was too large.
    """

    def __init__(self, choices: int, backlog_bytes_max: int, on_abandon: Callable[[], None]):
        self.failure: RequestFailed | None = None
        self.ordered = False  # the failure is the router's own end, and none of the request
        self.abandoned = False
        self.cut = False
        self.usage: dict[int, Usage] = {}  # of the choices that are complete
        self.reasoning_tokens = 0  # of all of them
        self._choices = choices
        self._backlog_bytes_max = backlog_bytes_max
        self._allowed_bytes = backlog_bytes_max  # of backlog, with the burst that is being written
        self._on_abandon = on_abandon
        self._pieces: list[TextDelta] = []
        self.backlog_bytes = 0  # of pieces that the client's connection has not taken
        self._echo_bytes = 0  # of them those of prompts
        self._writing = False  # pieces were taken, and their write has not returned
        self._changed = asyncio.Event()
        # one for many waits: to set one costs more than to wait
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_at = math.inf  # when the wait under way has been long enough

    @property
    def complete(self) -> bool:
        """Whether nothing more will come."""
        return self.failure is not None or self.abandoned or len(self.usage) == self._choices

    def put(self, piece: TextDelta) -> None:
        """Add a piece, or cut the answer if the client has left too much unread."""
        if self.abandoned:
            return
        self._pieces.append(piece)
        piece.size_bytes = _piece_bytes(piece)
        self.backlog_bytes += piece.size_bytes
        self._echo_bytes += piece.size_bytes if piece.echo else 0
        self._changed.set()
        if self._writing and self.backlog_bytes - self._echo_bytes > self._allowed_bytes:
            self.cut = True
            self.abandon()

    def fail(self, failure: RequestFailed, *, ordered: bool = False) -> None:
        """End the answer with an error; the first one counts."""
        if self.failure is None:
            self.failure, self.ordered = failure, ordered
        self._changed.set()

    def end(self, index: int, usage: Usage, reasoning_tokens: int = 0) -> None:
        """Choice `index` is complete; so many of its tokens were thoughts."""
        self.usage[index] = usage
        self.reasoning_tokens += reasoning_tokens
        self._changed.set()

    def abandon(self) -> None:
        """The client does not read this any more; a no-op once it is complete."""
        if self.complete:
            return
        self.abandoned = True
        self._pieces.clear()
        self._changed.set()
        self._on_abandon()

    async def take(self, silence_seconds: float | None) -> list[TextDelta]:
        """All pieces since the last call; waits for one or the end, empty after `silence_seconds`."""
        if not self._pieces and not self.complete:
            if silence_seconds is not None:
                self._set_alarm(silence_seconds)
            await self._changed.wait()
            self._alarm_at = math.inf
        self._changed.clear()
        pieces, self._pieces = self._pieces, []
        self._writing = True
        unread = self.backlog_bytes - self._echo_bytes
        self._allowed_bytes = self._backlog_bytes_max + (unread if unread > self._backlog_bytes_max else 0)
        return pieces

    def written(self, pieces: list[TextDelta], *, more: bool = False) -> None:
        """The client's connection has taken these pieces; of those that were taken together there are `more`."""
        for piece in pieces:
            self.backlog_bytes -= piece.size_bytes
            self._echo_bytes -= piece.size_bytes if piece.echo else 0
        self._writing = more

    def close(self) -> None:
        """End the wait: no one takes a delta any more."""
        if self._alarm is not None:
            self._alarm.cancel()

    def _set_alarm(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        self._alarm_at = loop.time() + seconds
        if self._alarm is None:
            self._alarm = loop.call_at(self._alarm_at, self._ring, loop)

    def _ring(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wake the wait that has been long enough; ring again for one that began later."""
        self._alarm = None
        if self._alarm_at <= loop.time():
            self._changed.set()
        elif self._alarm_at < math.inf:
            self._alarm = loop.call_at(self._alarm_at, self._ring, loop)


def _piece_bytes(piece: TextDelta) -> int:
    # A character has at most four bytes.
    size = PIECE_BYTES + 4 * (len(piece.text) + len(piece.reasoning)) + 8 * len(piece.token_ids)
    if piece.entries:
        for entry in piece.entries:
            size += ENTRY_BYTES * (1 + (len(entry.logprobs.top) if entry.logprobs else 0))
    for call in piece.calls:
        size += PIECE_BYTES + 4 * len(call.text)
    return size


class Choice:
    """One prompt's output. `stop` is called once, when a stop string was found."""

    def __init__(
        self,
        index: int,
        answer: ResponseStream,
        detokenizer: Detokenizer,
        stop_strings: StopStrings,
        stop: Callable[[], None],
        *,
        stop_token_ids: Collection[int] = (),
        min_tokens: int = 0,
        with_token_ids: bool = False,
        parser: AnswerParser | None = None,
        thoughts: ThoughtTokens | None = None,
        shows_thoughts: bool = True,
        begins_at: int = 0,
    ):
        """`min_tokens`: no stop string that ends within so many counts. `thoughts` counts those of `parser`.

        `begins_at`: characters of the text that come before the output.
        """
        self._index = index
        self._answer = answer
        self._detokenizer = detokenizer
        self._stop_strings = stop_strings
        self._stop = stop
        self._stopped = False
        self._stop_token_ids = stop_token_ids
        self._min_tokens = min_tokens
        self._with_token_ids = with_token_ids
        self._last: int | None = None
        self._tokens = 0  # that came so far, up to the stop string
        self._chars = begins_at  # of the text so far, counted where logprobs are asked for
        self._parser = parser
        self._thoughts = thoughts
        self._shows_thoughts = shows_thoughts

    def tokens(self, token_ids: tuple[int, ...], logprobs: Logprobs) -> None:
        """New tokens of this choice; ignored after a stop string.

        The first are told of though they show nothing, as thoughts that are left out: an answer has begun with them.
        """
        if self._stopped:
            return
        is_first = not self._tokens
        self._last = token_ids[-1]
        texts = [self._detokenizer.push((token_id,)) for token_id in token_ids]
        delta, taken = self._read(texts)
        delta.tokens = self._tokens
        delta.token_ids = token_ids[:taken] if self._with_token_ids else ()
        if logprobs:
            delta.entries = self._entries(token_ids, logprobs, texts)[:taken]
        if is_first or not delta.says_nothing:
            self._answer.put(delta)
        if self._stopped:
            self._stop()

    def scored(self, logprobs: Logprobs) -> None:
        """A `EchoChoice` takes what is known of a prompt, if it was asked for."""
        raise InvariantError(f"choice {self._index} got {len(logprobs)} scores that nobody asked for")

    def _read(self, texts: list[str]) -> tuple[TextDelta, int]:
        """What passes of the texts of new tokens, and how many of these belong to the answer.

        How tokens fall together into messages is chance, so those behind a stop string do not, though they have come.
        """
        if len(texts) == 1 or not self._stop_strings:
            self._tokens += len(texts)
            return self._passed(texts), len(texts)
        whole, taken, calls = TextDelta(self._index, ""), 0, list[AnswerDelta]()
        while taken < len(texts) and not self._stopped:
            self._tokens += 1
            delta = self._passed(texts[taken : taken + 1])
            whole.text += delta.text
            whole.reasoning += delta.reasoning
            calls += delta.calls
            taken += 1
        whole.calls = _joined(calls)
        return whole, taken

    def _passed(self, texts: list[str]) -> TextDelta:
        """What passes of new text; each token's is one of `texts`."""
        if self._thoughts is not None:
            return self._parsed(self._thoughts.push(texts))
        new = "".join(texts)
        return self._text(new) if self._parser is None else self._parsed(self._parser.push(new))

    def _entries(
        self, token_ids: tuple[int, ...], logprobs: Logprobs, texts: list[str]
    ) -> tuple[TokenEntry, ...]:
        """Each token with its place in the text."""
        entries = []
        for token_id, own, text in zip(token_ids, logprobs, texts, strict=True):
            entries.append(TokenEntry(token_id, self._chars, own))
            self._chars += len(text)
        return tuple(entries)

    def ended(self, outcome: Outcome) -> None:
        """The core has ended this choice."""
        if isinstance(outcome, RequestFailed):
            self._answer.fail(outcome)
        elif not isinstance(outcome, RequestAborted):
            last = TextDelta(self._index, "") if self._stopped else self._rest()
            last.finish_reason = "stop" if self._stopped else outcome.reason
            if last.finish_reason == "stop" and self._parser and self._parser.calls:
                last.finish_reason = "tool_calls"
            last.stop_reason = self._stop_reason()
            usage = outcome.usage
            if self._stopped:
                usage = replace(usage, completion_tokens=self._tokens)
            last.tokens = usage.completion_tokens
            self._answer.put(last)
            self._answer.end(self._index, usage, self._thoughts.count if self._thoughts else 0)

    def _stop_reason(self) -> str | int | None:
        if self._stopped:
            return self._stop_strings.found
        return self._last if self._last in self._stop_token_ids else None

    def _text(self, text: str) -> TextDelta:
        """What passes of a text without marks."""
        return TextDelta(self._index, self._up_to_stop(text))

    def _up_to_stop(self, text: str) -> str:
        text, self._stopped = self._stop_strings.push(text, may_end=self._tokens > self._min_tokens)
        return text

    def _parsed(self, parts: list[AnswerDelta]) -> TextDelta:
        """Delta of a text that was parsed into `parts`; stop strings are looked for in its content."""
        delta, calls = TextDelta(self._index, ""), []
        for part in parts:
            if part.kind == "content":
                delta.text += self._up_to_stop(part.text)
                if self._stopped:
                    break
            elif part.kind != "reasoning":
                calls.append(part)
            elif self._shows_thoughts:
                delta.reasoning += part.text
        delta.calls = _joined(calls)
        return delta

    def _rest(self) -> TextDelta:
        text = self._detokenizer.finish()
        if self._parser is None:
            delta = self._text(text)
        elif self._thoughts is None:
            delta = self._parsed(self._parser.push(text) + self._parser.finish())
        else:
            delta = self._parsed(self._thoughts.finish(text))
        if not self._stopped:
            delta.text += self._stop_strings.finish()
        return delta


def _joined(calls: list[AnswerDelta]) -> tuple[AnswerDelta, ...]:
    """With what follows in one call's arguments, or in its input, as one."""
    if len(calls) < 2:
        return tuple(calls)
    joined = []
    for (kind, call), parts in groupby(calls, key=lambda part: (part.kind, part.call)):
        joined.append(AnswerDelta(kind, "".join(part.text for part in parts), call))
    return tuple(joined)
