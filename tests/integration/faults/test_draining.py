"""Workers drain while they serve: their requests migrate by their pages, and no token is lost or computed twice."""

from __future__ import annotations

import asyncio
import os
import signal
from time import monotonic

from tests.integration.deployments.deployment import LocalDeployment
from tests.integration.deployments.observing import busy_worker, continuations, linked_workers
from tests.integration.deployments.streams import StreamedAnswer, client_of, complete
from tests.integration.faults.conftest import PROMPTS, SAMPLED
from tests.waiting import until


def test_streams_migrate_by_their_pages_from_a_draining_decode_worker(
    two_each: LocalDeployment, undisturbed_crowd: list[StreamedAnswer]
) -> None:
    tried_again, extended = continuations(two_each), two_each.total("prefill", "segue_extend_tokens_total")
    migrated = two_each.total("router", "segue_migrations_total{cause=drain,outcome=migrated}")
    answers, held, seconds = asyncio.run(drain_a_decode_worker(two_each))
    assert answers == undisturbed_crowd
    assert held >= 3
    assert two_each.total("router", "segue_migrations_total{cause=drain,outcome=migrated}") == migrated + held
    assert continuations(two_each) == tried_again, what_happened(two_each)
    computed = two_each.total("prefill", "segue_extend_tokens_total") - extended
    assert computed <= sum(len(prompt) for prompt in PROMPTS), "nothing but prompts was computed"
    assert seconds < 20
    until(lambda: linked_workers(two_each) == 4, 30, "all workers' readiness")
    until(lambda: not two_each.held(), 5, "everything given back")


def what_happened(running: LocalDeployment) -> list[str]:
    """Figures that explain a failure."""
    names = ("segue_continuations", "segue_migrations", "segue_refusals", "segue_stale", "segue_retractions")
    figures = running.metrics(running.processes("router")[0])
    return [f"{name} {value:g}" for name, value in figures.items() if name.startswith(names)]


async def drain_a_decode_worker(running: LocalDeployment) -> tuple[list[StreamedAnswer], int, float]:
    """The answers, the requests that the worker held at SIGTERM, and the seconds until it exited: all streams open."""
    started = asyncio.Event()
    pieces = [0] * len(PROMPTS)

    def count(number: int) -> None:
        pieces[number] += 1
        if min(pieces) >= 10:
            started.set()

    async with client_of(running.url) as client:
        tasks = [
            asyncio.create_task(complete(client, prompt, lambda number=number: count(number), **SAMPLED))  # type: ignore[misc]
            for number, prompt in enumerate(PROMPTS)
        ]
        await started.wait()
        victim = await asyncio.to_thread(busy_worker, running, "decode")
        held = int(running.metrics(victim)["segue_slots_used"])
        began = monotonic()
        os.kill(victim.pid, signal.SIGTERM)
        gone = lambda: victim.pid not in {process.pid for process in running.processes("decode")}  # noqa: E731
        await asyncio.to_thread(until, gone, 30, "the end of the worker")
        seconds = monotonic() - began
        assert not any(task.done() for task in tasks), "the worker ended before the streams did"
        return list(await asyncio.gather(*tasks)), held, seconds


def test_a_draining_prefill_worker_finishes_what_it_has(two_each: LocalDeployment) -> None:
    prompts = [list(range(1000 + 50 * number, 2500 + 50 * number)) for number in range(6)]
    before = continuations(two_each)

    async def run() -> list[StreamedAnswer]:
        async with client_of(two_each.url) as client:
            tasks = [
                asyncio.create_task(complete(client, prompt, max_tokens=4, temperature=0))
                for prompt in prompts
            ]
            victim = await asyncio.to_thread(busy_worker, two_each, "prefill")
            os.kill(victim.pid, signal.SIGTERM)
            answers = list(await asyncio.gather(*tasks))
            gone = lambda: victim.pid not in {process.pid for process in two_each.processes("prefill")}  # noqa: E731
            await asyncio.to_thread(until, gone, 10, "the end of the worker")
            return answers

    assert [answer.completion_tokens for answer in asyncio.run(run())] == [4] * 6
    assert continuations(two_each) == before
    until(lambda: linked_workers(two_each) == 4, 30, "all workers' readiness")
