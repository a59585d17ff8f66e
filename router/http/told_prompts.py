"""Answers that tell of their prompt: `echo`, and `prompt_logprobs`, which a worker computes with the prompt.

A prompt is told whole, before the first token of the answer. Its first token has no logprob: nothing stands before it.
"""

from __future__ import annotations

from dataclasses import dataclass

from router.core.effects import Outcome
from router.http.response_stream import Choice, ResponseStream, TextDelta, TokenEntry
from router.text.detokenizer import Detokenizer
from router.text.tokenizer import Tokenizer
from shared.sampled import Logprobs, TokenLogprobs


@dataclass(frozen=True, slots=True)
class ToldPrompt:
    """A prompt that an answer tells of."""

    token_ids: tuple[int, ...]
    pieces: tuple[str, ...]  # its text, which begins the answer: what each token completes; empty: no echo
    echo_top: int  # how many of the likeliest go with each echoed token; -1: no logprobs
    scored: bool  # `prompt_logprobs` was asked for
    keeps_output: bool  # else the answer is the prompt alone: `max_tokens: 0`

    @property
    def text(self) -> str:
        """What the answer begins with."""
        return "".join(self.pieces)


def echoed_pieces(token_ids: tuple[int, ...], tokenizer: Tokenizer) -> tuple[str, ...]:
    """The text of a prompt, by the token that completes each piece of it. For a thread that may take its time."""
    detokenizer = Detokenizer(tokenizer, tokenizer.special_token_ids)
    pieces = [detokenizer.push((token_id,)) for token_id in token_ids]
    return (*pieces[:-1], pieces[-1] + detokenizer.finish())


class ToldChoice:
    """A choice that begins with its prompt; the core's sink in its place."""

    def __init__(self, index: int, answer: ResponseStream, prompt: ToldPrompt, choice: Choice):
        self._index = index
        self._answer = answer
        self._prompt = prompt
        self._choice = choice
        self._logprobs: list[TokenLogprobs] = []
        self._told = False

    def scored(self, logprobs: Logprobs) -> None:
        """The next tokens of the prompt."""
        self._logprobs += logprobs

    def tokens(self, token_ids: tuple[int, ...], logprobs: Logprobs) -> None:
        """New tokens of the choice: the prompt is complete."""
        if not self._told:
            self._told = True
            self._answer.put(self._opening())
        if self._prompt.keeps_output:
            self._choice.tokens(token_ids, logprobs)

    def ended(self, outcome: Outcome) -> None:
        """The core has ended this choice."""
        self._choice.ended(outcome)

    def _opening(self) -> TextDelta:
        prompt, offset = self._prompt, 0
        scores: list[TokenLogprobs | None] = [None, *self._logprobs]
        delta = TextDelta(self._index, prompt.text)
        if prompt.scored:
            told = zip(prompt.token_ids, scores, strict=True)
            delta.prompt_entries = tuple(TokenEntry(token_id, 0, score) for token_id, score in told)
        if prompt.echo_top >= 0:
            entries = []
            for token_id, piece, score in zip(prompt.token_ids, prompt.pieces, scores, strict=True):
                entries.append(TokenEntry(token_id, offset, _shortened(score, prompt.echo_top)))
                offset += len(piece)
            delta.entries = tuple(entries)
        return delta


def _shortened(score: TokenLogprobs | None, top: int) -> TokenLogprobs | None:
    return score and TokenLogprobs(score.logprob, score.rank, score.top[:top])
