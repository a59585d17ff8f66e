"""Several servers, the same scenarios, in turns: scenario by scenario, round by round, so that a machine that grows
slower or warmer does so for all. All servers run. One that spins while idle is frozen while it is not its turn, and a
turn begins when the others have finished the work of streams that were cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime

import msgspec

from tests.benchmarks.client.measuring import SIZES, fresh_seed
from tests.benchmarks.client.report import (
    Machine,
    RunResult,
    ScenarioResult,
    scenario_result,
    this_machine,
    three_digits,
)
from tests.benchmarks.client.scenarios import Scenario
from tests.benchmarks.servers import BenchServer, wait_until_idle

MEMORY_AFTER = "mixed"  # the scenario with 16 streams at a time


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One server and its figures."""

    name: str
    title: str
    package: str
    settings: str
    idle_core_share: float
    pss_bytes: int  # the most seen after a run; all its processes
    scenarios: list[ScenarioResult]

    def result(self, scenario: str) -> ScenarioResult | None:
        """Its figures in this scenario, if it took part."""
        return next((result for result in self.scenarios if result.name == scenario), None)


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """A run of the comparison, for the record."""

    date: str
    command: str
    seed: int
    rounds: int
    size: str
    busy_cores: float  # before it, with all servers idle
    machine: Machine
    servers: list[Measured]


def compare(
    servers: Sequence[BenchServer],
    scenarios: Sequence[Scenario],
    *,
    size: str,
    busy_cores: float,
    rounds: int,
    seed: int,
    command: str,
    say: Callable[[str], None],
) -> Comparison:
    """Measure them all. In a round all get the same prompts, in another round others. Raises BenchError."""
    seed = fresh_seed(seed)
    runs: dict[tuple[str, str], list[RunResult]] = {}
    for number in range(rounds):
        for scenario in scenarios:
            taking_part = _taking_part(servers, scenario)
            first = number % len(taking_part)  # no server always comes after the same one
            for server in [*taking_part[first:], *taking_part[:first]]:
                wait_until_idle(say)
                with server.awake():
                    run = server.run(scenario, SIZES[size], f"{seed}/{number}")
                    if scenario.name == MEMORY_AFTER:
                        server.remember_memory()
                runs.setdefault((server.contender.name, scenario.name), []).append(run)
                say(
                    f"round {number + 1}, {scenario.name}, {server.contender.title}: "
                    f"{three_digits(run.value)} {scenario.unit}"
                )
    return Comparison(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command,
        seed=seed,
        rounds=rounds,
        size=size,
        busy_cores=busy_cores,
        machine=this_machine(),
        servers=[_measured(server, scenarios, runs) for server in servers],
    )


def ratio_to_best_peer(comparison: Comparison, scenario: str) -> float | None:
    """How many times better the first server is than the best of the others; above 1 it is the best."""
    ours, *others = comparison.servers
    mine = ours.result(scenario)
    peers = [found.value for other in others if (found := other.result(scenario))]
    if mine is None or not peers:
        return None
    return min(peers) / mine.value if mine.better == "less" else mine.value / max(peers)


def _taking_part(servers: Sequence[BenchServer], scenario: Scenario) -> list[BenchServer]:
    return [
        server
        for server in servers
        if not server.contender.scenarios or scenario.name in server.contender.scenarios
    ]


def _measured(
    server: BenchServer, scenarios: Sequence[Scenario], runs: dict[tuple[str, str], list[RunResult]]
) -> Measured:
    contender = server.contender
    return Measured(
        name=contender.name,
        title=contender.title,
        package=contender.package,
        settings=contender.settings,
        idle_core_share=server.idle_share,
        pss_bytes=server.pss_bytes,
        scenarios=[
            scenario_result(scenario, runs[contender.name, scenario.name])
            for scenario in scenarios
            if (contender.name, scenario.name) in runs
        ],
    )
