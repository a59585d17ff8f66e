"""Decode workers of two ranks serve, without prefill workers: whatever happens to a rank happens to its worker.

Over gloo on `cuda-on-cpu`; a worker's followers are its only children.
`SEGUE_TEST_RANK_KILLS=10` kills each rank ten times.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from shared.worker.signals import END_SECONDS
from tests.integration.deployments.deployment import LocalDeployment, RunningProcess, deployment
from tests.integration.deployments.observing import busy_worker
from tests.integration.deployments.ranked import followers_of
from tests.integration.deployments.running import Running, ended_within
from tests.integration.deployments.streams import StreamedAnswer, client_of, complete, crowd
from tests.integration.models.answers_of_transformers import assert_answers_of_transformers
from tests.integration.models.served_models import (
    GREEDY,
    TOKENS,
    WORKER,
    prompts_of,
    saved_as_clients_call_it,
)
from tests.integration.models.test_fp8 import llama
from tests.link_keys import write_new_keys
from tests.waiting import soon, until

STREAMS = 8
KILLED = [0, 1] * int(os.environ.get("SEGUE_TEST_RANK_KILLS", "1"))
LONG: dict[str, Any] = GREEDY | {"max_tokens": 40}
RANKS: dict[str, Any] = {"tensorParallelSize": 2, "stepSecondsMax": 4.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    _, served = saved_as_clients_call_it(llama, tmp_path_factory.mktemp("model"))
    return served


@pytest.fixture(scope="module")
def two_of_two(model: Path) -> Iterator[LocalDeployment]:
    """Two decode workers of two ranks each."""
    flags = (
        "--model",
        str(model),
        "--threads",
        "2",
        "--device",
        "cuda-on-cpu",
        "--prefill",
        "0",
        "--decode",
        "2",
        "--log-level",
        "info",
    )
    with deployment(*flags, config={"decode": WORKER | RANKS}) as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(two_of_two: LocalDeployment, model: Path) -> list[StreamedAnswer]:
    return crowd(two_of_two.url, prompts_of(model)[:STREAMS], STREAMS, **LONG)


@pytest.mark.timeout(900)
def test_greedy_answers_are_those_of_transformers(two_of_two: LocalDeployment, model: Path) -> None:
    prompts = prompts_of(model)
    answers = crowd(two_of_two.url, prompts, 4, **GREEDY)
    assert_answers_of_transformers(model, prompts, answers, TOKENS)
    assert two_of_two.total("decode", "segue_local_prompts_total") > 0


@pytest.mark.timeout(900)
@pytest.mark.parametrize("rank", KILLED)
def test_a_killed_rank_is_a_killed_worker(
    rank: int, two_of_two: LocalDeployment, model: Path, undisturbed: list[StreamedAnswer]
) -> None:
    """Streams go on elsewhere, all of its processes end, and its log has one line of it."""
    prompts = prompts_of(model)[:STREAMS]

    def kill(victim: RunningProcess) -> None:
        pids = [victim.pid, *followers_of(victim.pid)]
        assert len(pids) == 2
        os.kill(pids[rank], signal.SIGKILL)
        assert ended_within(pids, soon(1))

    said = len(two_of_two.command.read_lines())
    assert disturbed(two_of_two, prompts, kill) == undisturbed
    lost = [line for line in two_of_two.command.read_lines()[said:] if "rank.lost" in line]
    assert len(lost) == rank, "rank 0 says nothing any more"
    assert all("it was ended by SIGKILL" in line for line in lost)
    until(two_of_two.all_linked, 300, "all workers' readiness")


@pytest.mark.timeout(900)
def test_streams_go_on_elsewhere_while_a_follower_is_frozen(
    two_of_two: LocalDeployment, model: Path, undisturbed: list[StreamedAnswer]
) -> None:
    prompts = prompts_of(model)[:STREAMS]
    frozen: list[int] = []

    def freeze(victim: RunningProcess) -> None:
        frozen.extend(followers_of(victim.pid))
        os.kill(frozen[0], signal.SIGSTOP)

    try:
        assert disturbed(two_of_two, prompts, freeze) == undisturbed
    finally:
        os.kill(frozen[0], signal.SIGCONT)
    until(two_of_two.all_linked, 120, "the worker's links, now that its loop turns again")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("frozen", [False, True], ids=["", "beside a frozen rank"])
@pytest.mark.long
def test_a_second_sigterm_ends_a_worker_of_ranks_at_once(
    frozen: bool, two_of_two: LocalDeployment, model: Path, undisturbed: list[StreamedAnswer]
) -> None:
    """It cuts what still runs there, which goes on elsewhere; nobody takes the end of its ranks for a loss.

    In a sum with a frozen rank its loop stands still, and asks no more whether it may exit.
    """
    until(two_of_two.all_linked, 300, "all workers' readiness")
    said = len(two_of_two.command.read_lines())

    def end(victim: RunningProcess) -> None:
        pids = [victim.pid, *followers_of(victim.pid)]
        if frozen:
            os.kill(pids[1], signal.SIGSTOP)
        os.kill(victim.pid, signal.SIGTERM)
        # One that comes before Python has seen the last is the same one.
        seconds = soon(1) + (END_SECONDS if frozen else 0)
        until(lambda: ended_within(pids[:1], 0) or signalled(victim.pid), seconds, "its end")
        assert ended_within(pids, soon(1))

    assert disturbed(two_of_two, prompts_of(model)[:STREAMS], end) == undisturbed
    lines = two_of_two.command.read_lines()[said:]
    event = "worker.ended_in_step" if frozen else "worker.ended_with_work"
    assert [line for line in lines if event in line], "it had streams when it ended"
    assert not [line for line in lines if "rank.lost" in line]


def signalled(pid: int) -> bool:
    """Send SIGTERM once more, if there still is such a process; False."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    return False


