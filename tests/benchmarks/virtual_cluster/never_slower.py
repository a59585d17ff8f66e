"""Prefill and decode apart, together, or as routers choose: requests a second that meet their targets, side by side.

A cell is a load, a number of GPUs and targets (`Slo`). Its candidates serve the same requests:

    apart k     k prefill workers and n - k decode workers, which compute no prompts: the split of the formulas below,
                and its neighbours
    together    n decode workers, which compute their prompts
    automatic   a quarter of the GPUs for prefill workers, and routers that choose for each prompt (`local_prefill:
                short`)

Steps take what a dense model of 14.8 billion weights in bfloat16 takes on an H200 by its work and bytes: computed, not
measured. So are the capacities that say how much is offered.

    python -m tests.benchmarks.virtual_cluster.never_slower --loads chat_1024_256_0 --gpus 2 4 --seconds 60
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from decode.config import DecodeConfig
from prefill.config import PrefillConfig
from tests.benchmarks.virtual_cluster.cluster import START_SECONDS, ClusterShape, VirtualCluster
from tests.benchmarks.virtual_cluster.device import GpuTimes
from tests.benchmarks.virtual_cluster.fabric import FabricSpeed
from tests.benchmarks.virtual_cluster.figures import AnswerRecord, quantile
from tests.benchmarks.virtual_cluster.picture import Shares, draw_table
from tests.benchmarks.virtual_cluster.trace import DrawTrace, TracedRequest, poisson
from tests.benchmarks.virtual_cluster.worker import WorkerShape

FLOPS, BANDWIDTH = 0.6 * 790e12, 0.85 * 4.3e12  # that a pass reaches, a second
WEIGHTS, KV_TOKEN = (
    14.8e9,
    160 * 1024,
)  # weights of two bytes; bytes of KV a token: 40 layers, 40 heads of 128
POOL_BYTES = 80 << 30
PAGE_SIZE = 16
TIMES = GpuTimes(
    weights=2 * WEIGHTS / BANDWIDTH,
    token=2 * WEIGHTS / FLOPS,
    token_position=4 * 40 * 40 * 128 / FLOPS,
    context_token=KV_TOKEN / BANDWIDTH,
    copied_page=PAGE_SIZE * KV_TOKEN / 50e9,
)
CONTEXT_LEN = 131_072
ROWS_MAX = 256
STEP_SHARE = 0.9  # of the target that a step may take: the host and the links take their part
SPREAD = 0.5  # lengths are drawn evenly from a mean less so much of it to a mean and so much


@dataclass(frozen=True, slots=True)
class ChatLoad:
    """Means of what a request brings; `hits` of its prompt are a prefix that others have, too."""

    prompt: int
    output: int
    hits: float = 0.0
    prefixes: int = 16

    def trace(self, per_second: float, seconds: float) -> DrawTrace:
        """Requests of this load."""

        def draw(rng: random.Random) -> Iterator[TracedRequest]:
            for number, at in enumerate(poisson(rng, per_second, seconds)):
                prefix_len = round(self.hits * self.prompt)
                own = rng.uniform(1 - SPREAD, 1 + SPREAD) * (self.prompt - prefix_len)
                output = max(2, round(rng.uniform(1 - SPREAD, 1 + SPREAD) * self.output))
                yield TracedRequest(
                    number=number,
                    at=at,
                    prompt_len=prefix_len + max(1, round(own)),
                    output_len=output,
                    max_new_tokens=round((1 + SPREAD) * self.output) + 1,
                    prefix=rng.randrange(self.prefixes) if prefix_len else -1,
                    prefix_len=prefix_len,
                )

        return draw

    def prefill_seconds(self) -> float:
        """Of a GPU for the prompt of a request."""
        new = (1 - self.hits) * self.prompt
        return TIMES.token * new + TIMES.token_position * new * (self.prompt - new / 2)

    def decode_seconds(self, rows: int) -> float:
        """Of a GPU for the output of a request, in batches of so many rows."""
        context = self.prompt + self.output / 2
        return self.output * (max(TIMES.weights / rows, TIMES.token) + context * TIMES.context_token)


@dataclass(frozen=True, slots=True)
class Slo:
    """Targets in seconds: the first token, and the time to the next one in 95 % of the tokens of a request."""

    ttft: float
    itl: float

    def met_by(self, record: AnswerRecord) -> bool:
        """Whether a request has completed and met them."""
        itl = quantile(sorted(record.gaps or ()), 0.95) or 0.0
        return record.completed and record.first is not None and record.first <= self.ttft and itl <= self.itl


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of the table."""

    load: str
    gpus: int
    slo: str
    offered: float  # of the better capacity by the formulas

    @property
    def rows(self) -> int:
        """Rows of DECODE at most: a step with them takes no longer than the target."""
        load, itl = LOADS[self.load], SLOS[self.slo].itl
        context = load.prompt + load.output / 2
        fits = [rows for rows in range(1, ROWS_MAX + 1) if _decode_step(rows, context) <= STEP_SHARE * itl]
        pool = int(POOL_BYTES / (context * KV_TOKEN))
        return max(1, min(max(fits, default=1), pool))

    def capacities(self) -> tuple[float, dict[int, float]]:
        """Requests a second by the formulas: together, and apart by the number of prefill workers."""
        load, n = LOADS[self.load], self.gpus
        prefill, decode = load.prefill_seconds(), load.decode_seconds(self.rows)
        apart = {k: min(k / prefill, (n - k) / decode) for k in range(1, n)}
        return n / (prefill + decode), apart

    def candidates(self) -> Mapping[str, ClusterShape]:
        """What serves the cell, by name; without requests yet."""
        _, apart = self.capacities()
        best = max(apart, key=lambda k: apart[k], default=0)
        prefill, decode = shape_of_fleet(self.gpus)
        shapes = {
            "automatic": self._shape(prefill, decode, "short"),
            "together": self._shape(0, self.gpus, "fallback"),
        }
        for k in range(max(1, best - 1), min(self.gpus - 1, best + 1) + 1):
            if apart[k] >= 0.85 * apart[best]:
                shapes[f"apart {k}"] = self._shape(k, self.gpus - k, "never")
        return shapes

    def _shape(self, prefill: int, decode: int, local_prefill: str) -> ClusterShape:
        config = DecodeConfig(
            page_size=PAGE_SIZE,
            local_tokens_max=2_048,
            itl_target_seconds=STEP_SHARE * SLOS[self.slo].itl,
            max_running_requests=self.rows,
            tenant_share_max=1.0,
        )
        worker = WorkerShape(
            config=config,
            pool_tokens=POOL_BYTES // KV_TOKEN // PAGE_SIZE * PAGE_SIZE,
            context_len=CONTEXT_LEN,
            page_bytes=PAGE_SIZE * KV_TOKEN,
            times=TIMES,
        )
        prompts = PrefillConfig(page_size=PAGE_SIZE, chunked_prefill_size=2_048, tenant_share_max=1.0)
        return ClusterShape(
            prefill=replace(worker, config=prompts),
            decode=worker,
            trace=lambda _: iter(()),
            seconds=0.0,
            prefill_workers=prefill,
            decode_workers=decode,
            router={"local_prefill": local_prefill, "tenant_share_max": 1.0},
            fabric=FabricSpeed(bytes_per_second=40e9),
            keeps_gaps=True,
        )


