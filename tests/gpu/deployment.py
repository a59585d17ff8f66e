"""A whole deployment on one GPU, over HTTP: a prefill and a decode worker beside one worker that does both.

    python -m tests.gpu.deployment --model 0.6B                              a GPU; also 14B
    python -m tests.gpu.deployment --model tiny --device cuda-on-cpu --small

Weights are random, so answers are compared with each other alone: greedy ones of both shapes, token by token. A stream
whose decode worker is killed with SIGKILL has to go on. Figures are those of a client: the time to the first token, the
time between tokens, tokens a second.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import tempfile
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter

import openai
import torch

from tests.gpu.random_model import write_random_model
from tests.integration.deployments.deployment import LocalDeployment, deployment
from tests.integration.deployments.streams import client_of
from tests.waiting import until


@dataclass(frozen=True, slots=True)
class Load:
    """What clients ask for."""

    prompt: int = 1024
    output: int = 256
    crowd: int = 64  # requests at once
    rate: float = 12.0  # requests a second, at random times
    seconds: float = 12.0
    compared: int = 16
    vocab_size: int = 151_000


SMALL = Load(prompt=40, output=12, crowd=4, rate=1.0, seconds=3.0, compared=4, vocab_size=500)


@dataclass(slots=True)
class Stream:
    """One answer, and when its pieces came."""

    began: float = field(default_factory=perf_counter)
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    runs: asyncio.Event = field(default_factory=asyncio.Event)  # its first piece has come

    @property
    def first(self) -> float:
        """Seconds to the first piece."""
        return self.times[0] - self.began

    @property
    def between(self) -> list[float]:
        """Seconds between pieces."""
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]


async def ask(
    client: openai.AsyncOpenAI, model: str, prompt: list[int], output: int, stream: Stream
) -> Stream:
    """One greedy completion, into `stream`."""
    answer = await client.completions.create(
        model=model,
        prompt=prompt,
        max_tokens=output,
        stream=True,
        temperature=0.0,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    async for chunk in answer:
        for choice in chunk.choices:
            if ids := (choice.model_extra or {}).get("token_ids"):
                stream.tokens += ids
                stream.times.append(perf_counter())
                stream.runs.set()
    assert len(stream.tokens) == output, f"{len(stream.tokens)} tokens of {output}"
    return stream


def quantiles(values: list[float]) -> str:
    """p50 and p99 in milliseconds."""
    ordered = sorted(values)
    return f"p50 {1e3 * median(ordered):.1f} ms, p99 {1e3 * ordered[ceil(0.99 * len(ordered)) - 1]:.1f} ms"


def latencies(streams: list[Stream]) -> str:
    """To the first piece, and between pieces."""
    first, between = [each.first for each in streams], [pause for each in streams for pause in each.between]
    return f"first token {quantiles(first)}; between {quantiles(between)}"


def say(line: str) -> None:
    print(line, flush=True)  # noqa: T201


class Figures:
    """What is asked of one deployment."""

    def __init__(self, running: LocalDeployment, model: str, load: Load, name: str) -> None:
        self.running, self.model, self.load, self.name = running, model, load, name
        self._drawn = Random(name)

    def prompts(self, number: int, seed: object) -> list[list[int]]:
        """The same for each shape."""
        drawn = Random(str(seed))
        return [
            [drawn.randint(1, self.load.vocab_size) for _ in range(self.load.prompt)] for _ in range(number)
        ]

    async def all(self) -> list[list[int]]:
        """Print the figures; the tokens that are compared."""
        load = self.load
        async with client_of(self.running.url) as client:
            await self._ask(client, self.prompts(1, "warm")[0])
            alone = [await self._ask(client, prompt) for prompt in self.prompts(3, "alone")]
            self.ways()
            say(f"{self.name}, alone: {latencies(alone)}")
            began = perf_counter()
            crowd = await self._at(client, "crowd", [0.0] * load.crowd)
            seconds = perf_counter() - began
            say(f"{self.name}, {load.crowd} at once: {load.crowd * load.output / seconds:.0f} tok/s")
            moments, moment, arrivals = [], 0.0, Random("arrivals")
            while (moment := moment + arrivals.expovariate(load.rate)) < load.seconds:
                moments.append(moment)
            arriving = await self._at(client, "arriving", moments)
            rate = f"{load.rate:g} requests/s of {load.prompt}/{load.output}"
            say(f"{self.name}, {rate}: {latencies(arriving)}")
        return [stream.tokens for stream in [*alone, *crowd][: load.compared]]

    async def _ask(self, client: openai.AsyncOpenAI, prompt: list[int]) -> Stream:
        return await ask(client, self.model, prompt, self.load.output, Stream())

    async def _at(self, client: openai.AsyncOpenAI, seed: str, moments: list[float]) -> list[Stream]:
        """A request at each moment, in seconds from now."""
        loop, began = asyncio.get_running_loop(), asyncio.get_running_loop().time()

        async def at(moment: float, prompt: list[int]) -> Stream:
            come = asyncio.Event()
            loop.call_at(began + moment, come.set)
            await come.wait()
            return await self._ask(client, prompt)

        prompts = self.prompts(len(moments), seed)
        return list(await asyncio.gather(*map(at, moments, prompts)))

    async def survive(self, victim: int) -> None:
        """A process dies while streams run: each goes on. Afterwards the same again, undisturbed."""
        load = self.load
        prompts = self.prompts(4, "killed")
        async with client_of(self.running.url) as client:
            streams = [Stream() for _ in prompts]
            asked = [
                asyncio.create_task(ask(client, self.model, prompt, load.output, stream))
                for prompt, stream in zip(prompts, streams, strict=True)
            ]
            await asyncio.gather(*(stream.runs.wait() for stream in streams))
            os.kill(victim, signal.SIGKILL)
            killed = await asyncio.gather(*asked)
            until(self.running.all_linked, 120, "all workers' return")
            again = [await self._ask(client, prompt) for prompt in prompts]
        equal = sum(one.tokens == other.tokens for one, other in zip(killed, again, strict=True))
        longest = max(pause for each in killed for pause in each.between)
        say(
            f"{self.name}, decode worker killed: {len(killed)} of {len(prompts)} streams complete, {equal} equal to "
            f"undisturbed ones; longest pause {longest:.2f} s"
        )

    def ways(self) -> None:
        """Mean milliseconds of each part of a request's way so far, as router and workers time them."""
        found: dict[str, float] = {}
        for process in self.running.processes():
            metrics = self.running.metrics(process)
            for sample, count in metrics.items():
                name, brace, labels = sample.partition("{")
                if name.endswith("_seconds_count") and count:
                    part = name.removesuffix("_count")
                    mean = metrics[f"{part}_sum{brace}{labels}"] / count
                    found[f"{process.role} {part}{brace}{labels}"] = round(1e3 * mean, 2)
        say(f"{self.name}, ms of a way's parts: {found}")

    def totals(self) -> None:
        """What the workers count."""
        for name in ("segue_graph_steps_total", "segue_kv_transport", "segue_device_", "segue_local_prompts"):
            found: dict[str, float] = {}
            for process in self.running.processes():
                for sample, value in self.running.metrics(process).items():
                    if sample.startswith(name) and value and "bucket" not in sample:
                        found[f"{process.role} {sample}"] = round(value, 3)
            say(f"{self.name}: {found}")


