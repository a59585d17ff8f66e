"""The second turn of a chat, on the worker that has the first one and by way of prefill: `python -m
tests.benchmarks.second_turn`.

`segue up --prefill 1 --decode 1` with `local_prefill: always`; a request with `X-Segue-Local-Prefill: never` goes by
way of prefill all the same, so both ways are measured in turns, in one deployment. Each chat has a first turn and a
second one, which brings all that was said and some tokens more, both the same way. Other streams run beside them: what
they wait for a token is counted while second turns run, one figure for each way.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import sys
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from time import monotonic
from typing import Any

import openai

from tests.benchmarks.virtual_cluster.figures import quantile
from tests.integration.deployments.deployment import LocalDeployment, RoleConfigs, deployment
from tests.integration.deployments.streams import StreamedAnswer, client_of, complete

FIRST_TOKENS, ANSWER_TOKENS, FURTHER_TOKENS, SECOND_ANSWER_TOKENS = 512, 128, 30, 16
BESIDE_TOKENS = 2_000  # of each stream beside the chats
CONFIG: RoleConfigs = {
    "prefill": {"kvPages": 1_024},
    "decode": {"kvPages": 1_024},
    "router": {"localPrefill": "always"},
}
FLAGS = ("--prefill", "1", "--decode", "1", "--context-len", "4096")
WAYS: dict[str, dict[str, str]] = {"decode": {}, "prefill": {"X-Segue-Local-Prefill": "never"}}


@dataclass(slots=True)
class SeenTurns:
    """Seconds of one way."""

    first_tokens: list[float] = field(default_factory=list)  # of second turns
    gaps: list[float] = field(default_factory=list)  # of the other streams, while second turns ran


def _note(times: list[float]) -> None:
    times.append(monotonic())


@dataclass(slots=True)
class OtherStreams:
    """Streams beside the chats, and when each got something."""

    times: list[list[float]] = field(default_factory=list)

    async def run(self, client: openai.AsyncOpenAI, prompt: list[int]) -> None:
        """One stream after the other, until it is cancelled."""
        while True:
            times = list[float]()
            self.times.append(times)
            await complete(
                client,
                prompt,
                partial(_note, times),
                max_tokens=BESIDE_TOKENS,
                temperature=0,
                extra_body={"ignore_eos": True},
            )

    def gaps(self, begun: float, ended: float) -> list[float]:
        """Times between two tokens that end within these seconds."""
        return [
            after - before
            for times in self.times
            for before, after in itertools.pairwise(times)
            if begun < after <= ended
        ]


async def _turn(
    client: openai.AsyncOpenAI, prompt: list[int], tokens: int, headers: dict[str, str]
) -> tuple[StreamedAnswer, float]:
    """The answer, and the seconds until its first token."""
    times, sent = list[float](), monotonic()
    answer = await complete(
        client,
        prompt,
        partial(_note, times),
        max_tokens=tokens,
        temperature=0,
        extra_headers=headers,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    return answer, times[0] - sent


async def _chats(url: str, chats: int, beside: int, seed: int) -> tuple[dict[str, SeenTurns], int]:
    """What was seen of each way, and how many streams there were beside the chats."""
    rng = random.Random(seed)

    def words(count: int) -> list[int]:
        return [rng.randrange(1_000, 20_000) for _ in range(count)]

    seen, others = {way: SeenTurns() for way in WAYS}, OtherStreams()
    async with client_of(url) as client:
        running = [asyncio.create_task(others.run(client, words(40))) for _ in range(beside)]
        for chat in range(-1, chats):  # the first one of each way warms up, and does not count
            for way, headers in WAYS.items():
                prompt = words(FIRST_TOKENS)
                answer, _ = await _turn(client, prompt, ANSWER_TOKENS, headers)
                prompt = [*prompt, *answer.token_ids, *words(FURTHER_TOKENS)]
                begun = monotonic()
                _, seconds = await _turn(client, prompt, SECOND_ANSWER_TOKENS, headers)
                if chat >= 0:
                    seen[way].first_tokens.append(seconds)
                    seen[way].gaps += others.gaps(begun, monotonic())
        assert not any(task.done() for task in running), "a stream beside the chats has failed"
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    return seen, len(others.times)


def measured(running: LocalDeployment, chats: int, beside: int, seed: int) -> dict[str, Any]:
    """Figures by name; each way has computed as many prompts as it was asked to."""
    before = running.total("decode", "segue_local_prompts_total")
    seen, others = asyncio.run(_chats(running.url, chats, beside, seed))
    local = running.total("decode", "segue_local_prompts_total") - before
    assert local == others + 2 * (chats + 1), (local, others)
    figures: dict[str, Any] = {}
    for way, turns in seen.items():
        figures[f"{way}: second turn, TTFT p50"] = round(median(turns.first_tokens), 4)
        figures[f"{way}: others, ITL p50"] = round(median(turns.gaps), 4)
        figures[f"{way}: others, ITL p99"] = round(quantile(sorted(turns.gaps), 0.99) or 0.0, 4)
    for name in ("second turn, TTFT p50", "others, ITL p99"):
        figures[f"{name}, decode by prefill"] = round(
            figures[f"decode: {name}"] / figures[f"prefill: {name}"], 3
        )
    return figures


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--chats", type=int, default=10, help="chats of each way")
    parser.add_argument("--beside", type=int, default=4, help="streams beside them")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with deployment(*FLAGS, as_shipped=True, config=CONFIG) as running:
        for name, value in measured(running, options.chats, options.beside, options.seed).items():
            sys.stdout.write(f"{name:44} {value}\n")


if __name__ == "__main__":
    main()
