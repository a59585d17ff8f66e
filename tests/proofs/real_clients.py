"""What clients of real processes ask, get and wait for: one record a request, and workers that leave beside them.

A prompt is a piece of the project's own documentation. Half of the requests are greedy, half are sampled with a seed:
an answer is compared by its tokens with another of the same request.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from time import monotonic
from typing import Any

import openai
from tokenizers import Tokenizer

from tests.integration.deployments.cut_model import cut_model
from tests.integration.deployments.deployment import LocalDeployment
from tests.integration.deployments.running import ROOT


@dataclass(slots=True)
class ClientRecord:
    """A request and what its client saw of it."""

    number: int
    prompt: list[int]
    tokens_max: int
    rid: str = ""  # the router's name for it, with its first token
    began_at: float = 0.0
    ended_at: float = 0.0
    first: float | None = None  # seconds until the first token
    silence: float = 0.0  # seconds, the longest in which nothing came, that before the first token included
    pause: float = 0.0  # seconds, the longest between two tokens
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    status: int = 200
    error: str = ""  # what the answer says of its failure
    hung: bool = False  # its client had enough

    @property
    def params(self) -> dict[str, Any]:
        """How it is sampled: every other one is greedy."""
        sampled = {"temperature": 1.0, "seed": self.number} if self.number % 2 else {"temperature": 0}
        return {"model": "smollm2", "max_tokens": self.tokens_max, **sampled}

    @property
    def completed(self) -> bool:
        """Whether it has all its tokens and says so."""
        return self.finish_reason == "length" and len(self.token_ids) == self.tokens_max

    @property
    def refused(self) -> bool:
        """Whether it was answered with an error at once, not within a stream."""
        return self.status != 200

    @property
    def broken(self) -> bool:
        """Whether its answer of 200 ended without a finish reason and without an error that says why."""
        return self.status == 200 and not (self.hung or self.finish_reason or self.error)

    def again(self) -> ClientRecord:
        """The same request, not asked yet."""
        return ClientRecord(self.number, self.prompt, self.tokens_max)


async def follow(client: openai.AsyncOpenAI, record: ClientRecord, patience_seconds: float) -> None:
    """Ask, and read to the end."""
    record.began_at = monotonic()
    try:
        async with asyncio.timeout(patience_seconds):
            await _read(client, record)
    except TimeoutError:
        record.hung = True
    except openai.APIStatusError as error:
        record.status, record.error = error.status_code, error.message
    except openai.APIError as error:  # within the stream, or the connection's
        record.error = error.message or repr(error)
    record.ended_at = monotonic()


async def _read(client: openai.AsyncOpenAI, record: ClientRecord) -> None:
    last = record.began_at
    extra = {"ignore_eos": True, "return_token_ids": True}
    async for chunk in await client.completions.create(
        prompt=record.prompt, stream=True, extra_body=extra, **record.params
    ):
        record.rid = chunk.id
        for choice in chunk.choices:
            now = monotonic()
            record.finish_reason = choice.finish_reason or record.finish_reason
            if token_ids := (choice.model_extra or {}).get("token_ids"):
                if record.first is None:
                    record.first = now - record.began_at
                else:
                    record.pause = max(record.pause, now - last)
                record.token_ids += token_ids
            record.silence = max(record.silence, now - last)
            last = now


def different_tokens(records: Iterable[ClientRecord], undisturbed: Iterable[ClientRecord]) -> int:
    """Places at which a token is not the undisturbed one; what an answer that has failed lacks is no difference."""
    return sum(
        got != wanted
        for record, other in zip(records, undisturbed, strict=True)
        for got, wanted in zip(record.token_ids, other.token_ids, strict=False)
    )


@cache
def _story() -> list[int]:
    tokenizer = Tokenizer.from_file(str(cut_model() / "tokenizer.json"))
    ids: list[int] = tokenizer.encode((ROOT / "docs" / "architecture.md").read_text()).ids
    return ids


def words(rng: random.Random, length: tuple[int, int]) -> list[int]:
    """Some tokens of a text, at least and at most so many."""
    story, count = _story(), rng.randint(*length)
    start = rng.randrange(len(story) - count)
    return story[start : start + count]


def continued(running: LocalDeployment) -> dict[str, float]:
    """Attempts after the first, by what ended the one before, as the router counts them."""
    figures = running.metrics(running.processes("router")[0])
    name = "segue_continuations_total{cause="
    return {key.removeprefix(name)[:-1]: value for key, value in figures.items() if key.startswith(name)}
