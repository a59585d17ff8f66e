"""What the dearest requests of 4 MiB cost a router of 1 GiB: bounded memory, and others are answered meanwhile.

`python -m tests.unit.router.test_request_memory` prints the figures.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest

from tests.unit.router.scripted_workers import MODEL
from tests.unit.router.tiny_model import write_folder
from tests.waiting import soon

BODY_BYTES = (4 << 20) - 4096
CONTEXT_LEN = 8192
WORK_MIB = 64  # of one tokenizer's thread, see router.http.byte_budget
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
Post = tuple[str, bytes]


def repeated(item: bytes) -> bytes:
    """A JSON list as large as a body may be."""
    return b"[" + item + (b"," + item) * (BODY_BYTES // (len(item) + 1) - 2) + b"]"


def body(name: str, value: bytes) -> bytes:
    return b'{"model":"%s","%s":%s}' % (MODEL.encode(), name.encode(), value)


DIGITS = b'"' + b"7" * BODY_BYTES + b'"'
WIDE = b'"' + "🙂".encode() * (BODY_BYTES // 4) + b'"'
DEAREST: dict[str, Post] = {
    "small objects": (COMPLETIONS, body("unknown", repeated(b'{"":0}'))),
    "digits": (COMPLETIONS, body("prompt", DIGITS)),
    "wide characters": (COMPLETIONS, body("prompt", WIDE)),
    "words": (COMPLETIONS, body("prompt", b'"' + b"fox " * (BODY_BYTES // 4) + b'"')),
    "texts": (COMPLETIONS, body("prompt", repeated(b'"a"'))),
    "ids": (COMPLETIONS, body("prompt", repeated(b"300"))),
    "lists": (COMPLETIONS, body("prompt", repeated(b"[]"))),
    "messages": (CHAT, body("messages", repeated(b'{"role":"user","content":""}'))),
    "small messages": (CHAT, body("messages", repeated(b'{"role":""}'))),
    "one message": (CHAT, body("messages", b'[{"role":"user","content":' + DIGITS + b"}]")),
    "stop strings": (COMPLETIONS, body("stop", repeated(b'"a"'))),
    "biases": (COMPLETIONS, body("logit_bias", b"{" + repeated(b'"5":1')[1:-1] + b"}")),
    "to tokenize": ("/tokenize", body("prompt", DIGITS)),
    "to detokenize": ("/detokenize", body("tokens", repeated(b"300"))),
}


@dataclass
class MeasuredRouter:
    """A router in another process."""

    url: str
    pid: int

    def status_mib(self, field: str) -> float:
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024

    def forget_peak(self) -> None:
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")


@dataclass
class Cost:
    """Of requests that were sent at once."""

    statuses: list[int]
    mib: float  # by which the process grew at most
    seconds: float  # until the last was answered
    livez_seconds: float  # the longest that another client waited for /livez


@contextmanager
def running_router(folder: Path) -> Iterator[MeasuredRouter]:
    command = [sys.executable, "-m", "tests.unit.router.router_child", str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        yield MeasuredRouter(child.stdout.readline().strip(), child.pid)
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait(20) == 0


def cost_of(router: MeasuredRouter, posts: list[Post]) -> Cost:
    done, waits = threading.Event(), [0.0]

    def look() -> None:
        with httpx2.Client(base_url=router.url, timeout=60) as client:
            while not done.wait(0.01):
                began = time.monotonic()
                assert client.get("/livez").status_code == 200
                waits.append(time.monotonic() - began)

    def post(one: Post) -> int:
        headers = {"content-type": "application/json"}
        return httpx2.post(router.url + one[0], content=one[1], headers=headers, timeout=60).status_code

    looking = threading.Thread(target=look)
    router.forget_peak()
    before, began = router.status_mib("VmRSS"), time.monotonic()
    looking.start()
    with ThreadPoolExecutor(len(posts)) as threads:
        statuses = list(threads.map(post, posts))
    seconds = time.monotonic() - began
    done.set()
    looking.join()
    return Cost(statuses, router.status_mib("VmHWM") - before, seconds, max(waits))


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeasuredRouter]:
    folder = write_folder(tmp_path_factory.mktemp("memory") / MODEL, context_len=CONTEXT_LEN)
    with running_router(folder) as router:
        cost_of(
            router, [(COMPLETIONS, body("prompt", b'"fox"'))]
        )  # what the first request loads is not counted
        yield router


@pytest.mark.parametrize("name", DEAREST)
def test_one_request_costs_at_most_its_body_and_the_work_of_one_thread(
    router: MeasuredRouter, name: str
) -> None:
    cost = cost_of(router, [DEAREST[name]])
    assert cost.statuses == [400]
    assert cost.mib <= BODY_BYTES / 2**20 + WORK_MIB


BEHIND = ["small objects", "messages", "texts", "one message"]
AT_ONCE = {
    "4 of small objects": ["small objects"] * 4,
    "4 of messages": ["messages"] * 4,
    "8 behind 3 that are busy": ["digits", "wide characters", "digits", *BEHIND, *BEHIND],
}


@pytest.mark.parametrize("name", AT_ONCE)
def test_requests_that_wait_cost_their_bodies_and_others_are_answered(
    router: MeasuredRouter, name: str
) -> None:
    posts = [DEAREST[one] for one in AT_ONCE[name]]
    cost = cost_of(router, posts)
    assert set(cost.statuses) <= {400, 429}
    assert cost.mib <= len(posts) * BODY_BYTES / 2**20 + 2 * WORK_MIB
    assert cost.livez_seconds <= soon(0.2)


def main() -> None:
    with tempfile.TemporaryDirectory() as parent:
        folder = write_folder(Path(parent) / MODEL, context_len=CONTEXT_LEN)
        runs = {name: [name] for name in DEAREST} | AT_ONCE
        with running_router(folder) as router:
            for name, posts in runs.items():
                print(name, cost_of(router, [DEAREST[post] for post in posts]))  # noqa: T201


if __name__ == "__main__":
    main()
