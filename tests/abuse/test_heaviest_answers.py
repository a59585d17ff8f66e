"""The heaviest answer of each field, alone and times every multiplier: a router of 1 GiB stays small and quick.

A router's process of its own, over real links, with workers that compute nothing (`talkative_workers`): answers come as
fast as it can take them. Each case is one small request. It may be served or refused, and its sentence says why; it may
not cost the router more than 64 MiB, nor make another client wait.
"""

from __future__ import annotations

import http.client
import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from router.config import RouterConfig
from tests.abuse.probing import ProbingClient, seconds_to_answer
from tests.abuse.procfs import PeakMemory, cpu_seconds
from tests.abuse.target import ADDRESS_SPACE_BYTES, MIB
from tests.abuse.wire import connect, post
from tests.link_keys import write_new_keys
from tests.unit.router.tiny_model import write_folder
from tests.waiting import until

CONTEXT_LEN = 8192
GROWN_MIB = 64  # by one answer at most
BUDGET_BYTES = RouterConfig().answers_bytes_max  # by all of them, beside what one costs
ANSWER_SECONDS_MAX = 120.0  # ends a case that hangs
READ_BYTES = 1 << 18
RECEIVE_BYTES = 4096  # of a client's kernel, so that what it does not read stays with the router
ALL_REPORTED: dict[str, Any] = {"echo": True, "logprobs": 20, "prompt_logprobs": 20}
USER = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {f"p{at}": {"type": "string"} for at in range(64)}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}


def prompt(tokens: int, begin: int = 0) -> list[int]:
    """So many token ids."""
    return [20 + (begin + at) % 300 for at in range(tokens)]


@dataclass(frozen=True, slots=True)
class HeavyRequest:
    """A request, and the statuses that are right."""

    path: str
    fields: dict[str, Any]
    status: int = 200

    def body(self) -> bytes:
        """Of the POST."""
        return json.dumps({"model": "tiny", **self.fields}).encode()


def completion(tokens: int, status: int = 200, **fields: Any) -> HeavyRequest:
    return HeavyRequest("/v1/completions", {"prompt": prompt(tokens), "max_tokens": 1, **fields}, status)


def chat(status: int = 200, **fields: Any) -> HeavyRequest:
    return HeavyRequest("/v1/chat/completions", {"messages": USER, "max_tokens": 50, **fields}, status)


def prompts(count: int, tokens: int, status: int = 200, **fields: Any) -> HeavyRequest:
    listed = [prompt(tokens, begin) for begin in range(count)]
    return HeavyRequest("/v1/completions", {"prompt": listed, "max_tokens": 1, **fields}, status)


LONG = CONTEXT_LEN - 100
HEAVIEST = {
    # alone
    "echo with logprobs": completion(LONG, echo=True, logprobs=20),
    "prompt_logprobs": completion(LONG, prompt_logprobs=20),
    "both": completion(LONG, **ALL_REPORTED),
    "a chat's prompt_logprobs": chat(prompt_logprobs=20),
    "logprobs of the output": completion(10, logprobs=20, max_tokens=100),
    "top_logprobs": chat(logprobs=True, top_logprobs=20, max_tokens=100),
    # times n
    "n 8 of both": completion(2000, n=8, **ALL_REPORTED),
    "n 24 of both": completion(3500, n=24, **ALL_REPORTED),
    "n 64 of both": completion(LONG, n=64, **ALL_REPORTED),
    "n 64 of an echo": completion(LONG, n=64, echo=True),
    "n 64 of a streamed echo": completion(LONG, n=64, echo=True, stream=True),
    "n 64 of logprobs": completion(10, n=64, logprobs=20, max_tokens=50),
    "n 64 of top_logprobs": chat(n=64, logprobs=True, top_logprobs=20),
    "n 64 of streamed top_logprobs": chat(n=64, logprobs=True, top_logprobs=20, stream=True),
    "n 64 of token ids": completion(10, n=64, return_token_ids=True, max_tokens=800),
    "n 64 of text": completion(10, n=64, max_tokens=800),
    "n 64 of logprobs up to the context": completion(10, 400, n=64, logprobs=20, max_tokens=8000),
    # times prompts
    "64 prompts of prompt_logprobs": prompts(64, 4000, 400, prompt_logprobs=20),
    "16 prompts of both": prompts(16, 1000, **ALL_REPORTED),
    "8 prompts of n 8 of both": prompts(8, 2000, n=8, **ALL_REPORTED),
    "64 prompts of an echo": prompts(64, 2000, echo=True),
    # with what constrains an answer
    "n 64 of a schema": chat(n=64, structured_outputs={"json": SCHEMA}),
    "n 64 of 32 tools": chat(n=64, tools=[{**TOOL, "function": {"name": f"f{at}"}} for at in range(32)]),
    "n 64 of a forced tool": chat(n=64, tools=[TOOL], tool_choice="required"),
    "n 64 of stops": completion(10, n=64, max_tokens=200, stop=["a" * 1000 + chr(98 + at) for at in range(16)]),
    "n 64 of biases": completion(10, n=64, max_tokens=50, logit_bias={str(at): 1 for at in range(20, 320)}),
    "n 64 of allowed tokens": completion(10, n=64, max_tokens=50, allowed_token_ids=list(range(20, 320))),
    "n 64 of bad words": completion(10, n=64, max_tokens=50, bad_words=["word " * 3 + str(at) for at in range(32)]),
    # of /v1/responses
    "a response's top_logprobs": HeavyRequest(
        "/v1/responses", {"input": "hi", "max_output_tokens": 100, "top_logprobs": 20}
    ),
    "a streamed response's top_logprobs": HeavyRequest(
        "/v1/responses", {"input": "hi", "max_output_tokens": 100, "top_logprobs": 20, "stream": True}
    ),
}  # fmt: skip


