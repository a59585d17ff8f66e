"""Each bound on memory at its limit, by several addresses at once: the router lives in its address space of 1 GiB."""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from router.config import RouterConfig
from tests.abuse.target import AbusedDeployment
from tests.abuse.wire import completion, connect, get, post, talk
from tests.waiting import until

BOUNDS = RouterConfig()
ADDRESSES = [f"127.0.2.{number}" for number in range(1, 9)]
SERVED_SECONDS_MAX = 120.0  # ends a case that hangs

PROMPTS = 64  # of 8,000 tokens each: as many as one body can hold


@pytest.fixture(autouse=True)
def descriptors_for_thousands() -> Iterator[None]:
    """This process may open as many connections as the system allows."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextmanager
def router_lives_on(target: AbusedDeployment, mib: int) -> Iterator[None]:
    """The router grows by no more than this, still answers, and gives everything back."""
    with target.growth_below(mib):
        yield
    assert target.router().pid == target.router_pid
    until(
        lambda: talk(target.port, get("/v1/models"), source="127.0.0.3").statuses() == [200],
        SERVED_SECONDS_MAX,
        "an answer to another client",
    )
    target.all_home()


@pytest.mark.aggregated
def test_every_connection_that_is_allowed_fits_into_memory(target: AbusedDeployment) -> None:
    with router_lives_on(target, 128), ExitStack() as stack:
        for number in range(BOUNDS.connections_max + 200):
            stack.enter_context(connect(target.port, ADDRESSES[number % len(ADDRESSES)]))


def test_incomplete_heads_together_fit_into_memory(target: AbusedDeployment) -> None:
    head = get("/v1/models", headers=f"X-A: {'a' * 60_000}\r\n")[:-2]
    with router_lives_on(target, 128), ExitStack() as stack:
        for number in range(2000):
            connection = stack.enter_context(connect(target.port, ADDRESSES[number % len(ADDRESSES)]))
            send_what_it_takes(connection, head)


def test_bodies_that_never_end_fit_into_memory(target: AbusedDeployment) -> None:
    body = post("/v1/completions", completion("a" * (BOUNDS.max_body_bytes - 200)))[:-1]
    with router_lives_on(target, 400), ExitStack() as stack:
        for number in range(100):
            connection = stack.enter_context(connect(target.port, ADDRESSES[number % len(ADDRESSES)]))
            send_what_it_takes(connection, body)


def test_a_full_queue_of_the_longest_prompts_fits_into_memory(target: AbusedDeployment) -> None:
    prompts = [[5 + number % 1000] * 8000 for number in range(PROMPTS)]
    body = post("/v1/completions", completion(prompts, max_tokens=16))
    count = BOUNDS.max_queued_requests // PROMPTS + 4
    with router_lives_on(target, 400), ExitStack() as stack:
        for number in range(count):
            connection = stack.enter_context(connect(target.port, ADDRESSES[number % len(ADDRESSES)]))
            send_what_it_takes(connection, body)
        until(
            lambda: target.running.live_requests("waiting") >= BOUNDS.max_queued_requests // 2,
            SERVED_SECONDS_MAX,
            "a long queue",
        )


def test_prompts_that_are_refused_one_after_the_other_leave_nothing(target: AbusedDeployment) -> None:
    too_long = post("/v1/completions", completion("a " * (BOUNDS.max_body_bytes // 2 - 100)))
    with router_lives_on(target, 200):
        for _ in range(60):
            assert talk(target.port, too_long).statuses() == [400]


def send_what_it_takes(connection: socket.socket, data: bytes) -> None:
    """Send this; a server that refuses may have closed before its end."""
    try:
        connection.sendall(data)
    except OSError:
        return
