"""The cascade with real processes: three workers are killed one after the other, and no token of any answer changes.

    conversations ask, read, ask …          24 of them
    30 s: the busiest worker of a role gets SIGKILL ─► 60 s: another ─► 90 s: a third ─► … ─► all ask no more

`segue up` runs the deployment and starts a killed worker again, as Kubernetes would. Afterwards the same requests are
asked once more and nothing happens to them: their answers are what the others have to be, token by token. The model is
the small one, cut, on this machine's cores: what clients wait for is what these can do, and more where they are busy.

    python -m tests.proofs.real_cascade
    python -m tests.proofs.real_cascade --victims decode prefill decode
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import openai

from shared.wire.messages import WORKER_ROLES, WorkerRole
from tests.integration.deployments.deployment import LocalDeployment, deployment
from tests.integration.deployments.observing import busy_worker
from tests.integration.deployments.streams import client_of
from tests.proofs.cascade import TTFT_SLO_SECONDS
from tests.proofs.proof import Promise, ProofResult
from tests.proofs.real_clients import ClientRecord, continued, different_tokens, follow, words
from tests.waiting import until

PATIENCE_SECONDS = 180.0  # of a client, for a whole answer
TURNS = 6  # of a conversation; then its client begins another


@dataclass(frozen=True, slots=True, kw_only=True)
class RealCascadeSize:
    """How much of it is run."""

    sessions: int = 24
    victims: tuple[WorkerRole, ...] = ("decode", "decode", "decode")
    between_seconds: float = 30.0  # before each kill, and after the last
    first_prompt: tuple[int, int] = (60, 200)  # tokens, at least and at most
    further_prompt: tuple[int, int] = (10, 40)
    output: tuple[int, int] = (40, 160)


@dataclass(slots=True)
class RealCascade:
    """One run."""

    running: LocalDeployment
    size: RealCascadeSize
    seed: int
    records: list[ClientRecord] = field(default_factory=list)
    streams_hit: dict[str, int] = field(default_factory=dict)  # that a victim had when it was killed
    _over: threading.Event = field(default_factory=threading.Event)

    async def run(self) -> list[ClientRecord]:
        """Live through it, and then without the kills; returns the undisturbed records, in the same order."""
        size, running = self.size, self.running
        async with client_of(running.url) as client:
            sessions = [
                asyncio.create_task(self._converse(client, number)) for number in range(size.sessions)
            ]
            try:
                await asyncio.to_thread(self._kill_in_turn)
            finally:
                self._over.set()
            await asyncio.gather(*sessions)
            await asyncio.to_thread(until, running.all_linked, 120, "the return of all workers")
            self.records.sort(key=lambda record: record.number)
            undisturbed = [record.again() for record in self.records]
            gate = asyncio.Semaphore(size.sessions)

            async def ask(record: ClientRecord) -> None:
                async with gate:
                    await follow(client, record, PATIENCE_SECONDS)

            await asyncio.gather(*map(ask, undisturbed))
            return undisturbed

    async def _converse(self, client: openai.AsyncOpenAI, number: int) -> None:
        size, rng = self.size, random.Random(f"{self.seed} session {number}")
        said, turn = list[int](), 0
        while not self._over.is_set():
            new = words(rng, size.further_prompt if turn % TURNS else size.first_prompt)
            said = [*said, *new] if turn % TURNS else new
            record = ClientRecord(number + size.sessions * turn, said, rng.randint(*size.output))
            self.records.append(record)
            await follow(client, record, PATIENCE_SECONDS)
            said, turn = [*said, *record.token_ids], turn + 1

    def _kill_in_turn(self) -> None:
        for role in self.size.victims:
            self._over.wait(self.size.between_seconds)
            victim = busy_worker(self.running, role)
            held = int(self.running.metrics(victim)["segue_slots_used"])
            os.kill(victim.pid, signal.SIGKILL)
            self.streams_hit[f"{len(self.streams_hit) + 1}: {victim.uid}"] = held
        self._over.wait(self.size.between_seconds)


def prove(running: LocalDeployment, size: RealCascadeSize, seed: int) -> ProofResult:
    """Run it, and compare what clients have seen with what is promised."""
    cascade, before = RealCascade(running, size, seed), continued(running)
    undisturbed = asyncio.run(cascade.run())
    until(lambda: not running.held(), 60, "everything given back")
    records, after = cascade.records, continued(running)
    firsts = sorted(record.first for record in records if record.first is not None)
    calm = sorted(record.first for record in undisturbed if record.first is not None)
    more = {cause: after[cause] - before.get(cause, 0.0) for cause in after}
    within = sum(first <= TTFT_SLO_SECONDS for first in firsts)
    zero = partial(Promise, least=0, most=0)
    return ProofResult(
        (
            Promise("workers killed", len(cascade.streams_hit), least=len(size.victims)),
            Promise("requests", len(records), least=size.sessions),
            zero(
                "failed", sum(not record.completed for record in records), others="17; 409 without a shadow"
            ),
            zero("failed without a kill", sum(not record.completed for record in undisturbed)),
            zero("tokens different", different_tokens(records, undisturbed), others="not compared"),
            Promise(
                f"first token within {TTFT_SLO_SECONDS:g} s, share of all",
                round(within / len(records), 4),
                least=0.9,
                others="907 of 1,017 done: 0.89",
            ),
            Promise("longest pause within a stream, s", round(max(r.pause for r in records), 2), most=15.0),
        ),
        {
            "requests on each when it was killed": cascade.streams_hit,
            "attempts after the first, by cause": {cause: count for cause, count in more.items() if count},
            "tokens": sum(len(record.token_ids) for record in records),
            "longest prompt, tokens": max(len(record.prompt) for record in records),
            "first token, median and longest, s": (round(firsts[len(firsts) // 2], 2), round(firsts[-1], 2)),
            "… without a kill": (round(calm[len(calm) // 2], 2), round(calm[-1], 2)),
            "longest pause without a kill, s": round(max(record.pause for record in undisturbed), 2),
            "answers that ended in an error": [
                f"{record.status} {record.error or record.finish_reason}"
                for record in (*records, *undisturbed)
                if not record.completed
            ],
        },
    )


def main(arguments: Sequence[str] | None = None) -> int:
    usual = RealCascadeSize()
    parser = argparse.ArgumentParser(
        prog="python -m tests.proofs.real_cascade",
        description="Worker processes are killed one after the other while conversations run.",
    )
    parser.add_argument("--sessions", type=int, default=usual.sessions)
    parser.add_argument("--prefill", type=int, default=2, help="workers")
    parser.add_argument("--decode", type=int, default=4, help="workers")
    parser.add_argument("--victims", nargs="*", choices=WORKER_ROLES, default=usual.victims)
    parser.add_argument("--between-seconds", type=float, default=usual.between_seconds)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    size = RealCascadeSize(
        sessions=options.sessions, victims=tuple(options.victims), between_seconds=options.between_seconds
    )
    flags = ("--prefill", str(options.prefill), "--decode", str(options.decode))
    pages = {"config": {"prefill": {"kvPages": 1200}, "decode": {"kvPages": 1200}}}
    with deployment(*flags, **pages) as running:  # type: ignore[arg-type]
        return prove(running, size, options.seed).show()


if __name__ == "__main__":
    sys.exit(main())
