"""Three workers are killed one after the other while conversations run: no request fails, no token differs.

    sessions ask, read, think, ask …        24 of them, 42 turns each
    60 s: a decode worker is killed ─► 120 s: another ─► 180 s: a third; each is back 180 s after its death

Steps take what a dense model of 14.8 billion weights takes on an H200, by its work and bytes (`never_slower`). Every
device computes the oracle's model on pages of its own, so a stale page or a doubled token would show in the text. The
router's core, both schedulers and their event loop are the real ones; steps, links and the KV fabric are modelled.

    python -m tests.proofs.cascade
    python -m tests.proofs.cascade --victims decode prefill decode --silence-seconds 3
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import get_args

from decode.config import DecodeConfig
from prefill.config import PrefillConfig
from router.core.effects import RequestFailed
from router.placement_policies import LocalPrefill
from shared.wire.messages import WORKER_ROLES, WorkerRole
from shared.wire.sampling_params import SamplingParams
from tests.benchmarks.virtual_cluster.cluster import (
    START_SECONDS,
    ClusterShape,
    RequestsHangError,
    VirtualCluster,
)
from tests.benchmarks.virtual_cluster.device import output_seed
from tests.benchmarks.virtual_cluster.fabric import FabricSpeed
from tests.benchmarks.virtual_cluster.figures import AnswerRecord
from tests.benchmarks.virtual_cluster.never_slower import KV_TOKEN, PAGE_SIZE, POOL_BYTES, TIMES
from tests.benchmarks.virtual_cluster.oracle import OracleText
from tests.benchmarks.virtual_cluster.trace import TracedRequest
from tests.benchmarks.virtual_cluster.worker import WorkerShape
from tests.proofs.proof import Promise, ProofResult

TTFT_SLO_SECONDS = 5.0  # as in the published run
POOL_TOKENS = POOL_BYTES // KV_TOKEN
CONTEXT_LEN = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class CascadeSize:
    """How much of it is run."""

    sessions: int = 24
    turns: int = 42  # of each session
    prefill_workers: int = 2
    decode_workers: int = 4
    victims: tuple[WorkerRole, ...] = ("decode", "decode", "decode")
    between_seconds: float = 60.0  # before each kill
    back_seconds: float = 180.0  # from a death until the worker is back
    silence_seconds: float | None = None  # until others notice a death; None: its connections end with it
    local_prefill: LocalPrefill = "fallback"
    pool_tokens: int = POOL_TOKENS  # of each worker
    first_prompt: tuple[int, int] = (1_000, 3_000)  # tokens, at least and at most
    further_prompt: tuple[int, int] = (50, 300)
    output: tuple[int, int] = (60, 300)
    thinking: tuple[float, float] = (1.0, 5.0)  # seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class SaidRequest(TracedRequest):
    """A turn of a conversation whose texts are known."""

    said: tuple[int, ...]
    text: tuple[int, ...]

    def prompt(self) -> tuple[int, ...]:
        return self.said

    def output(self) -> tuple[int, ...]:
        return self.text


@dataclass(slots=True)
class ChatSession:
    """One client: it asks, reads the whole answer, thinks and asks again."""

    number: int
    size: CascadeSize
    rng: random.Random
    turn: int = 0
    text: OracleText = field(default_factory=OracleText)

    def ask(self, now: float) -> TracedRequest | None:
        """Its next request, some seconds after `now`; None: it has said everything."""
        size, rng = self.size, self.rng
        if self.turn == size.turns:
            return None
        new = rng.randbytes(rng.randint(*(size.further_prompt if self.turn else size.first_prompt)))
        output_len = rng.randint(*size.output)
        number = self.number + size.sessions * self.turn
        self.turn += 1
        said = (*self.text.token_ids, *new)
        params = SamplingParams(max_new_tokens=output_len, seed=output_seed(number, output_len))
        return SaidRequest(
            number=number,
            at=now + rng.uniform(*size.thinking),
            prompt_len=len(said),
            output_len=output_len,
            max_new_tokens=output_len,
            said=said,
            text=self.text.answer(new, output_len, params),
        )


@dataclass(slots=True)
class Cascade:
    """One run."""

    size: CascadeSize
    seed: int
    streams_hit: list[int] = field(default_factory=list)  # that ran on each victim

    def run(self) -> VirtualCluster:
        """Live through it."""
        size = self.size
        sessions = [
            ChatSession(number, size, random.Random(f"{self.seed} session {number}"))
            for number in range(size.sessions)
        ]
        first = [each for session in sessions if (each := session.ask(0.0)) is not None]

        def follow_up(record: AnswerRecord) -> TracedRequest | None:
            return sessions[record.traced.number % size.sessions].ask(record.ended_at - START_SECONDS)

        pages = {
            "pool_tokens": size.pool_tokens,
            "context_len": CONTEXT_LEN,
            "page_bytes": PAGE_SIZE * KV_TOKEN,
        }
        cluster = VirtualCluster(
            ClusterShape(
                prefill=WorkerShape(
                    config=PrefillConfig(page_size=PAGE_SIZE, chunked_prefill_size=2_048),
                    times=TIMES,
                    oracle=True,
                    **pages,
                ),
                decode=WorkerShape(
                    config=DecodeConfig(page_size=PAGE_SIZE, local_tokens_max=2_048),
                    times=TIMES,
                    oracle=True,
                    **pages,
                ),
                trace=lambda _: iter(sorted(first, key=lambda each: each.at)),
                seconds=size.between_seconds * (1 + len(size.victims)),
                prefill_workers=size.prefill_workers,
                decode_workers=size.decode_workers,
                router={"local_prefill": size.local_prefill},
                fabric=FabricSpeed(bytes_per_second=40e9),
                faults=(self._kill_in_turn,),
                judges_tokens=True,
                follow_up=follow_up,
            ),
            self.seed,
        )
        with suppress(RequestsHangError):  # they have not completed, and count as failed
            cluster.run()
        return cluster

    def _kill_in_turn(self, cluster: VirtualCluster) -> None:
        for turn, role in enumerate(self.size.victims, start=1):
            at = START_SECONDS + turn * self.size.between_seconds
            cluster.timeline.at(at, lambda role=role: self._kill(cluster, role))  # type: ignore[misc]

    def _kill(self, cluster: VirtualCluster, role: WorkerRole) -> None:
        """The worker of this role with the most requests dies."""
        running = [worker for worker in cluster.workers.values() if worker.hello.role == role]
        victim = max(running, key=lambda worker: len(worker.scheduler.requests))
        self.streams_hit.append(len(victim.scheduler.requests))
        cluster.events[f"{role} killed"] += 1
        uid = victim.hello.uid
        cluster.end_worker(victim, self.size.silence_seconds)
        cluster.timeline.after(self.size.back_seconds, lambda: cluster.start_worker(role, uid))


def prove(size: CascadeSize, seed: int) -> ProofResult:
    """Run it, and compare what clients have seen with what is promised."""
    cascade = Cascade(size, seed)
    cluster = cascade.run()
    records = cluster.records
    figures = cluster.figures()
    completed = [each for each in records if each.completed]
    firsts = [each.first for each in completed if each.first is not None]
    failed = [each.outcome for each in records if isinstance(each.outcome, RequestFailed)]
    return ProofResult(
        (
            Promise("requests", len(records), least=size.sessions * size.turns, others="1,034"),
            Promise("failed", len(records) - len(completed), 0, 0, others="17; 409 without a shadow"),
            Promise("tokens different", sum(each.different for each in records), 0, 0, others="not compared"),
            Promise(
                f"first token within {TTFT_SLO_SECONDS:g} s, share of all",
                round(sum(first <= TTFT_SLO_SECONDS for first in firsts) / len(records), 4),
                least=0.95,
                others="907 of 1,017 done: 0.89",
            ),
            Promise(
                "longest pause within a stream, s", round(max(each.pause for each in records), 3), most=5.0
            ),
        ),
        {
            "killed": dict(cluster.events),
            "requests on each when it was killed": cascade.streams_hit,
            "streams continued elsewhere": figures["continuations"],
            "first token, median and longest, s": (figures["ttft_p50"], round(max(firsts, default=0.0), 3)),
            "gap between tokens, median and p99, s": (figures["itl_p50"], figures["itl_p99"]),
            "tokens": sum(each.tokens for each in records),
            "longest prompt, tokens": max(each.traced.prompt_len for each in records),
            "computed on decode": figures["local_prompts"],
            "virtual seconds": figures["virtual_seconds"],
            "answers that ended in an error": [f"{each.status} {each.message}" for each in failed],
        },
    )


def main(arguments: Sequence[str] | None = None) -> int:
    usual = CascadeSize()
    parser = argparse.ArgumentParser(
        prog="python -m tests.proofs.cascade",
        description="Workers are killed one after the other while conversations run.",
    )
    parser.add_argument("--sessions", type=int, default=usual.sessions)
    parser.add_argument("--turns", type=int, default=usual.turns, help="requests of each session")
    parser.add_argument("--prefill", type=int, default=usual.prefill_workers, help="workers")
    parser.add_argument("--decode", type=int, default=usual.decode_workers, help="workers")
    parser.add_argument("--victims", nargs="*", choices=WORKER_ROLES, default=usual.victims)
    parser.add_argument("--between-seconds", type=float, default=usual.between_seconds)
    parser.add_argument(
        "--back-seconds", type=float, default=usual.back_seconds, help="from a death until its pod is back"
    )
    parser.add_argument(
        "--silence-seconds",
        type=float,
        help="the machine is gone, not only the process: so long nobody knows; 3 is the product's setting",
    )
    parser.add_argument(
        "--local-prefill",
        choices=get_args(LocalPrefill),
        default=usual.local_prefill,
        help="as of the router",
    )
    parser.add_argument("--pool-tokens", type=int, default=usual.pool_tokens, help="of each worker")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    size = CascadeSize(
        sessions=options.sessions,
        turns=options.turns,
        prefill_workers=options.prefill,
        decode_workers=options.decode,
        victims=tuple(options.victims),
        between_seconds=options.between_seconds,
        back_seconds=options.back_seconds,
        silence_seconds=options.silence_seconds,
        local_prefill=options.local_prefill,
        pool_tokens=options.pool_tokens,
    )
    return prove(size, options.seed).show()


if __name__ == "__main__":
    sys.exit(main())
