"""What an answer will hold in the router's memory: reckoned from the fields of its request, and counted as it comes.

    prompts, echoed or scored       tokens * (1 + the likeliest) * PACKED_BYTES, once for all `n` choices of a prompt
        shown by several choices     and the JSON of the largest, which is made once and kept while they are written
    outputs that are not streamed    choices * max_tokens * (1 + the likeliest) * PACKED_BYTES, where logprobs are asked
    fields that the answer repeats   their JSON (/v1/responses: instructions, metadata, tools, …)
    text and token ids               as they come: nobody knows how long an answer will be

A stream holds no output: what it has written is gone. Only /v1/responses repeats in its last events what it has
reported of tokens, streamed or not.

One answer may hold a quarter of `answers_bytes_max`, all answers of one client half of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.access.byte_budget import Holding
from router.openai.answers.logprob_objects import ENTRY_BYTES, PACK_BYTES, PACKED_BYTES
from shared.primitives.errors import RequestError

ANSWER_SHARE = 4  # the part of the budget that one answer may hold: a quarter
UNSAID_TOKENS_MAX = (
    2048  # reckoned of an output whose request sets no limit; what comes beyond is counted as it comes
)
FREE_BYTES = 32 << 10  # that an answer may hold uncounted: so short ones never meet a full budget
STEP_BYTES = 64 << 10  # by which an answer's part of the budget grows
ECHO_BYTES = 48  # of the JSON of a logprob of an echoed token
SCORED_BYTES = 96  # … in prompt_logprobs, which name rank and text as well
EVENT_BYTES = (
    192  # … in an answer of /v1/responses, which lists the bytes of a token, and in its largest event
)
TEXT_BYTES = 24  # of an echoed token: its text, and how long that is


@dataclass(frozen=True, slots=True)
class AskedAnswer:
    """What decides how much an answer will hold. A number of likeliest tokens of -1: logprobs were not asked for."""

    prompts: Sequence[int]  # tokens of each
    choices: int  # of each prompt
    output_tokens: int  # of a choice, at most
    limited: bool  # whether the request names that number
    likeliest: int  # with each token of the output
    echoes: bool
    echo_likeliest: int  # with each token of an echo
    scored_likeliest: int  # with each token of `prompt_logprobs`
    stream: bool
    typed: bool  # an answer of /v1/responses
    repeated_bytes: int = 0  # of fields of the request that the answer repeats

    def prompt_bytes(self) -> int:
        """Bytes of what is reported about the prompts."""
        likeliest = max(self.echo_likeliest, self.scored_likeliest)
        a_token = TEXT_BYTES if self.echoes else 0
        shown = a_prompt = 0
        if likeliest >= 0:
            a_token += ENTRY_BYTES + (1 + likeliest) * PACKED_BYTES
            a_prompt = PACK_BYTES
            if self.choices > 1:
                shown = (1 + self.echo_likeliest) * ECHO_BYTES + (1 + self.scored_likeliest) * SCORED_BYTES
        return sum(self.prompts) * a_token + len(self.prompts) * a_prompt + max(self.prompts) * shown

    def output_bytes(self) -> int:
        """Bytes of what is reported about the tokens of all outputs."""
        if self.likeliest < 0 or (self.stream and not self.typed):
            return 0
        tokens = self.output_tokens if self.limited else min(self.output_tokens, UNSAID_TOKENS_MAX)
        a_token = (1 + self.likeliest) * (EVENT_BYTES if self.typed else PACKED_BYTES)
        a_token += ENTRY_BYTES + PACK_BYTES
        return len(self.prompts) * self.choices * tokens * a_token

    def check(self, most: int) -> None:
        """Raise `RequestError` (400) if it will hold more than `most`."""
        found = self.prompt_bytes() + self.output_bytes()
        if found > most:
            raise RequestError(self._too_large(found, most), param=self._dearest(), code="answer_too_large")

    def _dearest(self) -> str | None:
        if self.prompt_bytes() >= self.output_bytes():
            return "prompt_logprobs" if self.scored_likeliest >= self.echo_likeliest else "echo"
        return "max_tokens"

    def _too_large(self, found: int, most: int) -> str:
        figures = [f"{len(self.prompts)} prompts of {sum(self.prompts)} tokens", f"n {self.choices}"]
        if self.scored_likeliest >= 0:
            figures.append(f"prompt_logprobs {self.scored_likeliest}")
        if self.echoes:
            figures.append("echo")
        if self.likeliest >= 0:
            figures += [f"{self.likeliest} likeliest tokens", f"max_tokens {self.output_tokens}"]
        return (
            f"the answer would hold {_mib(found)} of this router's memory, and one may hold {_mib(most)}:"
            f" {', '.join(figures)}; ask for less of one of them, or in several requests"
        )


class HeldBytes:
    """What one answer holds of the budget. It grows, and is given back as a whole by the context of `Holding`."""

    def __init__(self, holding: Holding, asked: AskedAnswer, most: int):
        """Raises `OverloadedError` if the budget has no room for what is reckoned; `most` bounds what comes.

        Of what the answer repeats, only what exceeds FREE_BYTES takes room.
        """
        prompts, outputs = asked.prompt_bytes(), asked.output_bytes()
        holding.add(prompts + outputs)
        self._holding = holding
        self._most = most
        self._granted = prompts + max(outputs, FREE_BYTES)
        self._grown = prompts
        self.grow(asked.repeated_bytes)
        self._begun = self._grown

    def grow(self, more: int) -> None:
        """Count `more` bytes as held. Raises `RequestError` beyond `most` (400), or if the budget has no room (429)."""
        assert more >= 0, more
        self._grown += more
        if self._grown > self._granted:
            self._take()

    def reach(self, output_bytes: int) -> None:
        """Count up to `output_bytes` of the output as held. Raises as `grow` does."""
        self.grow(self._begun + output_bytes - self._grown)

    def _take(self) -> None:
        if self._grown > self._most:
            raise RequestError(
                f"the answer holds more than {_mib(self._most)} of this router's memory, which is all that one may:"
                " set max_tokens, ask for fewer choices or logprobs, or stream",
                code="answer_too_large",
            )
        step = max(STEP_BYTES, self._grown - self._granted)
        self._holding.add(step)
        self._granted += step


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB"
