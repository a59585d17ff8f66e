"""Runs the simulation from the command line.

python -m tests.simulation --seeds 1000                      many seeds, then the report
python -m tests.simulation --seed 17 --log                   one seed, every event
python -m tests.simulation --seed 17 --mutation NAME --log   … with a mistake in the code
python -m tests.simulation --mutations                       how many seeds each mistake survives; writes CAUGHT_BY
python -m tests.simulation --seldom                          which seeds show what few worlds show; writes SHOWN_BY
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections import Counter
from functools import partial

from tests.simulation import report
from tests.simulation.mistakes.mutations import MUTATIONS
from tests.simulation.run import (
    CAUGHT_BY,
    SEEDS,
    SEEDS_MAX,
    SHOWN_BY,
    run_seed,
    run_seeds,
    seeds_until_caught,
)

MUTATION_SEEDS_MAX = 1000
SELDOM = 3  # of the first SEEDS worlds: what fewer show may be shown by none of them after the next change
STORIES_MAX = 10  # failures printed in full; more of them are of the same few kinds


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation", description="Simulate whole deployments"
    )
    parser.add_argument("--seeds", type=int, default=100, help="how many seeds to run")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="run this one alone")
    parser.add_argument(
        "--mutation", default="", choices=["", *MUTATIONS], help="a mistake to make in the code"
    )
    parser.add_argument("--mutations", action="store_true", help="try every mutation")
    parser.add_argument("--seldom", action="store_true", help="find a seed for what few worlds show")
    parser.add_argument("--log", action="store_true", help="show every event")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    if options.mutations:
        return _try_mutations(options.processes)
    if options.seldom:
        return _find_seldom(options.processes)
    if options.seed is not None:
        return _replay(options.seed, options.mutation, log=options.log)
    if options.mutation:
        parser.error(
            "--mutation goes with --seed: that seed alone has the mistake; --mutations tries all of them"
        )
    return _run_many(range(options.first, options.first + options.seeds), options.processes)


def _replay(seed: int, mutation: str, *, log: bool) -> int:
    run = run_seed(seed, mutation, _say if log else None)
    _say(run.story if run.failure else f"seed {seed} passes, journal {run.digest}")
    return bool(run.failure)


def _run_many(seeds: range, processes: int) -> int:
    began = time.monotonic()
    counts: Counter[str] = Counter()
    failures = []
    for run in run_seeds(seeds, processes):
        counts += run.counts
        if run.failure:
            failures.append(run)
            if len(failures) <= STORIES_MAX:
                _say(run.story)
    _say("\n".join(report.lines(counts)))
    missing = report.missing(counts)
    _say(f"{len(seeds)} seeds in {time.monotonic() - began:.0f} s: {len(failures)} failed")
    _say(f"never happened: {', '.join(missing) or 'nothing of what should'}")
    return bool(failures or missing)


def _try_mutations(processes: int) -> int:
    caught_by: dict[str, int] = {}
    search = partial(seeds_until_caught, seeds_max=MUTATION_SEEDS_MAX)
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for (name, mutation), run in zip(MUTATIONS.items(), pool.imap(search, MUTATIONS), strict=True):
            if run:
                caught_by[name] = run.seed
            verdict = f"{run.seed + 1:4d}  {run.failure[:90]}" if run else "SURVIVED"
            _say(f"{mutation.area:14} {name:48} {verdict}")
    _say(f"median: {statistics.median(caught_by.values()) + 1} seeds")
    CAUGHT_BY.write_text(json.dumps(caught_by, indent=2) + "\n")
    return len(caught_by) < len(MUTATIONS)


def _find_seldom(processes: int) -> int:
    worlds: Counter[str] = Counter()
    shown_by: dict[str, int] = {}
    for run in run_seeds(range(SEEDS_MAX), processes):
        shown = {name for name in report.EXPECTED if run.counts[name]}
        if run.seed < SEEDS:
            worlds.update(shown)
            continue
        wanted = {name for name in report.EXPECTED if worlds[name] < SELDOM} - shown_by.keys()
        shown_by |= dict.fromkeys(sorted(shown & wanted), run.seed)
        if wanted <= shown:
            break
    never = {name for name in report.EXPECTED if not worlds[name]} - shown_by.keys()
    _say(f"{len(shown_by)} rows in {len(set(shown_by.values()))} seeds")
    _say(f"never happened: {', '.join(sorted(never)) or 'nothing of what should'}")
    SHOWN_BY.write_text(json.dumps(shown_by, indent=2) + "\n")
    return bool(never)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
