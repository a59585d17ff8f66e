"""What constraining eight streams costs: the median gap between their tokens against that of free streams.

    python -m tests.benchmarks.constrained [--rounds 5]

A real deployment of the small model; rounds of free and constrained streams alternate, so that other work on the
machine meets both. Also how long schemas take to compile, the first time and again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

from shared.engine.grammars import Grammars
from shared.grammar import Grammar
from shared.local.model_store import resolve
from tests.integration.deployment import deployment
from tests.integration.streams import client_of, complete

STREAMS = 8
TOKENS = 128
GOAL = 1.15
LIST = {"type": "array", "items": {"type": "string", "maxLength": 40}, "minItems": 200}
KINDS: dict[str, dict[str, Any]] = {
    "free": {"ignore_eos": True},
    "schema": {"structured_outputs": {"json": LIST}},
    "regex": {"regex": "[a-z ]{2000}"},
}


async def gaps(url: str, body: dict[str, Any]) -> list[float]:
    """Seconds between the tokens of eight streams at a time."""
    found: list[float] = []

    async with client_of(url) as client:

        async def one(seed: int) -> None:
            last = 0.0

            def note() -> None:
                nonlocal last
                now = perf_counter()
                if last:
                    found.append(now - last)
                last = now

            await complete(
                client, "The list: ", note, seed=seed, temperature=1.0, max_tokens=TOKENS, extra_body=body
            )

        await asyncio.gather(*(one(seed) for seed in range(STREAMS)))
    return found


def compile_seconds(folder: Path) -> tuple[float, float]:
    """Of a schema of 2 kB: until a matcher of it is there, the first time and the second; medians."""
    grammars = Grammars(folder / "tokenizer.json", 49_152, {0, 2})
    first, again = list[float](), list[float]()
    for number in range(20):
        properties = {f"field_{number}_{at}": {"type": ["string", "integer"][at % 2]} for at in range(55)}
        text = json.dumps({"type": "object", "properties": properties, "required": list(properties)[:10]})
        grammar = Grammar("json", text)
        for seconds in (first, again):
            began = perf_counter()
            grammars.matcher(grammar, [])
            seconds.append(perf_counter() - began)
    return statistics.median(first), statistics.median(again)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.constrained")
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    first, again = compile_seconds(Path(resolve("smollm2", lambda _line: None)))
    sys.stdout.write(f"a schema of 2 kB is ready in {1e3 * first:.2f} ms, again in {1e3 * again:.3f} ms\n")
    medians: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with deployment(config={"prefill": {"kvPages": 800}, "decode": {"kvPages": 800}}) as running:
        for _ in range(rounds):
            for kind, body in KINDS.items():
                medians[kind].append(statistics.median(asyncio.run(gaps(running.url, body))))
    free = medians["free"]
    for kind, found in medians.items():
        ratio = statistics.median(one / other for one, other in zip(found, free, strict=True))
        milliseconds = 1e3 * statistics.median(found)
        sys.stdout.write(f"{kind:8} median gap {milliseconds:6.1f} ms, {ratio:.3f} x free (goal {GOAL})\n")


if __name__ == "__main__":
    main()
