"""What the reader of a stream waits for between the first token and the second, in parts, at so many rows of decode.

    first token ── queue ──► sent to decode ── fetch ──► pages there ── joining ──► in a step ── first_step ──► second

Clients ask for a prompt of 4,000 tokens, again and again, so many that decode has as many rows. Steps take what a dense
model of 14.8 billion weights takes on an H200, by its work and bytes (`never_slower`); a fetch takes its bytes by the
rate of the link. The parts are those of `/debug/requests/{id}`, as the router measures them.

    python -m tests.proofs.gap
    python -m tests.proofs.gap --rows 1 8 --link 10e9
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from decode.config import DecodeConfig
from prefill.config import PrefillConfig
from router.core.counters import GapPart
from tests.benchmarks.virtual_cluster.cluster import START_SECONDS, ClusterShape, VirtualCluster
from tests.benchmarks.virtual_cluster.fabric import FabricSpeed
from tests.benchmarks.virtual_cluster.figures import AnswerRecord, quantile
from tests.benchmarks.virtual_cluster.never_slower import KV_TOKEN, PAGE_SIZE, POOL_BYTES, TIMES
from tests.benchmarks.virtual_cluster.trace import TracedRequest
from tests.benchmarks.virtual_cluster.worker import WorkerShape
from tests.proofs.proof import Promise, ProofResult

PARTS: tuple[GapPart, ...] = get_args(GapPart)
TURNS = 8
ROWS_OF_PREFILL = 12  # of decode, that one prefill worker keeps busy
# Beside the bytes: the command waits for the turn in which it is read, what has landed for the next turn and for the
# step that was launched ahead, and then there is its own step.
STEPS_MOST = 3.5


@dataclass(frozen=True, slots=True, kw_only=True)
class GapLoad:
    """Clients that each have one request at a time."""

    rows: int
    link: float  # bytes a second
    prompt: int = 4_000
    output: int = 200
    turns: int = TURNS  # of each client

    @property
    def fetch_seconds(self) -> float:
        """Of the bytes of a prompt, by the link alone."""
        return -(-self.prompt // PAGE_SIZE) * PAGE_SIZE * KV_TOKEN / self.link

    @property
    def step_seconds(self) -> float:
        """Of a step with all rows."""
        context = self.prompt + self.output / 2
        return max(TIMES.weights, self.rows * TIMES.token) + self.rows * context * TIMES.context_token

    def run(self, seed: int) -> VirtualCluster:
        """Serve them all."""
        first = [self._request(number, number / self.rows) for number in range(self.rows)]

        def follow_up(record: AnswerRecord) -> TracedRequest | None:
            number = record.traced.number + self.rows
            return (
                self._request(number, record.ended_at - START_SECONDS)
                if number < self.rows * self.turns
                else None
            )

        pool = POOL_BYTES // KV_TOKEN // PAGE_SIZE * PAGE_SIZE
        prompts = PrefillConfig(page_size=PAGE_SIZE, chunked_prefill_size=2_048, tenant_share_max=1.0)
        streams = DecodeConfig(page_size=PAGE_SIZE, max_running_requests=256, tenant_share_max=1.0)
        page_bytes = PAGE_SIZE * KV_TOKEN
        cluster = VirtualCluster(
            ClusterShape(
                prefill=WorkerShape(config=prompts, pool_tokens=pool, page_bytes=page_bytes, times=TIMES),
                decode=WorkerShape(config=streams, pool_tokens=pool, page_bytes=page_bytes, times=TIMES),
                trace=lambda _: iter(first),
                seconds=1.0,
                prefill_workers=-(-self.rows // ROWS_OF_PREFILL),
                router={"tenant_share_max": 1.0, "local_prefill": "never"},
                fabric=FabricSpeed(bytes_per_second=self.link),
                judges_tokens=True,
                follow_up=follow_up,
            ),
            seed,
        )
        cluster.run()
        return cluster

    def _request(self, number: int, at: float) -> TracedRequest:
        return TracedRequest(
            number=number,
            at=at,
            prompt_len=self.prompt,
            output_len=self.output,
            max_new_tokens=self.output,
        )


def parts_of(cluster: VirtualCluster) -> Mapping[GapPart, list[float]]:
    """Each part of each hand-over, in the same order."""
    counters = [router.core.counters for router in cluster.all_routers]
    return {
        part: [seconds for each in counters for seconds in getattr(each, f"second_token_{part}")]
        for part in PARTS
    }


def _milliseconds(seconds: Sequence[float], share: float) -> float:
    return round(1e3 * (quantile(sorted(seconds), share) or 0.0), 2)


def prove(rows: Sequence[int], link: float, seed: int, turns: int = TURNS) -> ProofResult:
    """Run each number of rows, and show the median and the 99th percentile of each part."""
    promises: list[Promise] = []
    seen: dict[str, object] = {}
    for count in rows:
        load = GapLoad(rows=count, link=link, turns=turns)
        cluster = load.run(seed)
        parts = parts_of(cluster)
        gaps = [sum(each) for each in zip(*parts.values(), strict=True)]
        beside = [(gap - load.fetch_seconds) / load.step_seconds for gap in gaps]
        name = f"{count} rows"
        seen[f"{name}: gap, ms"] = (_milliseconds(gaps, 0.5), _milliseconds(gaps, 0.99))
        seen |= {
            f"{name}: … {part}": (_milliseconds(parts[part], 0.5), _milliseconds(parts[part], 0.99))
            for part in PARTS
        }
        seen[f"{name}: bytes by the link alone, and a step"] = (
            round(1e3 * load.fetch_seconds, 2),
            round(1e3 * load.step_seconds, 2),
        )
        promises += [
            Promise(f"{name}: hand-overs", len(gaps), least=count * turns),
            Promise(f"{name}: tokens different", sum(each.different for each in cluster.records), 0, 0),
            Promise(
                f"{name}: gap beside the bytes, median, steps",
                round(quantile(sorted(beside), 0.5) or 0.0, 2),
                most=STEPS_MOST,
            ),
        ]
    return ProofResult(tuple(promises), seen)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.proofs.gap",
        description="The gap between the first and the second token, in parts: median and 99th percentile, ms.",
    )
    parser.add_argument("--rows", nargs="*", type=int, default=(1, 8, 32, 64), help="of decode")
    parser.add_argument("--link", type=float, default=40e9, help="bytes a second of a decode worker's reads")
    parser.add_argument("--turns", type=int, default=TURNS, help="requests of each client")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    return prove(options.rows, options.link, options.seed, options.turns).show()


if __name__ == "__main__":
    sys.exit(main())
