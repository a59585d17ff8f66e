"""The ten questions of docs/on-call.md, each asked of a real deployment in its incident, by a real Prometheus.

In each the question finds what is wrong, and the other questions that could be suspected stay quiet.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial

import httpx2
import pytest

from shared.process.api_keys import key_line, new_key
from tests.integration.deployments.deployment import LocalDeployment, RoleConfigs, deployment
from tests.integration.deployments.observing import busy_worker
from tests.integration.deployments.thread_stop import (
    LINK_STOPPED_SECONDS,
    by_turns,
    process_stopped,
    reader_of_pages,
    stop_computing,
    stopped,
)
from tests.integration.oncall.watched import Watched, questions, watched
from tests.waiting import until

KEYS = {name: new_key() for name in ("greedy", "modest", "third", "limited")}
SUSPECTS = (1, 2, 4, 5, 6, 9, 10)  # quiet while little happens
SLOTS = 6  # of each decode worker: five streams on one do not fill it
LONG = 3000  # tokens: a stream that outlasts its incident
pytestmark = [pytest.mark.timeout(600), pytest.mark.long]


@pytest.fixture(scope="module")
def watching(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    limits = {"limited": "rpm=2"}
    keys.write_text("".join(f"{key_line(name, key, limits.get(name, ''))}\n" for name, key in KEYS.items()))
    config: RoleConfigs = {
        "prefill": {"kvPages": 1200},
        # with the default its router would continue a hung worker's stream elsewhere
        "decode": {"kvPages": 1600, "maxRunningRequests": SLOTS, "stepSecondsMax": 60},
        "router": {"apiKeysFile": str(keys), "tokenizerThreads": 1, "localPrefill": "fallback"},
    }
    with deployment("--decode", "2", config=config) as running, watched(running) as watch:
        yield watch


@pytest.fixture
def watch(watching: Watched) -> Watched:
    """What was before has left the window."""
    watching.becomes_quiet(*SUSPECTS)
    return watching


@contextmanager
def streams(
    running: LocalDeployment, key: str, count: int, beside: int = 0, prompt: str = "Once upon a time"
) -> Iterator[None]:
    """So many streams of a key that run until the end of the context, beside as many as there are."""
    ending = threading.Event()
    headers = {"authorization": f"Bearer {KEYS[key]}"}

    def read(number: int) -> None:
        body = {"model": "smollm2", "prompt": f"{number}. {prompt}", "stream": True}
        body |= {"max_tokens": LONG, "ignore_eos": True}
        with (
            httpx2.Client(timeout=120, verify=False) as http,
            http.stream("POST", f"{running.url}/v1/completions", json=body, headers=headers) as stream,
        ):
            assert stream.status_code == 200, stream.read()
            for _ in stream.iter_lines():
                if ending.is_set():
                    return

    with ThreadPoolExecutor(count) as clients:
        reading = [clients.submit(read, number) for number in range(count)]
        try:
            until(lambda: running.live_requests("decoding") >= beside + count, 60, f"{count} streams")
            yield
        finally:
            ending.set()
        for each in reading:
            each.result(60)
    until(lambda: running.live_requests("decoding") <= beside, 60, "the end of the streams")


def slowed(pid: int) -> AbstractContextManager[None]:
    """A process that stands still four fifths of the time."""
    return by_turns(partial(process_stopped, pid), 0.08)


def post(running: LocalDeployment, key: str, path: str, **body: object) -> httpx2.Response:
    headers = {"authorization": f"Bearer {KEYS[key]}"}
    return httpx2.post(f"{running.url}{path}", json=body, headers=headers, timeout=120, verify=False)


def test_the_page_has_ten_questions_and_a_query_for_each() -> None:
    assert sorted(questions()) == list(range(1, 11))


def test_nobody_is_suspected_while_little_happens_and_a_slowed_decode_worker_is_found_by_its_steps(
    watch: Watched,
) -> None:
    slow, _ = watch.running.processes("decode")
    with (
        streams(watch.running, "modest", 2),
        streams(watch.running, "greedy", 1, beside=2),
        streams(watch.running, "third", 2, beside=3),
    ):
        three = "count(sum by (key) (segue_key_context_tokens) > 0) == 3"
        until(lambda: watch.evaluate(three), 60, "scrapes of all streams", 0.5)
        watch.says(3, lambda said: not said)
        watch.becomes_quiet(*SUSPECTS)
        watch.quiet(3, 8)
        with slowed(slow.pid):
            watch.says(1, lambda said: [*said] == [(slow.uid,)])
            watch.quiet(2, 4, 5, 6, 9, 10)


def test_a_greedy_key_is_found_and_then_full_workers_before_anything_is_refused_and_429_by_its_code(
    watch: Watched,
) -> None:
    with streams(watch.running, "modest", 1), streams(watch.running, "greedy", 4, beside=1):
        watch.says(3, lambda said: [*said] == [("greedy",)])
        watch.quiet(2, 4, 5, 6, 9)
        with streams(watch.running, "modest", 2 * SLOTS - 5, beside=5):
            decode = {(each.uid,) for each in watch.running.processes("decode")}
            watch.says(4, lambda said: said.keys() == decode)
            watch.says(10, lambda said: ("decode",) in said)
            watch.quiet(2, 6, 9)  # a machine of few cores has a slow router, too
    watch.becomes_quiet(4, 10)
    body = {"model": "smollm2", "prompt": "abc", "max_tokens": 1}
    statuses = [post(watch.running, "limited", "/v1/completions", **body).status_code for _ in range(6)]
    assert statuses.count(429) == 4
    watch.says(6, lambda said: [*said] == [("key_rpm",)])
    watch.quiet(2, 4, 9, 10)


def test_a_tokenizer_that_is_flooded_is_found_at_its_router(watch: Watched) -> None:
    ending = threading.Event()
    text = "a word and another one, " * 1000

    def flood() -> None:
        while not ending.is_set():
            post(watch.running, "modest", "/tokenize", prompt=text)

    (router,) = watch.running.processes("router")
    with ThreadPoolExecutor(6) as clients:
        flooding = [clients.submit(flood) for _ in range(6)]
        try:
            watch.says(5, lambda said: [*said] == [(router.uid,)])
            watch.says(7, lambda said: [*said] == [("tokenizing",)])
            watch.quiet(1, 2, 4, 6, 9, 10)
        finally:
            ending.set()
    for each in flooding:
        each.result(60)


def test_a_first_token_that_is_late_at_prefill_is_told_by_its_stage(watch: Watched) -> None:
    (prefill,) = watch.running.processes("prefill")
    numbers = iter(range(10_000))
    ending = threading.Event()

    def ask() -> None:
        while not ending.is_set():
            prompt = f"{next(numbers)} " + "once upon a time " * 60
            post(watch.running, "modest", "/v1/completions", model="smollm2", prompt=prompt, max_tokens=1)

    with ThreadPoolExecutor(1) as clients, slowed(prefill.pid):
        asking = clients.submit(ask)
        try:
            watch.says(7, lambda said: [*said] == [("prefill_compute",)])
            watch.becomes_quiet(5)
            watch.quiet(1, 2, 4, 6, 9)
        finally:
            ending.set()
    asking.result(60)


def test_a_roll_loses_nothing_and_a_killed_worker_is_told_by_its_cause_and_a_killed_router_by_its_name(
    watch: Watched,
) -> None:
    running = watch.running
    with streams(running, "modest", 4):
        drained, killed = running.processes("decode")
        os.kill(drained.pid, signal.SIGTERM)
        until(lambda: running.total("router", "segue_drain_seconds_count") == 1, 60, "the end of the drain")
        until(running.all_linked, 60, "its return")
        watch.quiet(9)
        os.kill(killed.pid, signal.SIGKILL)
        watch.says(9, lambda said: [*said] == [("lost_decode",)])
        until(running.all_linked, 60, "the return of the other one")
        watch.quiet(2, 6)
    (router,) = running.processes("router")
    longer = watch.queries[9].replace("[5m]", "[60s]")  # than it takes to start
    assert (router.uid,) not in watch.evaluate(longer)
    os.kill(router.pid, signal.SIGKILL)
    until(lambda: (router.uid,) in watch.evaluate(longer), 60, "the answer that a router has died", 0.5)
    until(running.all_linked, 60, "links to the new router")


def test_a_throttled_kv_link_is_found_by_what_its_fetches_take() -> None:
    role = {"kvPages": 1200, "kvTransport": "tls"}
    config: RoleConfigs = {"prefill": role, "decode": role, "router": {"localPrefill": "never"}}
    ending = threading.Event()

    def ask(number: int) -> None:
        while not ending.is_set():
            prompt = f"{number} " + "once upon a time " * 5
            running.client.completions.create(model="smollm2", prompt=prompt, max_tokens=4)

    with deployment(config=config) as running, watched(running) as watch, ThreadPoolExecutor(3) as clients:
        (decode,) = running.processes("decode")
        reader = reader_of_pages(running, decode)
        asking = [clients.submit(ask, number) for number in range(3)]
        try:
            until(lambda: running.total("router", "segue_second_token_seconds_count") > 9, 60, "hand-overs")
            watch.becomes_quiet(*SUSPECTS)
            with by_turns(partial(stopped, reader), LINK_STOPPED_SECONDS):
                watch.says(2, lambda said: [*said] == [()])
                watch.quiet(1, 4, 5, 6, 9, 10)
            watch.becomes_quiet(2)
        finally:
            ending.set()
        for each in asking:
            each.result(60)


def test_a_worker_whose_device_hangs_is_found_with_the_requests_that_wait_for_it(watch: Watched) -> None:
    with streams(watch.running, "modest", 1):
        victim = busy_worker(watch.running, "decode")
        watch.quiet(8)
        with ExitStack() as stopped:
            stop_computing(victim, stopped)
            watch.says(8, lambda said: said.keys() == {(victim.uid,), ("decoding",)})
            watch.quiet(2, 4, 5, 6, 9)
        watch.becomes_quiet(8)
