"""Runs the chosen scenarios against one server, tells what it is doing, and reports.

Also the one place where a scenario is timed, for the comparison of several servers in `tests/benchmarks`.
"""

from __future__ import annotations

import asyncio
import gc
import secrets
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter, process_time

from rich.console import Console

from shared.primitives.errors import ConfigError
from tests.benchmarks.client.client import BenchClient, connected
from tests.benchmarks.client.config import BenchConfig
from tests.benchmarks.client.errors import BenchError
from tests.benchmarks.client.report import (
    Report,
    RunResult,
    remarks,
    report,
    run_result,
    scenario_result,
    table,
    three_digits,
    write_json,
)
from tests.benchmarks.client.scenarios import FULL, SCENARIOS, SMALL, Scenario, Size
from tests.benchmarks.client.words import DrawnPrompts

SIZES = {"full": FULL, "small": SMALL}
SEED_BITS = 31
WARM_UP = (16, 4)  # tokens in and out of the one request that is not measured


def bench(config: BenchConfig, console: Console) -> Report:
    """Measure, and show the table. Raises BenchError or ConfigError."""
    chosen = choose(config.scenarios)
    if config.json_file and not Path(config.json_file).parent.is_dir():
        raise ConfigError(f"there is no folder for {config.json_file}")
    result = asyncio.run(_measure_all(config, chosen, console))
    console.print(table(result))
    for remark in remarks(result):
        console.print(remark)
    if config.json_file:
        write_json(result, Path(config.json_file))
    return result


def choose(names: Sequence[str]) -> list[Scenario]:
    """Scenarios by name, in the table's order; all for no names. Raises ConfigError for an unknown one."""
    known = {scenario.name: scenario for scenario in SCENARIOS}
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"there is no scenario {unknown[0]}; there are {', '.join(known)}")
    return [scenario for scenario in SCENARIOS if not names or scenario.name in names]


def fresh_seed(seed: int) -> int:
    """The seed itself, or another one each time for 0."""
    return seed or 1 + secrets.randbits(SEED_BITS)


async def warm_up(client: BenchClient) -> None:
    """Send one short request, so that no figure includes what a server prepares at its first use."""
    await client.complete(DrawnPrompts(str(secrets.randbits(SEED_BITS))).draw(WARM_UP[0]), WARM_UP[1])


async def measure(client: BenchClient, scenario: Scenario, size: Size, seed: str) -> RunResult:
    """One run of a scenario; `seed` decides the prompts. Raises BenchError."""
    gc.collect()
    gc.disable()  # a collection in the middle of it would be a gap of ours
    try:
        start, start_cpu = perf_counter(), process_time()
        outcome = await scenario.run(client, DrawnPrompts(f"{seed}/{scenario.name}"), size)
        return run_result(outcome, perf_counter() - start, process_time() - start_cpu)
    except BenchError as error:
        raise BenchError(f"{scenario.name}: {error}") from None
    finally:
        gc.enable()


async def _measure_all(config: BenchConfig, chosen: Sequence[Scenario], console: Console) -> Report:
    seed = fresh_seed(config.seed)
    async with connected(config.url, config.model) as client:
        await warm_up(client)
        runs: dict[str, list[RunResult]] = {scenario.name: [] for scenario in chosen}
        for number in range(config.runs):
            for scenario in chosen:
                # No spinner: it would redraw itself on the cores that are being measured.
                console.print(f"{scenario.name}, run {number + 1} of {config.runs} … ", end="")
                run = await measure(client, scenario, SIZES[config.size], f"{seed}/{number}")
                console.print(f"{three_digits(run.value)} {scenario.unit}")
                runs[scenario.name].append(run)
        results = [scenario_result(scenario, runs[scenario.name]) for scenario in chosen]
        return report(
            client.target,
            shlex.join(["python", "-m", "tests.benchmarks.client", *sys.argv[1:]]),
            seed,
            config.size,
            results,
        )
