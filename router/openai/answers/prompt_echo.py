"""Answers that repeat or score their prompt: `echo`, and `prompt_logprobs`, which a worker computes with the prompt.

A prompt is shown whole, before the first token of the answer. Its first token has no logprob: nothing stands before it.
However many choices a prompt has, it is scored for the first of them (see `sampling_group`) and kept once, packed.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from router.core.effects import Outcome, RequestCompleted
from router.openai.answers.logprob_objects import PackedList, TokenEntry
from router.openai.answers.response_stream import Choice, ResponseStream, TextDelta
from router.text.detokenizer import Detokenizer
from router.text.tokenizer import Tokenizer
from shared.primitives.errors import InvariantError
from shared.wire.sampled import Logprobs, TokenLogprobs


@dataclass(frozen=True, slots=True)
class EchoedText:
    """The text of a prompt, which begins the answer."""

    text: str = ""
    lengths: array[int] = field(default_factory=lambda: array("I"))  # characters that each token completes


@dataclass(frozen=True, slots=True, eq=False)
class PromptEcho:
    """A prompt that an answer repeats or scores; all its choices have this one."""

    token_ids: tuple[int, ...]
    echo: EchoedText | None  # None: no echo
    echo_top: int  # how many of the likeliest go with each echoed token; -1: no logprobs
    scored: bool  # `prompt_logprobs` was asked for
    keeps_output: bool  # else the answer is the prompt alone: `max_tokens: 0`
    choices: int  # that show it
    scores: PackedList[TokenLogprobs]  # of all tokens but the first, as they come

    @property
    def text(self) -> str:
        """What the answer begins with."""
        return self.echo.text if self.echo else ""

    def entries(self) -> Iterator[list[TokenEntry]]:
        """All tokens in their order, with all that is known of them, a batch at a time; of a scored prompt."""
        lengths = self.echo.lengths if self.echo else array("I", bytes(4 * len(self.token_ids)))
        yield [TokenEntry(self.token_ids[0], 0, None)]
        at, offset = 1, lengths[0]
        for batch in self.scores.batches():
            entries = []
            for score in batch:
                entries.append(TokenEntry(self.token_ids[at], offset, score))
                offset += lengths[at]
                at += 1
            yield entries
        if at != len(self.token_ids):
            raise InvariantError(f"{at} tokens of a prompt of {len(self.token_ids)} were scored")

    def echoed(self) -> Iterator[list[TokenEntry]]:
        """Entries as `entries` gives them, each with the likeliest that go with an echo."""
        for batch in self.entries():
            yield [
                TokenEntry(entry.token_id, entry.offset, _shortened(entry.logprobs, self.echo_top))
                for entry in batch
            ]


def echoed_text(token_ids: tuple[int, ...], tokenizer: Tokenizer) -> EchoedText:
    """The text of a prompt. For a thread that may take its time."""
    detokenizer = Detokenizer(tokenizer, tokenizer.special_token_ids)
    pieces = [detokenizer.push((token_id,)) for token_id in token_ids]
    pieces[-1] += detokenizer.finish()
    return EchoedText("".join(pieces), array("I", map(len, pieces)))


class EchoChoice:
    """A choice whose answer repeats or scores the prompt; the core's sink in its place.

    `streamed`: the text of an echo goes before.
    """

    def __init__(
        self, index: int, answer: ResponseStream, prompt: PromptEcho, choice: Choice, *, streamed: bool
    ):
        self._index = index
        self._answer = answer
        self._prompt = prompt
        self._choice = choice
        self._opens = streamed and bool(prompt.text)

    def scored(self, logprobs: Logprobs) -> None:
        """The next tokens of the prompt."""
        self._prompt.scores.add(logprobs)

    def tokens(self, token_ids: tuple[int, ...], logprobs: Logprobs) -> None:
        """New tokens of the choice: the prompt is complete."""
        if self._opens:
            self._opens = False
            self._answer.put(TextDelta(self._index, self._prompt.text, echo=True))
        if self._prompt.keeps_output:
            self._choice.tokens(token_ids, logprobs)

    def ended(self, outcome: Outcome) -> None:
        """The core has ended this choice. The token that was computed for an answer without one is not shown."""
        if isinstance(outcome, RequestCompleted) and not self._prompt.keeps_output:
            outcome = replace(outcome, usage=replace(outcome.usage, completion_tokens=0))
        self._choice.ended(outcome)


def _shortened(score: TokenLogprobs | None, top: int) -> TokenLogprobs | None:
    return score and TokenLogprobs(score.logprob, score.rank, score.top[:top])