def _decode_step(rows: int, context: float) -> float:
    return max(TIMES.weights, rows * TIMES.token) + rows * context * TIMES.context_token


def shape_of_fleet(gpus: int) -> tuple[int, int]:
    """The workers of each role that the automatic mode has."""
    prefill = gpus // 4
    return prefill, gpus - prefill


LOADS = {
    **{
        f"chat_{prompt}_{output}_{round(100 * hits)}": ChatLoad(prompt, output, hits)
        for prompt, output in ((512, 512), (1_024, 256), (5_000, 250))
        for hits in (0.0, 0.5, 0.9)
    },
    "agent_64k_400_90": ChatLoad(65_536, 400, 0.9, prefixes=4),
    "mooncake_chat": ChatLoad(12_035, 342, 0.37),
    "mooncake_synthetic": ChatLoad(15_325, 149, 0.65),
}
SLOS = {"1s_100ms": Slo(1.0, 0.1), "2s_40ms": Slo(2.0, 0.04), "5s_20ms": Slo(5.0, 0.02)}
GPUS = (1, 2, 4, 8, 16)
OFFERED = (0.9, 1.1)


def run_candidate(cell: Cell, name: str, seconds: float, seed: int) -> dict[str, object]:
    """Serve the cell by one candidate; figures of what came after a third of the time."""
    together, apart = cell.capacities()
    per_second = cell.offered * max([together, *apart.values()])
    shape = replace(
        cell.candidates()[name], trace=LOADS[cell.load].trace(per_second, seconds), seconds=seconds
    )
    began, slo = time.process_time(), SLOS[cell.slo]
    cluster = VirtualCluster(shape, seed)
    cluster.run()
    counted = [each for each in cluster.records if each.arrived_at >= START_SECONDS + seconds / 3]
    met = sum(slo.met_by(each) for each in counted)
    firsts = sorted(each.first for each in counted if each.first is not None)
    figures = cluster.figures()
    return {
        **asdict(cell),
        "candidate": name,
        "offered_per_second": round(per_second, 3),
        "goodput": round(met / (seconds * 2 / 3), 3),
        "met_share": round(met / max(1, len(counted)), 4),
        "ttft_p50": quantile(firsts, 0.5),
        "ttft_p95": quantile(firsts, 0.95),
        "itl_p99": figures["itl_p99"],
        "completed_share": round(sum(each.completed for each in counted) / max(1, len(counted)), 4),
        "local_prompts": figures["local_prompts"],
        "moved_streams": sum(
            each.core.counters.migrations["migrated", "packed"] for each in cluster.all_routers
        ),
        "requests": len(cluster.records),
        "cpu_seconds": round(time.process_time() - began, 1),
    }


