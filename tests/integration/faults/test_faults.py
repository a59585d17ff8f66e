"""Workers are killed and frozen, clients leave: no token is lost or doubled, and nothing stays held."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from time import monotonic
from typing import Any

import openai
import pytest

from shared.process.process_config import ProcessConfig
from tests.integration.deployments.deployment import LocalDeployment, RunningProcess
from tests.integration.deployments.observing import busy_worker, continuations, linked_workers
from tests.integration.deployments.streams import StreamedAnswer, client_of, complete, crowd
from tests.integration.faults.conftest import PROMPT, SAMPLED
from tests.waiting import soon, until

SILENCE_SECONDS = ProcessConfig().silence_seconds
BRIEF: dict[str, Any] = {"max_tokens": 8}
ENDLESS: dict[str, Any] = {"max_tokens": 4000, "extra_body": {"ignore_eos": True}}  # ends by its client alone


def test_a_seed_gives_the_same_text_alone_and_in_a_crowd(two_each: LocalDeployment, undisturbed: str) -> None:
    others = [f"Chapter {k}. It was" for k in range(7)]
    shorter = SAMPLED | {"max_tokens": 200}
    (alone,) = crowd(two_each.url, [PROMPT], 1, **shorter)
    assert undisturbed.startswith(alone.text.rstrip("\ufffd"))
    assert len(alone.text) > 200
    assert crowd(two_each.url, [PROMPT, *others], 8, **shorter)[0] == alone


def test_a_killed_decode_worker_only_pauses_the_stream(two_each: LocalDeployment, undisturbed: str) -> None:
    before = continuations(two_each)
    answer = asyncio.run(disturb(two_each, pieces=20, with_worker=kill))
    assert answer == StreamedAnswer(undisturbed, "length", SAMPLED["max_tokens"])
    assert continuations(two_each) == before + 1
    until(lambda: len(two_each.processes("decode")) == 2, 30, "the killed worker's return")
    until(lambda: linked_workers(two_each) == 4, 30, "all workers' readiness")


def test_a_killed_prefill_worker_only_delays_the_first_token(two_each: LocalDeployment) -> None:
    prompt = list(range(1000, 4000))

    async def run() -> StreamedAnswer:
        async with client_of(two_each.url) as client:
            answer = asyncio.create_task(complete(client, prompt, max_tokens=4, temperature=0))
            victim = await asyncio.to_thread(busy_worker, two_each, "prefill")
            os.kill(victim.pid, signal.SIGKILL)
            return await answer

    before = continuations(two_each)
    assert asyncio.run(run()).completion_tokens == 4
    assert continuations(two_each) == before + 1
    until(lambda: len(two_each.processes("prefill")) == 2, 30, "the killed worker's return")
    until(lambda: linked_workers(two_each) == 4, 30, "all workers' readiness")


def test_a_frozen_decode_worker_doubles_no_token(two_each: LocalDeployment, undisturbed: str) -> None:
    def freeze(victim: RunningProcess) -> None:
        os.kill(victim.pid, signal.SIGSTOP)
        frozen_at = monotonic()
        try:
            until(lambda: linked_workers(two_each) == 3, 10, "the router's notice of the silence")
            until(lambda: monotonic() - frozen_at > 2 * SILENCE_SECONDS, 10, "twice the silence limit")
        finally:
            os.kill(victim.pid, signal.SIGCONT)

    before = continuations(two_each)
    answer = asyncio.run(disturb(two_each, pieces=20, with_worker=freeze))
    assert answer == StreamedAnswer(undisturbed, "length", SAMPLED["max_tokens"])
    assert continuations(two_each) == before + 1
    until(lambda: linked_workers(two_each) == 4, 10, "the return of the worker that was frozen")
    until(lambda: not two_each.held(), 10, "pages given back by the worker that was frozen")


def test_a_worker_whose_stderr_nobody_reads_goes_on_with_its_streams(two_each: LocalDeployment) -> None:
    def block_stderr(victim: RunningProcess) -> None:
        stack.enter_context(full_stderr(two_each, victim))
        for _ in range(4):
            socket.create_connection(("127.0.0.1", links_port(two_each, victim))).close()
        until(
            lambda: strangers_refused(two_each, victim) >= 4,
            10,
            "a line of the worker that cannot be written",
        )

        assert two_each.metrics(victim)["segue_slots_used"] == 1, "the stream was over before"

    brief = SAMPLED | {"max_tokens": SAMPLED["max_tokens"] - 100}
    undisturbed = crowd(two_each.url, [PROMPT], 1, **brief)[0]
    before, lines = continuations(two_each), len(two_each.command.read_lines())
    with ExitStack() as stack:
        answer = asyncio.run(disturb(two_each, pieces=20, with_worker=block_stderr, params=brief))
        assert not [line for line in two_each.command.read_lines()[lines:] if "link.refused" in line]
    assert answer == undisturbed
    assert continuations(two_each) == before
    two_each.command.line(lambda line: "link.refused" in line, 10)


@contextmanager
def full_stderr(running: LocalDeployment, victim: RunningProcess) -> Iterator[None]:
    """`segue up`, which reads the stderr of its children, stands still, and the pipe of this child is full."""
    os.kill(running.command.process.pid, signal.SIGSTOP)
    try:
        pipe = os.open(f"/proc/{victim.pid}/fd/2", os.O_WRONLY | os.O_NONBLOCK)
        for piece in (b"." * 4095 + b"\n", b"\n"):
            with suppress(BlockingIOError):
                while True:
                    os.write(pipe, piece)
        os.close(pipe)
        yield
    finally:
        os.kill(running.command.process.pid, signal.SIGCONT)


def links_port(running: LocalDeployment, worker: RunningProcess) -> int:
    return int(running.command.children()[worker.pid].partition("--links-port ")[2].split()[0])


def strangers_refused(running: LocalDeployment, worker: RunningProcess) -> float:
    figures = running.metrics(worker)
    return sum(value for name, value in figures.items() if name.startswith("segue_link_refusals_total{"))


def test_what_a_client_that_hangs_up_held_is_given_back_within_a_second(two_each: LocalDeployment) -> None:
    async def leave() -> None:
        async with client_of(two_each.url) as client:
            stream = await client.completions.create(
                model="smollm2", prompt=PROMPT, stream=True, max_tokens=2000, extra_body={"ignore_eos": True}
            )
            async for _ in stream:
                break
            await stream.close()

    asyncio.run(leave())
    until(lambda: not two_each.held(), soon(1), "everything given back")


@pytest.mark.timeout(600)
def test_two_hundred_requests_half_of_them_aborted_leave_nothing_behind(two_each: LocalDeployment) -> None:
    draw = random.Random(1)
    plans = [(draw.randint(1, 400), draw.random() * 2 if k % 2 else None) for k in range(200)]
    ended = asyncio.run(abort_some(two_each, plans))
    assert (ended.count("finished"), ended.count("aborted")) == (100, 100)
    until(lambda: not two_each.held(), 5, "everything given back")


async def abort_some(running: LocalDeployment, plans: list[tuple[int, float | None]]) -> list[str]:
    """Send one request a plan: its prompt's tokens, and the seconds after which its client aborts it (None: never)."""
    gate = asyncio.Semaphore(32)

    async def one(client: openai.AsyncOpenAI, number: int, length: int, patience: float | None) -> str:
        prompt = [100 + (number * 7 + k) % 4000 for k in range(length)]
        async with gate:
            try:
                await asyncio.wait_for(
                    complete(client, prompt, **(BRIEF if patience is None else ENDLESS)), patience
                )
            except TimeoutError:
                return "aborted"
            return "finished"

    async with client_of(running.url) as client:
        return await asyncio.gather(*(one(client, number, *plan) for number, plan in enumerate(plans)))


async def disturb(
    running: LocalDeployment,
    *,
    pieces: int,
    with_worker: Callable[[RunningProcess], None],
    params: Mapping[str, Any] = SAMPLED,
) -> StreamedAnswer:
    """Complete PROMPT, and after some pieces of text do this to the decode worker that serves it."""
    arrived = asyncio.Event()
    seen = 0

    def count() -> None:
        nonlocal seen
        seen += 1
        if seen == pieces:
            arrived.set()

    async with client_of(running.url) as client:
        answer = asyncio.create_task(complete(client, PROMPT, count, **params))
        await arrived.wait()
        victim = await asyncio.to_thread(busy_worker, running, "decode")
        await asyncio.to_thread(with_worker, victim)
        return await answer


def kill(victim: RunningProcess) -> None:
    os.kill(victim.pid, signal.SIGKILL)
