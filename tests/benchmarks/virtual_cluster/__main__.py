"""The command: `python -m tests.benchmarks.virtual_cluster --scenario NAME`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from tests.benchmarks.virtual_cluster.balance_scenarios import BALANCE_SCENARIOS
from tests.benchmarks.virtual_cluster.cache_scenarios import CACHE_SCENARIOS
from tests.benchmarks.virtual_cluster.figures import Figures
from tests.benchmarks.virtual_cluster.fleet_scenarios import FLEET_SCENARIOS
from tests.benchmarks.virtual_cluster.load_scenarios import LOAD_SCENARIOS
from tests.benchmarks.virtual_cluster.picture import draw
from tests.benchmarks.virtual_cluster.promise_scenarios import PROMISE_SCENARIOS
from tests.benchmarks.virtual_cluster.scenario import (
    ROUTERS,
    RunCurves,
    ScenarioSize,
    VirtualResult,
    run_scenario,
)

SCENARIOS = LOAD_SCENARIOS | CACHE_SCENARIOS | PROMISE_SCENARIOS | BALANCE_SCENARIOS | FLEET_SCENARIOS


def _write(figures: Mapping[str, object], indent: str) -> None:
    for name, value in figures.items():
        if isinstance(value, dict) and any(isinstance(each, float) for each in value.values()):
            sys.stdout.write(f"{indent}{name}\n")
            _write(value, indent + "    ")
        elif isinstance(value, dict):
            shown = ", ".join(f"{key} {count}" for key, count in value.items())
            sys.stdout.write(f"{indent}{name:40} {shown or '-'}\n")
        else:
            sys.stdout.write(f"{indent}{name:40} {'-' if value is None else value}\n")


def _show(name: str, result: VirtualResult, seconds: float) -> None:
    sys.stdout.write(f"{name}: {SCENARIOS[name].about} ({seconds:.0f} s)\n")
    for run, figures in result.figures.items():
        sys.stdout.write(f"  {run}\n")
        _write(figures | result.cost[run], "    ")
    if result.compared:
        sys.stdout.write("  compared\n")
        _write(result.compared, "    ")
    sys.stdout.flush()


def _list() -> None:
    for name, scenario in SCENARIOS.items():
        sys.stdout.write(f"{name:24} {scenario.about}\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.virtual_cluster",
        description="Runs scenarios of a virtual cluster and prints what its requests have seen, in virtual seconds.",
    )
    parser.add_argument("--list", action="store_true", help="name the scenarios")
    parser.add_argument("--scenario", nargs="+", choices=[*SCENARIOS, "all"], default=[], metavar="NAME")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--scale", type=float, default=1.0, help="pods of a fleet, and its requests; 1 is 600 pods"
    )
    parser.add_argument(
        "--length", type=float, default=1.0, help="how long requests come; 1 is as documented"
    )
    parser.add_argument(
        "--encode", action="store_true", help="encode and decode every message, which takes longer"
    )
    parser.add_argument(
        "--routers",
        type=int,
        nargs="*",
        default=ROUTERS,
        help="routers with which the scenarios of several pods are run besides; nothing behind it: none",
    )
    parser.add_argument("--json", type=Path, help="file that gets all figures")
    parser.add_argument("--picture", type=Path, help="PNG that shows the curves of all runs")
    return parser.parse_args()


def main() -> None:
    options = _options()
    if options.list or not options.scenario:
        _list()
        return
    size = ScenarioSize(fleet=options.scale, length=options.length)
    results: dict[str, Figures] = {}
    curves: dict[str, RunCurves] = {}
    for name in [*SCENARIOS] if "all" in options.scenario else options.scenario:
        began = time.monotonic()
        result = run_scenario(
            SCENARIOS[name], seed=options.seed, size=size, encodes=options.encode, routers=options.routers
        )
        _show(name, result, time.monotonic() - began)
        results[name] = {
            "seed": options.seed,
            "scale": options.scale,
            "length": options.length,
            "runs": dict(result.figures),
            "compared": result.compared,
            "cost": dict(result.cost),
            "curves": {run: asdict(each) for run, each in result.curves.items()},
        }
        if options.json:
            options.json.write_text(json.dumps(results, indent=1) + "\n")
        curves |= {f"{name}: {run}": each for run, each in result.curves.items()}
    if options.picture:
        draw(curves, options.picture)


if __name__ == "__main__":
    main()
