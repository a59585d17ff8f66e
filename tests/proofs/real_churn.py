"""Churn with real processes: workers join and leave for twelve minutes, and every request ends well or soon says why.

    149 leave, each comes again ─── 12 minutes ─── 1,500 requests, half of them in bursts of a second, one a minute

Half of those that leave are asked to (SIGTERM: their streams go on elsewhere); a quarter is killed; a quarter stands
still for longer than links may be silent, and is killed then. Who leaves is drawn of those that are ready, and often
has nothing. So every other one of the killed, the first included, is one that has a stream just then, as the router
says. `segue up` starts each again, so as many join as leave: the fleet cannot grow on one machine. A worker that comes
has the address of one that left, and nothing else of it.

    python -m tests.proofs.real_churn
    python -m tests.proofs.real_churn --leaves 20 --requests 200 --seconds 100
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from time import monotonic

import httpx2
import openai

from shared.process.process_config import ProcessConfig
from tests.integration.deployments.deployment import LocalDeployment, RunningProcess, deployment
from tests.integration.deployments.streams import client_of
from tests.proofs.churn import ASKED, BURST_EVERY_SECONDS, HUNG_SECONDS, KILLED, LEAVES, UNHEARD
from tests.proofs.proof import Promise, ProofResult
from tests.proofs.real_clients import ClientRecord, continued, follow, words
from tests.waiting import until

REFUSED_SECONDS = 5.0
PATIENCE_SECONDS = 240.0  # of a client, for a whole answer
STILL_SECONDS = ProcessConfig().silence_seconds + 1.0
LOOK_SECONDS = 0.01  # between two looks for a stream
ARRIVED_SECONDS = 0.1  # until the router has got all that a worker has said before it stood still
NAMES = {signal.SIGTERM: ASKED, signal.SIGKILL: KILLED, signal.SIGSTOP: UNHEARD}
WAYS = (signal.SIGTERM, signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP)  # in turns


@dataclass(frozen=True, slots=True, kw_only=True)
class RealChurnSize:
    """How much of it is run."""

    leaves: int = 149
    requests: int = 1_500
    seconds: float = 720.0
    prompt: tuple[int, int] = (20, 200)  # tokens, at least and at most
    output: tuple[int, int] = (5, 60)


@dataclass(slots=True)
class RealChurn:
    """One run."""

    running: LocalDeployment
    size: RealChurnSize
    seed: int
    records: list[ClientRecord] = field(default_factory=list)
    left: Counter[str] = field(default_factory=Counter)
    cut: int = 0  # streams whose worker was killed for having them
    came: set[int] = field(default_factory=set)  # processes that were ready, besides those of the beginning
    _gone: set[int] = field(default_factory=set)  # processes that were asked to leave, or made to
    _over: threading.Event = field(default_factory=threading.Event)
    _answered: threading.Event = field(default_factory=threading.Event)  # all requests have ended

    async def run(self) -> None:
        """Live through it."""
        size = self.size
        churning = asyncio.create_task(asyncio.to_thread(self._churn))
        asked = list[asyncio.Task[None]]()
        began_at = monotonic()
        async with client_of(self.running.url) as client:
            for at, record in self._plan():
                if churning.done():
                    break
                await asyncio.to_thread(self._over.wait, max(0.0, began_at + at - monotonic()))
                self.records.append(record)
                asked.append(asyncio.create_task(self._ask(client, record)))
            await asyncio.gather(*asked)
            self._answered.set()
            await churning
        assert len(self.records) == size.requests, "the churn ended before"

    async def _ask(self, client: openai.AsyncOpenAI, record: ClientRecord) -> None:
        await follow(client, record, PATIENCE_SECONDS)

    def _plan(self) -> Iterator[tuple[float, ClientRecord]]:
        """Requests and when they are asked, in seconds from the beginning."""
        size, rng = self.size, random.Random(f"{self.seed} requests")
        bursts = max(1, round(size.seconds / BURST_EVERY_SECONDS))
        steady = [rng.uniform(0, size.seconds) for _ in range(size.requests // 2)]
        bursty = [
            5.0 + BURST_EVERY_SECONDS * (number % bursts) + rng.random()
            for number in range(size.requests - len(steady))
        ]
        for number, at in enumerate(sorted(steady + bursty)):
            yield at, ClientRecord(number, words(rng, size.prompt), rng.randint(*size.output))

    def _churn(self) -> None:
        """Every so many seconds a worker leaves, drawn of those that are ready."""
        size, rng = self.size, random.Random(f"{self.seed} churn")
        began_at, first = monotonic(), {process.pid for process in self.running.processes()}
        frozen = list[threading.Thread]()
        for number in range(size.leaves):
            self._over.wait(max(0.0, began_at + number * size.seconds / size.leaves - monotonic()))
            while not (ready := self._ready(first)):
                self._over.wait(0.2)
            victim, how = rng.choice(ready), WAYS[number % len(WAYS)]
            if how == signal.SIGKILL and number // len(WAYS) % 2 == 0:
                victim = self._with_a_stream() or victim
            with suppress(ProcessLookupError):
                os.kill(victim.pid, how)
                self._gone.add(victim.pid)
                self.left[NAMES[how]] += 1
                if how == signal.SIGSTOP:
                    frozen.append(threading.Timer(STILL_SECONDS, partial(_end, victim.pid)))
                    frozen[-1].start()
        self._over.wait(max(0.0, began_at + size.seconds - monotonic()))
        for each in frozen:
            each.join()
        until(self.running.all_linked, 120, "the return of all workers")
        # A busy machine answers late, and who does not in time is not counted
        until(lambda: len(self._ready(first)) == self.running.workers, 60, "all workers' readiness")

    def _with_a_stream(self) -> RunningProcess | None:
        """A worker that stands still within a stream; None: no request has come to a second token until all ended."""
        while not self._answered.is_set():
            live = [each for each in self.records if each.rid and not each.ended_at]
            for record in sorted(live, key=lambda each: len(each.token_ids) - each.tokens_max):
                worker = self._decoding(record)
                if worker is None:
                    continue
                os.kill(worker.pid, signal.SIGSTOP)
                self._over.wait(ARRIVED_SECONDS)
                if self._decoding(record) == worker:
                    self.cut += 1
                    return worker
                os.kill(worker.pid, signal.SIGCONT)
            self._over.wait(LOOK_SECONDS)
        return None

    def _decoding(self, record: ClientRecord) -> RunningProcess | None:
        """The worker that decodes the request's stream now, and was not told to leave."""
        url = f"{self.running.admin_url}/debug/requests/{record.rid}"
        said = httpx2.get(url, timeout=10.0, verify=False).json()
        if said.get("state") != "decoding":
            return None
        uid = said["workers"][-1]["worker"].split("/")[0]
        decoding = (each for each in self.running.processes("decode") if each.uid == uid)
        return next((each for each in decoding if each.pid not in self._gone), None)

    def _ready(self, first: set[int]) -> list[RunningProcess]:
        """Workers that are ready now and have not been told to leave."""
        ready = []
        for worker in self.running.processes():
            if worker.role == "router" or worker.pid in self._gone:
                continue
            with suppress(httpx2.TransportError):
                url = f"http://127.0.0.1:{worker.admin_port}/readyz"
                if httpx2.get(url, timeout=0.5, verify=False).is_success:
                    ready.append(worker)
        self.came |= {worker.pid for worker in ready} - first
        return ready


