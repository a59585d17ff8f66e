"""Faults while four streams run: each gets exactly the tokens that it gets undisturbed, and nothing stays held."""

from __future__ import annotations

import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import Event

import httpx2
import pytest

from shared.worker.worker_config import WorkerConfig
from tests.abuse.procfs import descriptors, limited, started_at
from tests.abuse.target import MARKER, AbusedDeployment
from tests.abuse.test_strangers import links_port
from tests.abuse.wire import completion, connect, get, post, talk
from tests.integration.deployments.aggregated import needs_prefill
from tests.integration.deployments.deployment import RunningProcess
from tests.integration.deployments.thread_stop import stop_computing
from tests.waiting import until

CONTINUE_SECONDS = 2.0  # until its streams go on elsewhere
FROZEN_SECONDS = 4.0  # longer than the links' silence of 3 s
RESERVE = 300  # descriptors left to the router: more than it keeps back, fewer than the clients want
Fault = Callable[[AbusedDeployment], None]


def signal_role(number: int, *roles: str) -> Fault:
    """Send a signal to all workers of these roles."""

    def do(target: AbusedDeployment) -> None:
        for role in roles:
            for process in target.running.processes(role):
                target.kill(process, number)

    return do


def signal_busy(number: int, role: str) -> Fault:
    """Send a signal to a worker that serves streams."""
    return lambda target: target.kill(busy(target, role), number)


def busy(target: AbusedDeployment, role: str) -> RunningProcess:
    """A decode worker that serves streams, or any prefill worker. Of several the one that has run longest.

    Faults then take turns: a process that ends again soon after its start waits longer for the next one.
    """
    workers = target.running.processes(role)
    if role == "decode":
        until(lambda: any(map(target.slots_used, workers)), 60, "a busy decode worker")
        workers = [worker for worker in workers if target.slots_used(worker)]
    return min(workers, key=lambda worker: started_at(worker.pid))


@contextmanager
def frozen(target: AbusedDeployment, process: RunningProcess) -> Iterator[None]:
    target.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        target.kill(process, signal.SIGCONT)


def freeze(role: str) -> Fault:
    """Stop a process for longer than its peers wait."""

    def do(target: AbusedDeployment) -> None:
        process = target.router() if role == "router" else busy(target, role)
        with frozen(target, process):
            Event().wait(FROZEN_SECONDS)

    return do


def freeze_and_kill(target: AbusedDeployment) -> None:
    """One decode worker stands still; the other dies meanwhile."""
    second, first = sorted(target.running.processes("decode"), key=lambda worker: started_at(worker.pid))
    with frozen(target, first):
        target.kill(second, signal.SIGKILL)
        Event().wait(FROZEN_SECONDS)


def flicker(target: AbusedDeployment) -> None:
    """A decode worker stands still again and again, each time too briefly to be lost."""
    process = busy(target, "decode")
    for _ in range(5):
        with frozen(target, process):
            Event().wait(0.3)


def hang_ups(target: AbusedDeployment) -> None:
    """Sixty other clients begin and leave."""
    body = post("/v1/completions", completion(MARKER, max_tokens=500, stream=True, ignore_eos=True))
    for _ in range(60):
        with connect(target.port) as connection:
            connection.sendall(body)
            connection.recv(100)


def a_descriptor_flood(target: AbusedDeployment) -> None:
    """Idle connections take every descriptor that the router gives, then a decode worker dies and is dialed again."""
    router = target.router()
    with limited(router.pid, resource.RLIMIT_NOFILE, descriptors(router.pid) + RESERVE), ExitStack() as stack:
        for _ in range(RESERVE + 200):
            stack.enter_context(connect(target.port))
        target.kill(busy(target, "decode"), signal.SIGKILL)
        until(lambda: len(target.running.processes("decode")) == 2, 30, "the killed worker's return")
        Event().wait(FROZEN_SECONDS)  # it is dialed, in vain or not