def disturbed(
    running: LocalDeployment, prompts: list[list[int]], disturb: Callable[[RunningProcess], None]
) -> list[StreamedAnswer]:
    """Streams of all prompts at once; when two have begun, this is done to a worker that serves some."""

    async def run() -> list[StreamedAnswer]:
        async def one(prompt: list[int]) -> StreamedAnswer:
            pieces, arrived = 0, asyncio.Event()

            def count() -> None:
                nonlocal pieces
                pieces += 1
                if pieces == 3:
                    arrived.set()

            answer = asyncio.create_task(complete(client, prompt, count, **LONG))
            await arrived.wait()
            began[0] += 1
            if began[0] == 2:
                victim = await asyncio.to_thread(busy_worker, running, "decode")
                await asyncio.to_thread(disturb, victim)
            return await answer

        began = [0]
        async with client_of(running.url) as client:
            return await asyncio.gather(*map(one, prompts))

    return asyncio.run(run())


# ---- one worker alone ------------------------------------------------------------------------------------------------


def worker(model: Path, keys: Path) -> Running:
    write_new_keys(keys)
    flags = [
        "--model",
        str(model),
        "--device",
        "cuda-on-cpu",
        "--tensor-parallel-size",
        "2",
        "--threads",
        "2",
    ]
    flags += ["--kv-pages", "160", "--context-len", "256", "--max-running-requests", "4"]
    ports = ["--admin-port", "0", "--links-port", "0", "--link-keys-file", str(keys / "worker.pem")]
    return Running("-m", "decode", *flags, *ports)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)], ids=["SIGTERM", "Ctrl-C"]
)
def test_a_worker_of_ranks_ends_as_any_worker(number: signal.Signals, model: Path, tmp_path: Path) -> None:
    """A terminal's Ctrl-C and a drain reach rank 0, and no process is left."""
    running = worker(model, tmp_path)
    running.line(lambda line: '"worker.ready"' in line, 240)
    pids = [running.process.pid, *followers_of(running.process.pid)]
    assert len(pids) == 2
    assert os.getpgid(pids[1]) != os.getpgid(pids[0]), "a terminal signals one group"
    os.kill(running.process.pid, number)
    assert running.process.wait(60) == 0
    assert ended_within(pids, soon(1))
    running.close()
    assert not [line for line in running.lines if "rank.lost" in line or '"critical"' in line]


@pytest.mark.timeout(300)
def test_what_keeps_ranks_from_starting_is_one_sentence(model: Path, tmp_path: Path) -> None:
    """All ranks find it, in no order."""
    broken = tmp_path / "model"
    shutil.copytree(model, broken)
    (broken / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:100_000])
    running = worker(broken, tmp_path / "keys")
    assert running.process.wait(240) == 1
    running.close()
    (sentence,) = [line for line in running.lines if not line.startswith("{")]
    assert sentence.startswith("segue decode: ")
    assert "model.safetensors" in sentence