def compared(runs: Sequence[dict[str, object]]) -> dict[str, object]:
    """The goodput of a cell's candidates, and what the automatic one reaches of the better and of the worse other."""
    by_name = {str(run["candidate"]): float(str(run["goodput"])) for run in runs}
    apart = max((goodput for name, goodput in by_name.items() if name.startswith("apart")), default=0.0)
    others = [by_name["together"], *([apart] if apart else [])]
    return {
        **by_name,
        "by_the_better": round(by_name["automatic"] / max(others), 3) if max(others) else None,
        "by_the_worse": round(by_name["automatic"] / min(others), 3) if min(others) else None,
    }


def _run(job: tuple[Cell, str, float, int]) -> dict[str, object]:
    return run_candidate(*job)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Requests a second within targets: apart, together, automatic."
    )
    parser.add_argument("--loads", nargs="*", choices=LOADS, default=list(LOADS))
    parser.add_argument("--gpus", nargs="*", type=int, default=list(GPUS))
    parser.add_argument("--slos", nargs="*", choices=SLOS, default=list(SLOS))
    parser.add_argument("--offered", nargs="*", type=float, default=list(OFFERED))
    parser.add_argument("--seconds", type=float, default=120.0, help="in which requests come")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--runs", type=Path, help="file with a line of JSON for each run; those in it are not run again"
    )
    parser.add_argument("--picture", type=Path, help="PNG file that gets the table")
    options = parser.parse_args()
    cells = [
        Cell(load, gpus, slo, offered)
        for gpus in options.gpus
        for load in options.loads
        for slo in options.slos
        for offered in options.offered
    ]
    done: dict[tuple[Cell, str], dict[str, object]] = {}
    if options.runs is not None and options.runs.exists():
        for line in options.runs.read_text().splitlines():
            run = json.loads(line)
            done[Cell(run["load"], run["gpus"], run["slo"], run["offered"]), run["candidate"]] = run
    jobs = [
        (cell, name, options.seconds, options.seed)
        for cell in cells
        for name in cell.candidates()
        if (cell, name) not in done
    ]
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for run, (cell, name, *_) in zip(pool.imap(_run, jobs), jobs, strict=True):
            done[cell, name] = run
            if options.runs is not None:
                with options.runs.open("a") as file:
                    file.write(json.dumps(run) + "\n")
            if all((cell, each) in done for each in cell.candidates()):
                shown = compared([done[cell, each] for each in cell.candidates()])
                sys.stdout.write(
                    f"{cell.load:20} {cell.gpus:3} {cell.slo:9} {cell.offered}  {json.dumps(shown)}\n"
                )
                sys.stdout.flush()
    if options.picture is not None:
        draw_table(_panels(cells, done), options.picture)


def _panels(cells: Sequence[Cell], done: Mapping[tuple[Cell, str], dict[str, object]]) -> dict[str, Shares]:
    """What the automatic mode reaches in each cell: of the better of the others, and of the worse."""
    panels: dict[str, dict[tuple[str, str], float | None]] = {"by the better": {}, "by the worse": {}}
    for cell in cells:
        shown = compared([done[cell, name] for name in cell.candidates()])
        gpus = f"{cell.gpus} GPU{'s' if cell.gpus > 1 else ''}"
        place = cell.load, f"{gpus}, {cell.slo.replace('_', ', ')}, {cell.offered}"
        for title, by in (("by the better", "by_the_better"), ("by the worse", "by_the_worse")):
            share = shown[by]
            panels[title][place] = None if share is None else float(str(share))
    return {
        "requests within targets, automatic by the better of together and apart": panels["by the better"],
        "… by the worse": panels["by the worse"],
    }


if __name__ == "__main__":
    main()