def a_flood_of_a_links_port(target: AbusedDeployment) -> None:
    """A decode worker has no descriptor left for a while, not for a probe either."""
    process = busy(target, "decode")
    with limited(process.pid, resource.RLIMIT_NOFILE, descriptors(process.pid) + 20), ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(connect(links_port(target, process.uid)))
        stack.enter_context(connect(process.admin_port))
        Event().wait(1)


def a_blocked_stderr(target: AbusedDeployment) -> None:
    """Nobody reads what the deployment writes, and it has much to write."""
    with target.running.command.unread(), target.others.window():
        for _ in range(4000):
            assert talk(target.port, get(f"/{MARKER}"), seconds_max=10).statuses() == [404]


FAULTS = {  # in turns those that end a process and those that do not: it is restarted meanwhile
    "a decode worker is killed": signal_busy(signal.SIGKILL, "decode"),
    "a prefill worker is frozen": freeze("prefill"),
    "a prefill worker is killed": signal_busy(signal.SIGKILL, "prefill"),
    "a decode worker is frozen": freeze("decode"),
    "a decode worker drains": signal_busy(signal.SIGTERM, "decode"),
    "the router is frozen": freeze("router"),
    "a prefill worker drains": signal_busy(signal.SIGTERM, "prefill"),
    "a decode worker stops for moments": flicker,
    "both decode workers are killed": signal_role(signal.SIGKILL, "decode"),
    "sixty others hang up": hang_ups,
    "both prefill workers are killed": signal_role(signal.SIGKILL, "prefill"),
    "nobody reads the log": a_blocked_stderr,
    "a decode worker has no descriptor left": a_flood_of_a_links_port,
    "a decode worker crashes": signal_busy(signal.SIGSEGV, "decode"),
    "the router has no descriptor left and a worker dies": a_descriptor_flood,
    "all four workers are killed": signal_role(signal.SIGKILL, "prefill", "decode"),
    "one decode worker is frozen and the other dies": freeze_and_kill,
}


def marks(name: str) -> list[pytest.MarkDecorator]:
    """In which shapes of the deployment a fault is tried."""
    if "prefill" in name:
        return [needs_prefill("there is none to harm")]
    return [pytest.mark.aggregated] if name == "a decode worker is killed" else []


@pytest.mark.parametrize("fault", [pytest.param(f, id=name, marks=marks(name)) for name, f in FAULTS.items()])
def test_streams_are_bit_equal_through_a_fault(target: AbusedDeployment, fault: Fault) -> None:
    target.all_home()
    router = target.router().pid
    with target.undisturbed_streams():
        fault(target)
    assert target.router().pid == router, "the router did not live through it"
    target.all_home()


def test_streams_go_on_elsewhere_when_a_computing_thread_hangs(target: AbusedDeployment) -> None:
    target.all_home()
    alone = time.monotonic()
    target.stream()
    alone = time.monotonic() - alone
    with target.undisturbed_streams():
        victim = busy(target, "decode")
        with ExitStack() as hang:
            stop_computing(victim, hang)
            began = time.monotonic()
            until(
                lambda: not target.running.live_requests("decoding"),
                3 * WorkerConfig().step_seconds_max,
                "the end of all streams",
            )
            took = time.monotonic() - began
    assert took <= target.allowed(WorkerConfig().step_seconds_max + CONTINUE_SECONDS + 2 * alone)
    target.all_home()


def test_a_killed_router_breaks_its_streams_without_a_false_end(target: AbusedDeployment) -> None:
    target.all_home()
    body = completion(MARKER, max_tokens=1500, ignore_eos=True, stream=True)
    lines: list[str] = []
    with httpx2.stream(
        "POST",
        f"{target.running.url}/v1/completions",
        content=body,
        headers={"content-type": "application/json"},
        timeout=30,
    ) as answer:
        stream = answer.iter_lines()
        lines.append(next(stream))
        target.kill_router()
        with pytest.raises(httpx2.TransportError):
            lines.extend(stream)
    assert "data: [DONE]" not in lines
    assert not [line for line in lines if '"finish_reason":"' in line]
    until(lambda: len(target.running.processes("router")) == 1, 30, "the router's return")
    target.expect_new_router()
    target.all_home()
    assert target.running.all_linked()
    assert target.stream() == target.undisturbed
