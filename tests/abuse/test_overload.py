"""One client asks for everything and leaves. Another one is served meanwhile, and nothing stays behind."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest

from tests.abuse.target import MARKER, AbusedDeployment
from tests.abuse.wire import Reply, completion, connect, post, talk
from tests.integration.deployments.aggregated import AGGREGATED
from tests.waiting import until

GREEDY, MODEST = "127.0.0.2", "127.0.0.3"
CONNECTIONS, PROMPTS = 6, 64  # 384 generations
TAKEN_SECONDS_MAX = 30.0
MODEST_SECONDS = 2.0  # for four tokens
BACK_SECONDS = 2.0


@contextmanager
def flood(target: AbusedDeployment, streamed: bool) -> Iterator[None]:
    """384 generations of one client, until all its connections close at once."""
    prompts = [f"{MARKER} {number}" for number in range(PROMPTS)]
    body = completion(prompts, max_tokens=2000, ignore_eos=True, temperature=1, stream=streamed)
    refused = refusals(target)
    with ExitStack() as connections:
        for _ in range(CONNECTIONS):
            connection = connections.enter_context(connect(target.port, GREEDY))
            connection.sendall(post("/v1/completions", body))
        running = ("prefilling", "ready", "decoding")
        if AGGREGATED:  # the others wait for a turn at the router, not in front of decode
            running = ("waiting", "extending", "decoding")
        until(
            lambda: sum(map(target.running.live_requests, running)) >= 100 or refusals(target) > refused,
            TAKEN_SECONDS_MAX,
            "the flood",
        )
        yield


def refusals(target: AbusedDeployment) -> float:
    """Requests that the router has refused for now."""
    return target.running.total("router", "segue_requests_total{outcome=429}")


def four_tokens(target: AbusedDeployment, seconds_max: float) -> list[Reply]:
    """A modest client's completion."""
    body = completion(f"{MARKER} asks for", max_tokens=4, ignore_eos=True)
    return talk(target.port, post("/v1/completions", body), source=MODEST, seconds_max=seconds_max).replies()


@pytest.mark.parametrize(
    "streamed",
    [pytest.param(False, marks=pytest.mark.aggregated, id="whole answers"), pytest.param(True, id="streams")],
)
def test_four_tokens_come_within_two_seconds_while_another_client_floods(
    target: AbusedDeployment, streamed: bool
) -> None:
    before, bugs = target.failures(), len(target.bugs())
    with flood(target, streamed):
        replies = four_tokens(target, target.allowed(MODEST_SECONDS))
        assert [reply.status for reply in replies] == [200], (
            "no answer in time" if not replies else replies[0].body
        )
        assert json.loads(replies[0].body)["usage"]["completion_tokens"] == 4
    target.nothing_held_within(BACK_SECONDS)
    assert target.failures() == before, "a request was answered with 500"
    assert target.bugs()[bugs:] == []


def test_a_flood_of_small_requests_is_answered_to_the_last(target: AbusedDeployment) -> None:
    body = post("/v1/completions", completion(f"{MARKER} runs", max_tokens=2))
    with ThreadPoolExecutor(64) as pool:
        said = list(pool.map(lambda _: talk(target.port, body, seconds_max=90), range(400)))
    statuses = {status for one in said for status in one.statuses()}
    assert all(one.replies() for one in said)
    assert statuses <= {200, 429, 503}
    for one in said:
        for reply in one.replies():
            if reply.status != 200:
                reply.error()
                assert int(reply.headers["retry-after"]) >= 1


def test_a_client_that_leaves_at_once_takes_no_turn(target: AbusedDeployment) -> None:
    body = post("/v1/completions", completion(MARKER, max_tokens=1000, ignore_eos=True))
    for _ in range(60):
        with connect(target.port, GREEDY) as connection:
            connection.sendall(body)
    target.nothing_held_within(BACK_SECONDS)


def test_sixty_streams_that_hang_up_in_the_middle_are_given_back(target: AbusedDeployment) -> None:
    body = post("/v1/completions", completion(MARKER, max_tokens=1000, ignore_eos=True, stream=True))
    with ExitStack() as connections:
        opened = [connections.enter_context(connect(target.port, GREEDY)) for _ in range(60)]
        for connection in opened:
            connection.sendall(body)
        opened[0].settimeout(TAKEN_SECONDS_MAX)
        assert opened[0].recv(64).startswith(b"HTTP/1.1 200")
    target.nothing_held_within(BACK_SECONDS)