def _end(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def prove(running: LocalDeployment, size: RealChurnSize, seed: int) -> ProofResult:
    """Run it, and compare what clients have seen with what is promised."""
    churn, before = RealChurn(running, size, seed), continued(running)
    asyncio.run(churn.run())
    until(lambda: not running.held(), 60, "everything given back")
    records, after = churn.records, continued(running)
    more = {cause: count for cause in after if (count := after[cause] - before.get(cause, 0.0))}
    refused = [record for record in records if record.refused]
    firsts = sorted(record.first for record in records if record.first is not None)
    hung = sum(record.hung or record.silence > HUNG_SECONDS for record in records)
    zero = partial(Promise, least=0, most=0)
    router = running.processes("router")[0]
    migrated = {
        name: value for name, value in running.metrics(router).items() if "segue_migrations_total{" in name
    }
    return ProofResult(
        (
            Promise("requests", len(records), least=size.requests, others="1,536"),
            Promise("workers joined", len(churn.came), least=size.leaves * 0.9, others="248"),
            Promise("workers left", churn.left.total(), least=size.leaves, others="149"),
            zero("hung", hung, others="1.6 % of them"),
            zero(
                "200 without a finish reason", sum(record.broken for record in records), others="not counted"
            ),
            zero("streams that ended in an error", sum(not r.refused and bool(r.error) for r in records)),
            zero("refused without a reason", sum(not record.error for record in refused)),
            Promise(
                "longest until a refusal, s",
                round(max((record.ended_at - record.began_at for record in refused), default=0.0), 2),
                most=REFUSED_SECONDS,
                others="none: > 330 s without a word",
            ),
        ),
        {
            "fleet": {how: churn.left[how] for how in LEAVES},
            "streams whose worker was killed for having them": churn.cut,
            "answered whole": sum(record.completed for record in records),
            "refused, and why": dict(Counter(f"{record.status} {record.error}" for record in refused)),
            "errors within streams": [r.error for r in records if not r.refused and r.error],
            "attempts after the first, by cause": more,
            "streams migrated": migrated,
            "first token, median and p99, s": tuple(
                round(firsts[int(share * (len(firsts) - 1))], 2) for share in (0.5, 0.99)
            ),
            "longest in which a client saw nothing, s": round(max(record.silence for record in records), 2),
        },
    )


def main(arguments: Sequence[str] | None = None) -> int:
    usual = RealChurnSize()
    parser = argparse.ArgumentParser(
        prog="python -m tests.proofs.real_churn",
        description="Worker processes join and leave all the time under requests.",
    )
    parser.add_argument("--leaves", type=int, default=usual.leaves)
    parser.add_argument("--requests", type=int, default=usual.requests)
    parser.add_argument("--seconds", type=float, default=usual.seconds)
    parser.add_argument("--prefill", type=int, default=3, help="workers")
    parser.add_argument("--decode", type=int, default=5, help="workers")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    size = RealChurnSize(leaves=options.leaves, requests=options.requests, seconds=options.seconds)
    flags = ("--prefill", str(options.prefill), "--decode", str(options.decode))
    pages = {role: {"kvPages": 1200} for role in ("prefill", "decode")}
    with deployment(*flags, config={**pages, "router": {"ttftTargetSeconds": 2}}) as running:
        return prove(running, size, options.seed).show()


if __name__ == "__main__":
    sys.exit(main())
