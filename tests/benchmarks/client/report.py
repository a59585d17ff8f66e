"""Results: as JSON for the record, as a table for eyes."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import msgspec
from rich.table import Table

from shared.primitives.version import VERSION
from shared.process.resources import usable_cores
from tests.benchmarks.client import figures
from tests.benchmarks.client.client import Target
from tests.benchmarks.client.scenarios import Outcome, Scenario


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """One run of one scenario."""

    value: float
    streams: int
    prompt_tokens: int  # by the server's count, of the streams read to their end
    prompt_tokens_drawn: int  # by ours; they differ when the model has another vocabulary than SmolLM2
    cached_tokens: int
    output_tokens: int
    events: int  # that carried text; fewer than tokens where some came together or have none
    seconds: float
    client_cpu_seconds: float  # taken from the machine by the measurement itself
    first_token_seconds_median: float
    first_token_seconds_max: float
    gap_seconds_max: float


class ScenarioResult(msgspec.Struct, frozen=True, kw_only=True):
    """All runs of one scenario; `value` is their median."""

    name: str
    what: str
    unit: str
    better: str
    value: float
    runs: list[RunResult]


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where the client ran."""

    cpu: str
    cores: int
    system: str


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one would want to know about the figures later."""

    date: str
    command: str
    url: str
    model: str
    software: str
    seed: int
    size: str
    machine: Machine
    versions: dict[str, str]
    scenarios: list[ScenarioResult]


def run_result(outcome: Outcome, seconds: float, client_cpu_seconds: float) -> RunResult:
    """What is kept of a run."""
    first = [figures.seconds_to_first(stream) for stream in outcome.streams]
    return RunResult(
        value=outcome.value,
        streams=len(outcome.streams),
        prompt_tokens=sum(stream.prompt_tokens for stream in outcome.streams),
        prompt_tokens_drawn=outcome.prompt_tokens_drawn,
        cached_tokens=sum(stream.cached_tokens for stream in outcome.streams),
        output_tokens=sum(stream.output_tokens for stream in outcome.streams),
        events=sum(len(stream.times) for stream in outcome.streams),
        seconds=seconds,
        client_cpu_seconds=client_cpu_seconds,
        first_token_seconds_median=figures.middle(first),
        first_token_seconds_max=max(first),
        gap_seconds_max=max(figures.longest_gap(stream.times) for stream in outcome.streams),
    )


def scenario_result(scenario: Scenario, runs: list[RunResult]) -> ScenarioResult:
    """All runs of a scenario and their median."""
    return ScenarioResult(
        name=scenario.name,
        what=scenario.what,
        unit=scenario.unit,
        better=scenario.better,
        value=figures.middle([run.value for run in runs]),
        runs=runs,
    )


def report(target: Target, command: str, seed: int, size: str, results: Sequence[ScenarioResult]) -> Report:
    """The results with all that is known about how they came about."""
    return Report(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command,
        url=target.url,
        model=target.model,
        software=target.software,
        seed=seed,
        size=size,
        machine=this_machine(),
        versions={
            "segue": VERSION,
            "python": platform.python_version(),
            "aiohttp": version("aiohttp"),
        },
        scenarios=list(results),
    )


def this_machine() -> Machine:
    """The CPU by name, and how much of it this process may use."""
    return Machine(cpu=_cpu_model(), cores=usable_cores(), system=f"{platform.system()} {os.uname().release}")


def write_json(result: msgspec.Struct, file: Path) -> None:
    """Write results, indented."""
    file.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")


def table(result: Report) -> Table:
    """The figures, a scenario a row."""
    shown = Table(title=f"{result.model} at {result.url}", title_justify="left")
    shown.add_column("scenario")
    shown.add_column("what")
    shown.add_column("median", justify="right")
    shown.add_column("unit")
    shown.add_column("all runs", justify="right")
    for row in result.scenarios:
        runs = " ".join(three_digits(run.value) for run in row.runs)
        shown.add_row(row.name, row.what, three_digits(row.value), row.unit, runs)
    return shown


def remarks(result: Report) -> list[str]:
    """What a reader of the table must know."""
    miscounted = [
        row.name
        for row in result.scenarios
        if any(r.prompt_tokens != r.prompt_tokens_drawn for r in row.runs)
    ]
    if not miscounted:
        return []
    return [f"the server counts other prompt tokens than were meant, in: {', '.join(miscounted)}"]


def three_digits(value: float) -> str:
    """`0.0123`, `1.23`, `12.3`, `1234`."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
