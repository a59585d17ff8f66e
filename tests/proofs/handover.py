"""KV pages change hands a million times under faults, aborts and reuse: no wrong byte becomes a token.

    worlds of tests/simulation, one seed after the other, until so many fetches have begun
        pull   as the product does: who wants pages reads them, and keeps the targets until no byte can land any more
        push   the same worlds by the design of others: pages are written by address, an abort gives them to the next

Each KV cell is a hash of all cells before it, and each token of every answer is compared with the oracle's. So a world
with one wrong cell under an answer fails, and names it. The pushing design must fail: else nothing is shown.

    python -m tests.proofs.handover --processes 2            a night: three hours of CPU
    python -m tests.proofs.handover --fetches 100000
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

from tests.proofs.proof import Promise, ProofResult
from tests.simulation.mistakes.designs import PUSHED
from tests.simulation.run import Run, run_seed

BATCH = 10  # worlds between two looks at how many there were
PUSH_LONGER = 10  # times as many worlds, while none has shown a mistake
WRONG = (
    ": output [",
    ": scores (",
    ": logprobs (",
)  # in the failure of a world whose client was told other than the oracle
STORIES_MAX = 5  # failures that are printed
FAULTS = (
    "fetch abandoned",
    "fetch failed",
    "fetch failed unproven",
    "fetch stale",
    "fetch slow",
    "fetch endless",
    "fetch from a dead agent",
    "bytes landed after the end of interest",
)


@dataclass(slots=True)
class LivedWorlds:
    """What worlds of one design have shown."""

    worlds: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[Run] = field(
        default_factory=list
    )  # worlds in which a token or its logprob was not the oracle's
    failed: list[Run] = field(default_factory=list)  # in another way

    def take(self, run: Run) -> None:
        """Add a world."""
        self.worlds += 1
        self.counts += run.counts
        if run.failure:
            (self.wrong if any(each in run.failure for each in WRONG) else self.failed).append(run)


def live(first: int, mutation: str, processes: int, enough: Callable[[LivedWorlds], bool]) -> LivedWorlds:
    """Live through worlds from this seed on, some at a time, until it is enough."""
    lived = LivedWorlds()
    run = partial(run_seed, mutation=mutation)
    with ExitStack() as stack:
        through: Callable[..., Iterable[Run]] = map
        if processes > 1:
            through = stack.enter_context(multiprocessing.get_context("spawn").Pool(processes)).imap
        while not enough(lived):
            begin = first + lived.worlds
            for each in through(run, range(begin, begin + BATCH)):
                lived.take(each)
    return lived


def prove(fetches: int, push_worlds: int, first: int, processes: int) -> ProofResult:
    """Run both designs, and compare."""
    began = time.monotonic()
    pull = live(first, "", processes, lambda lived: lived.counts["fetch started"] >= fetches)
    seconds = time.monotonic() - began
    push = live(
        first,
        PUSHED,
        processes,
        lambda lived: lived.worlds >= push_worlds * (1 if lived.wrong else PUSH_LONGER),
    )
    counts = pull.counts
    return ProofResult(
        (
            Promise("fetches begun", counts["fetch started"], least=fetches),
            Promise(
                "worlds with a wrong token",
                len(pull.wrong),
                0,
                0,
                others="96 to 46 % right answers (sglang#23020)",
            ),
            Promise("worlds that failed otherwise", len(pull.failed), 0, 0),
            Promise("pushed: worlds with a wrong token", len(push.wrong), least=1),
        ),
        {
            "pulled: worlds, seconds": (pull.worlds, round(seconds, 1)),
            "fetches landed": counts["fetch landed"],
            **{name: counts[name] for name in FAULTS},
            "pushed: worlds": push.worlds,
            "pushed: share with a wrong token": round(len(push.wrong) / push.worlds, 4),
            "pushed: worlds that failed otherwise": len(push.failed),
            "failures": [run.story for run in (*pull.wrong, *pull.failed)[:STORIES_MAX]],
            "the first with pushed pages": push.wrong[0].story if push.wrong else "-",
        },
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.proofs.handover",
        description="KV pages change hands in simulated worlds, as the product does it and as others do.",
    )
    parser.add_argument("--fetches", type=int, default=1_000_000, help="to begin; 90 take a second of CPU")
    parser.add_argument("--push-worlds", type=int, default=500, help="of the same seeds, with pushed pages")
    parser.add_argument("--seed", type=int, default=0, help="the first of the worlds")
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args(arguments)
    return prove(options.fetches, options.push_worlds, options.seed, options.processes).show()


if __name__ == "__main__":
    sys.exit(main())
