"""A fleet whose workers come and go all the time answers every request, or refuses it soon and says why.

    2,480 workers join, 1,490 leave ─── 12 minutes ───  15,000 requests, half of them in bursts, one a minute
                                          └─ all decode workers are gone for 10 s; later all prefill workers

Half of those that leave are asked to, and move their streams first; a quarter is killed; of a quarter nobody hears so
until its links have been silent for 3 s. The fleet begins with 600 workers. While all decode workers are gone there are
refusals to judge. The routers' cores, the schedulers, their event loop and drain are the real ones; steps, links and
fetches take modelled times. A token is right if it is the next one of its request: pages hold nothing here.

    python -m tests.proofs.churn
    python -m tests.proofs.churn --scale 0.1
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from decode.config import DecodeConfig
from prefill.config import PrefillConfig
from router.core.effects import RequestFailed
from shared.wire.messages import WorkerRole
from tests.benchmarks.virtual_cluster.cluster import (
    START_SECONDS,
    ClusterShape,
    RequestsHangError,
    VirtualCluster,
)
from tests.benchmarks.virtual_cluster.device import StepTimes
from tests.benchmarks.virtual_cluster.figures import AnswerRecord
from tests.benchmarks.virtual_cluster.trace import TracedRequest, lognormal
from tests.benchmarks.virtual_cluster.worker import WorkerShape
from tests.proofs.proof import Promise, ProofResult

TIMES = StepTimes(extend=0.005, extend_token=0.00003, decode=0.020, decode_row=0.0002)
PREFILL_SHARE = 1 / 3  # of the workers that join
SILENCE_SECONDS = 3.0  # the product's setting
TTFT_TARGET_SECONDS = 2.0  # the router's setting: what cannot have its first token by then is refused …
REFUSED_SECONDS = TTFT_TARGET_SECONDS + SILENCE_SECONDS  # … if its worker is not gone unheard just then
HUNG_SECONDS = 60.0  # without a token or an end; a stream may wait as long for a worker that restarts
BURST_EVERY_SECONDS = 60.0
OUTAGE_SECONDS = 10.0
ASKED, KILLED, UNHEARD = LEAVES = ("asked to leave", "killed", "gone unheard")
OUTAGES: tuple[tuple[float, WorkerRole], ...] = ((1 / 6, "decode"), (1 / 3, "prefill"))  # when, of the whole


@dataclass(frozen=True, slots=True, kw_only=True)
class ChurnSize:
    """How much of it is run."""

    joins: int = 2_480
    leaves: int = 1_490
    seconds: float = 720.0
    requests: int = 15_000
    prefill_workers: int = 200  # at first
    decode_workers: int = 400
    routers: int = 3

    def scaled(self, scale: float) -> ChurnSize:
        """A part of the fleet and of what happens to it, in the same time: a worker lives as long."""
        return replace(
            self,
            joins=round(self.joins * scale),
            leaves=round(self.leaves * scale),
            requests=round(self.requests * scale),
            prefill_workers=round(self.prefill_workers * scale),
            decode_workers=round(self.decode_workers * scale),
        )


@dataclass(slots=True)
class Churn:
    """What happens to the fleet of one run."""

    size: ChurnSize
    seed: int

    def run(self) -> VirtualCluster:
        """Live through it."""
        size = self.size
        cluster = VirtualCluster(
            ClusterShape(
                prefill=WorkerShape(
                    config=PrefillConfig(chunked_prefill_size=2_048), pool_tokens=262_144, times=TIMES
                ),
                decode=WorkerShape(config=DecodeConfig(), pool_tokens=131_072, times=TIMES),
                prefill_workers=size.prefill_workers,
                decode_workers=size.decode_workers,
                routers=size.routers,
                router={"ttft_target_seconds": TTFT_TARGET_SECONDS},
                trace=self._trace,
                seconds=size.seconds,
                faults=(self._churn,),
                judges_tokens=True,
            ),
            self.seed,
        )
        with suppress(RequestsHangError):  # they have no outcome, and are counted
            cluster.run()
        return cluster

    def _trace(self, rng: random.Random) -> Iterator[TracedRequest]:
        size = self.size
        bursts = max(1, round(size.seconds / BURST_EVERY_SECONDS))
        steady = [rng.uniform(0, size.seconds) for _ in range(size.requests // 2)]
        bursty = [
            5.0 + BURST_EVERY_SECONDS * (index % bursts) + rng.random()
            for index in range(size.requests - len(steady))
        ]
        for number, at in enumerate(sorted(steady + bursty)):
            yield TracedRequest(
                number=number,
                at=at,
                prompt_len=lognormal(rng, 1_020, 1_155, 20, 6_000),
                output_len=lognormal(rng, 129, 211, 1, 1_500),
                max_new_tokens=1_500,
            )

    def _churn(self, cluster: VirtualCluster) -> None:
        rng = random.Random(f"{self.seed} churn")
        size, timeline = self.size, cluster.timeline
        outages = {share * size.seconds: role for share, role in OUTAGES}
        for begin, gone in outages.items():
            timeline.at(START_SECONDS + begin, lambda gone=gone: self._outage(cluster, gone))  # type: ignore[misc]
        for number in range(size.joins):
            role: WorkerRole = "prefill" if rng.random() < PREFILL_SHARE else "decode"
            seconds = rng.uniform(0, size.seconds)
            for begin, gone in outages.items():  # nobody of the role comes while it is gone
                if role == gone and begin <= seconds < begin + OUTAGE_SECONDS:
                    seconds = begin + OUTAGE_SECONDS
            join = partial(self._join, cluster, role, f"{role}-joined-{number}")
            timeline.at(START_SECONDS + seconds, join)
        for _ in range(size.leaves):
            timeline.at(START_SECONDS + rng.uniform(0, size.seconds), partial(self._leave, cluster, rng))

    def _join(self, cluster: VirtualCluster, role: WorkerRole, uid: str) -> None:
        cluster.events["joined"] += 1
        cluster.start_worker(role, uid)

    def _outage(self, cluster: VirtualCluster, role: WorkerRole) -> None:
        for worker in [each for each in cluster.workers.values() if each.hello.role == role]:
            cluster.events[f"{role} gone in an outage, besides"] += 1
            cluster.end_worker(worker)

    def _leave(self, cluster: VirtualCluster, rng: random.Random) -> None:
        """One that is not leaving already, drawn; a second later if there is none."""
        staying = [each for each in cluster.workers.values() if not each.draining]
        if not staying:
            cluster.timeline.after(1.0, partial(self._leave, cluster, rng))
            return
        worker, how = rng.choice(staying), rng.random()
        if how < 0.5:
            cluster.events[ASKED] += 1
            worker.sigterm(lambda: cluster.end_worker(worker))
        elif how < 0.75:
            cluster.events[KILLED] += 1
            cluster.end_worker(worker)
        else:
            cluster.events[UNHEARD] += 1
            cluster.end_worker(worker, SILENCE_SECONDS)


def _silence(record: AnswerRecord, now: float) -> float:
    """The longest time in which a client has seen nothing, in seconds."""
    ended = record.ended_at if record.outcome is not None else now
    return max(record.first or 0.0, record.pause, ended - record.arrived_at - record.last)


def prove(size: ChurnSize, seed: int) -> ProofResult:
    """Run it, and compare what clients have seen with what is promised."""
    cluster = Churn(size, seed).run()
    records, events = cluster.records, cluster.events
    silences = sorted(_silence(each, cluster.timeline.now) for each in records)
    hung = sum(each.outcome is None for each in records) + sum(each > HUNG_SECONDS for each in silences)
    refused = [each for each in records if isinstance(each.outcome, RequestFailed) and not each.tokens]
    reasons = Counter(
        f"{each.outcome.status} {each.outcome.code or each.outcome.message}"
        for each in refused
        if isinstance(each.outcome, RequestFailed)
    )
    figures = cluster.figures()
    return ProofResult(
        (
            Promise("requests", len(records), least=size.requests, others="1,536"),
            Promise("workers joined", events["joined"], least=size.joins, others="248"),
            Promise("workers left", sum(events[how] for how in LEAVES), least=size.leaves, others="149"),
            Promise("hung", hung, 0, 0, others="1.6 % of them"),
            Promise(
                "200 without a finish reason",
                sum(each.broken for each in records),
                0,
                0,
                others="not counted",
            ),
            Promise("tokens different", sum(each.different for each in records), 0, 0, others="not compared"),
            Promise(
                "refused without a reason",
                sum(not each.outcome.message for each in refused if isinstance(each.outcome, RequestFailed)),
                0,
                0,
            ),
            Promise(
                "longest until a refusal, s",
                round(max((each.ended_at - each.arrived_at for each in refused), default=0.0), 3),
                most=REFUSED_SECONDS,
                others="none: > 330 s without a word",
            ),
        ),
        {
            "fleet": dict(events),
            "workers at the end": len(cluster.workers),
            "refused, of all": f"{len(refused)} ({len(refused) / len(records):.2%})",
            "… and why": dict(reasons),
            "streams continued elsewhere": figures["continuations"],
            "streams migrated": figures["migrations"],
            "first token, median and p99, s": (figures["ttft_p50"], figures["ttft_p99"]),
            "longest in which a client saw nothing, s": round(silences[-1], 3),
            "virtual seconds": figures["virtual_seconds"],
        },
    )


def main(arguments: Sequence[str] | None = None) -> int:
    usual = ChurnSize()
    parser = argparse.ArgumentParser(
        prog="python -m tests.proofs.churn", description="Workers join and leave all the time under requests."
    )
    parser.add_argument("--joins", type=int, default=usual.joins)
    parser.add_argument("--leaves", type=int, default=usual.leaves)
    parser.add_argument("--requests", type=int, default=usual.requests)
    parser.add_argument("--seconds", type=float, default=usual.seconds)
    parser.add_argument("--routers", type=int, default=usual.routers)
    parser.add_argument(
        "--scale",
        type=float,
        default=1.0,
        help="a part of the fleet, of what happens to it and of the requests",
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    size = ChurnSize(
        joins=options.joins,
        leaves=options.leaves,
        requests=options.requests,
        seconds=options.seconds,
        routers=options.routers,
    )
    return prove(size.scaled(options.scale), options.seed).show()


if __name__ == "__main__":
    sys.exit(main())