def equal_tokens(ones: list[list[int]], others: list[list[int]]) -> str:
    """How far greedy answers agree."""
    agree = [
        next(
            (place for place, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]), len(one)
        )
        for one, other in zip(ones, others, strict=True)
    ]
    whole = sum(place == len(one) for place, one in zip(agree, ones, strict=True))
    return f"{whole} of {len(ones)} greedy answers are equal; the others from token {sorted(agree)[0]} on are not"


def main() -> None:
    """See the head of the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", choices=("0.6B", "14B", "tiny"), default="0.6B")
    parser.add_argument("--device", choices=("cuda", "cuda-on-cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="as little as shows that it runs")
    parser.add_argument("--kv-pages", type=int, default=8192, help="of each worker")
    parser.add_argument("--kv-cache-dtype", default="auto", help="of each worker; e.g. fp8_e4m3")
    parser.add_argument(
        "--shapes",
        default="0+1,1+1,1+2",
        help="prefill and decode processes; of two decode ones one is killed",
    )
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.exit(0, "skipped: torch finds no GPU\n")
    load = SMALL if given.small else Load()
    answers: list[list[list[int]]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "random"
        write_random_model(given.model, folder, torch.device("cuda" if given.device == "cuda" else "cpu"))
        worker = {
            "kvPages": given.kv_pages,
            "contextLen": 4 * load.prompt,
            "kvCacheDtype": given.kv_cache_dtype,
        }
        for prefill, decode in (map(int, shape.split("+")) for shape in given.shapes.split(",")):
            flags = (
                "--model",
                str(folder),
                "--device",
                given.device,
                "--prefill",
                str(prefill),
                "--decode",
                str(decode),
            )
            began = perf_counter()
            with deployment(*flags, config={"prefill": worker, "decode": worker}) as running:
                figures = Figures(running, "random", load, f"{prefill} + {decode}")
                say(f"{figures.name}: ready in {perf_counter() - began:.1f} s")
                if decode == 1:
                    answers.append(asyncio.run(figures.all()))
                    figures.totals()
                else:
                    asyncio.run(figures.survive(running.processes("decode")[0].pid))
    if len(answers) == 2:
        say(equal_tokens(*answers))


if __name__ == "__main__":
    main()
