"""A worker whose computing thread hangs while its links live: its streams continue elsewhere, exact, and soon."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from time import monotonic

import pytest

from tests.integration.deployments.deployment import LocalDeployment, RunningProcess, deployment
from tests.integration.deployments.observing import busy_worker, continuations, linked_workers
from tests.integration.deployments.streams import StreamedAnswer, client_of, complete, crowd
from tests.integration.deployments.thread_stop import stop_computing
from tests.integration.faults.conftest import PROMPT, SAMPLED
from tests.waiting import soon, until

STEP_SECONDS_MAX = 4.0  # far above a step of the small model, on a busy machine, too
ROLE = {"kvPages": 400, "stepSecondsMax": STEP_SECONDS_MAX}


@pytest.fixture(scope="module")
def two_decode() -> Iterator[LocalDeployment]:
    """One prefill and two decode workers."""
    with deployment("--decode", "2", config={"prefill": ROLE, "decode": ROLE}) as running:
        yield running


def test_a_stream_whose_worker_hangs_continues_elsewhere(
    two_decode: LocalDeployment, undisturbed: str
) -> None:
    before = continuations(two_decode)
    with ExitStack() as hang:
        answer, longest_pause, victim = asyncio.run(stream_beside(two_decode, hang))
        assert answer == StreamedAnswer(undisturbed, "length", SAMPLED["max_tokens"])
        assert longest_pause < STEP_SECONDS_MAX + soon(2)
        assert continuations(two_decode) == before + 1
        assert linked_workers(two_decode) == 2, "it hangs still, and gets nothing to do"
    until(lambda: linked_workers(two_decode) == 3, 10, "the return of the worker that hung")
    until(lambda: not two_decode.held(), 10, "what it held given back by the worker that hung")
    assert two_decode.metrics(victim)["segue_loop_hangs_total"] == 1
    assert crowd(two_decode.url, [PROMPT], 1, **SAMPLED)[0].text == undisturbed


async def stream_beside(
    running: LocalDeployment, hang: ExitStack
) -> tuple[StreamedAnswer, float, RunningProcess]:
    """Complete PROMPT; after some text its decode worker hangs, until `hang` is closed. And the longest pause in it."""
    times = [monotonic()]
    arrived = asyncio.Event()

    def note() -> None:
        times.append(monotonic())
        if len(times) == 20:
            arrived.set()

    async with client_of(running.url) as client:
        answer = asyncio.create_task(complete(client, PROMPT, note, **SAMPLED))
        await arrived.wait()
        victim = await asyncio.to_thread(busy_worker, running, "decode")
        stop_computing(victim, hang)  # on this thread, which alone may let it go on
        whole = await answer
    return whole, max(late - early for early, late in pairwise(times)), victim