@dataclass
class SmallRouter:
    """A router's process in an address space of 1 GiB, and another client of it."""

    port: int
    pid: int
    others: ProbingClient

    @contextmanager
    def growth_below(self, size: int) -> Iterator[None]:
        """Its memory never grows by more."""
        memory = PeakMemory(self.pid)
        yield
        grown = memory.growth()
        assert grown <= size, f"memory grew by {grown / MIB:.0f} MiB, allowed are {size / MIB:.0f} MiB"

    def status_of(self, asked: HeavyRequest, source: str = "127.0.0.2", reads: bool = True) -> int:
        """The status of the answer, which is read to its end."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, ANSWER_SECONDS_MAX, (source, 0))
        try:
            connection.request("POST", asked.path, asked.body(), {"content-type": "application/json"})
            answer = connection.getresponse()
            if answer.status != 200:
                assert json.loads(answer.read())["error"]["message"]
            while reads and answer.read(READ_BYTES):
                pass
            return answer.status
        finally:
            connection.close()


@contextmanager
def workers_of(keys_file: Path) -> Iterator[str]:
    """Workers in a process of their own; the setting that names them."""
    command = [sys.executable, "-m", "tests.abuse.talkative_workers", str(keys_file), str(CONTEXT_LEN)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as workers:
        assert workers.stdout is not None
        assert workers.stdin is not None
        yield workers.stdout.readline().strip()
        workers.stdin.close()
        assert workers.wait(20) == 0


@contextmanager
def router_of(root: Path, workers: str) -> Iterator[tuple[int, int]]:
    """A router's process that is ready; its port and pid."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        command = [sys.executable, "-m", "router", "--model", str(root / "tiny"), "--port", str(port)]
        command += ["--admin-port", "0", "--workers", workers, "--tool-call-parser", "hermes"]
        command += ["--link-keys-file", str(root / "keys" / "router.pem"), "--log-level", "error"]
        router = subprocess.Popen(command, env=os.environ | {"MALLOC_ARENA_MAX": "2"})
        try:
            until(lambda: seconds_to_answer(port) < ANSWER_SECONDS_MAX, 60, "a router that is ready")
            resource.prlimit(router.pid, resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))
            yield port, router.pid
            assert router.poll() is None, "the router has not lived through all that"
        finally:
            router.kill()
            router.wait()


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallRouter]:
    root = tmp_path_factory.mktemp("answers")
    write_new_keys(root / "keys")
    write_folder(root / "tiny", context_len=CONTEXT_LEN)
    with workers_of(root / "keys" / "worker.pem") as workers, router_of(root, workers) as (port, pid):
        small = SmallRouter(port, pid, ProbingClient(port))
        try:
            # what it loads first is not counted
            for asked in (completion(10, **ALL_REPORTED), chat(tools=[TOOL])):
                assert small.status_of(asked) == 200
            yield small
        finally:
            small.others.close()


@pytest.mark.parametrize("asked", HEAVIEST.values(), ids=HEAVIEST)
def test_the_heaviest_answer_costs_little_and_nobody_else_waits(
    router: SmallRouter, asked: HeavyRequest
) -> None:
    with router.growth_below(GROWN_MIB * MIB), router.others.window():
        assert router.status_of(asked) == asked.status


def test_a_client_that_pauses_gets_all_of_the_heaviest_stream(router: SmallRouter) -> None:
    streamed = chat(n=64, logprobs=True, top_logprobs=20, stream=True)
    alone = chat(logprobs=True, top_logprobs=20)  # it is as long and begins later, so it ends later
    with router.growth_below(GROWN_MIB * MIB), connect(router.port, "127.0.0.2", RECEIVE_BYTES) as client:
        client.sendall(post(streamed.path, streamed.body()))
        assert router.status_of(alone) == 200
        with http.client.HTTPResponse(client) as answer:
            answer.begin()
            events = answer.read()
    assert events.count(b'"token":') > 50 * 64
    assert events.endswith(b"data: [DONE]\n\n")


def test_many_of_the_heaviest_at_once_stay_within_the_budget(router: SmallRouter) -> None:
    both = completion(LONG, n=2, **ALL_REPORTED)
    asked = [(both, f"127.0.2.{1 + number % 4}") for number in range(16)]
    most = BUDGET_BYTES + GROWN_MIB * MIB
    with ThreadPoolExecutor(16) as pool, router.growth_below(most), router.others.window():
        statuses = list(pool.map(lambda each: router.status_of(*each), asked))
    assert set(statuses) == {200, 429}


def test_clients_that_leave_give_everything_back(router: SmallRouter) -> None:
    both = completion(LONG, n=2, **ALL_REPORTED)
    for _ in range(10):
        assert router.status_of(both, reads=False) == 200
    assert router.status_of(both) == 200


def test_choices_of_one_prompt_cost_the_router_little_more_than_one(router: SmallRouter) -> None:
    def cpu_of(n: int) -> float:
        before = cpu_seconds(router.pid)
        assert router.status_of(completion(LONG, n=n, **ALL_REPORTED)) == 200
        return cpu_seconds(router.pid) - before

    one = min(cpu_of(1) for _ in range(2))
    assert min(cpu_of(8) for _ in range(2)) <= 3 * one
