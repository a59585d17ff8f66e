"""What the dearest requests cost a router of 1 GiB: bounded memory, and others are answered meanwhile.

`python -m tests.unit.router.openai.test_request_memory` prints the figures.
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
from tests.unit.router.tiny_model import CORPUS, write_folder
from tests.waiting import soon

BODY_BYTES = (4 << 20) - 4096
CONTEXT_LEN = 8192
WORK_MIB = 64  # of one tokenizer's thread, see router.access.byte_budget
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONG_TOKEN = "x" * 80  # as long as real vocabularies have them: a text may have 80 characters for each token
SLICE_CHARS = 8 * CONTEXT_LEN  # of one call of the tokenizer; of 4 bytes each they are SLICE_BYTES
TEXT_CHARS = len(LONG_TOKEN) * CONTEXT_LEN  # more are refused before they are tokenized


@dataclass
class Post:
    """A request, and words of the answer that show how far the router came with it."""

    path: str
    body: bytes
    answer: str
    status: int = 400


def repeated(item: bytes) -> bytes:
    """A JSON list as large as a body may be."""
    return b"[" + item + (b"," + item) * (BODY_BYTES // (len(item) + 1) - 2) + b"]"


def body(name: str, value: bytes) -> bytes:
    return b'{"model":"%s","%s":%s}' % (MODEL.encode(), name.encode(), value)


def text(word: str, chars: int) -> bytes:
    """A JSON string of at most so many characters."""
    return b'"' + (word * (chars // len(word))).encode() + b'"'


def message(content: bytes) -> bytes:
    return b'[{"role":"user","content":' + content + b"}]"


COUNTED = f"has more than {CONTEXT_LEN} tokens, which is the model's context\""  # only the tokenizer knows it
UNCUT = "characters without a space or line break at which it can be cut"
DIGITS, WIDE, WORDS = text("7", SLICE_CHARS), text("🙂", SLICE_CHARS), text("fox ", TEXT_CHARS)
LINES = text(LONG_TOKEN + r"\n", TEXT_CHARS // 2)  # two tokens each: together the longest that fits
SHORT = message(text("x", 70))[1:-1]
TOKENIZED: dict[str, Post] = {
    "digits": Post(COMPLETIONS, body("prompt", DIGITS), COUNTED),
    "wide characters": Post(COMPLETIONS, body("prompt", WIDE), COUNTED),
    "words": Post(COMPLETIONS, body("prompt", WORDS), COUNTED),
    "one message": Post(CHAT, body("messages", message(WORDS)), COUNTED),
    "many texts": Post(COMPLETIONS, body("prompt", b"[" + b",".join([DIGITS] * 60) + b"]"), COUNTED),
    "to tokenize": Post("/tokenize", body("prompt", WIDE), COUNTED),
    "many messages": Post(CHAT, body("messages", b"[" + b",".join([SHORT] * CONTEXT_LEN) + b"]"), COUNTED),
    "long tokens": Post("/tokenize", body("prompt", LINES), f'"max_model_len":{CONTEXT_LEN}', 200),
}
BIASES = b"{" + repeated(b'"5":1')[1:-1] + b"}"
REFUSED: dict[str, Post] = {
    "small objects": Post(COMPLETIONS, body("unknown", repeated(b'{"":0}')), "prompt is required"),
    "digits of 4 MiB": Post(
        COMPLETIONS, body("prompt", text("7", BODY_BYTES)), f"has {BODY_BYTES} characters"
    ),
    "digits without a seam": Post(COMPLETIONS, body("prompt", text("7", TEXT_CHARS)), UNCUT),
    "texts": Post(COMPLETIONS, body("prompt", repeated(b'"a"')), "at most 128 prompts"),
    "ids": Post(COMPLETIONS, body("prompt", repeated(b"300")), "tokens and leaves no room"),
    "lists": Post(COMPLETIONS, body("prompt", repeated(b"[]")), "at most 128 prompts"),
    "messages": Post(CHAT, body("messages", repeated(b'{"role":"user","content":""}')), "messages has"),
    "small messages": Post(CHAT, body("messages", repeated(b'{"role":""}')), "messages has"),
    "stop strings": Post(COMPLETIONS, body("stop", repeated(b'"a"')), "beside the prompt"),
    "biases": Post(COMPLETIONS, body("logit_bias", BIASES), "beside the prompt"),
    "to detokenize": Post("/detokenize", body("tokens", repeated(b"300")), "tokens takes at most"),
}
FIRST = Post(COMPLETIONS, body("prompt", b'"fox"'), "choices")  # what it makes the router load is not counted
DEAREST = TOKENIZED | REFUSED


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
    answers: list[str]
    mib: float  # by which the process grew at most
    seconds: float  # until the last was answered
    health_seconds: float  # the longest that another client waited for /health


def tiny_folder(parent: Path) -> Path:
    return write_folder(parent / MODEL, context_len=CONTEXT_LEN, corpus=[*CORPUS, LONG_TOKEN])


@contextmanager
def running_router(folder: Path) -> Iterator[MeasuredRouter]:
    command = [sys.executable, "-m", "tests.unit.router.router_child", str(folder), str(CONTEXT_LEN)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        yield MeasuredRouter(child.stdout.readline().strip(), child.pid)
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait(20) == 0


def cost_of(router: MeasuredRouter, posts: list[Post]) -> Cost:
    done, waits = threading.Event(), [0.0]

    def client() -> httpx2.Client:
        return httpx2.Client(base_url=router.url, timeout=60, verify=False)  # certificates take 20 ms to load

    def look() -> None:
        with client() as looking:
            while not done.wait(0.01):
                began = time.monotonic()
                assert looking.get("/health").status_code == 200
                waits.append(time.monotonic() - began)

    def post(one: Post) -> httpx2.Response:
        with client() as posting:
            return posting.post(one.path, content=one.body, headers={"content-type": "application/json"})

    looking = threading.Thread(target=look)
    router.forget_peak()
    before, began = router.status_mib("VmRSS"), time.monotonic()
    looking.start()
    with ThreadPoolExecutor(len(posts)) as threads:
        answers = list(threads.map(post, posts))
    seconds = time.monotonic() - began
    done.set()
    looking.join()
    statuses, texts = [one.status_code for one in answers], [one.text for one in answers]
    return Cost(statuses, texts, router.status_mib("VmHWM") - before, seconds, max(waits))


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeasuredRouter]:
    folder = tiny_folder(tmp_path_factory.mktemp("memory"))
    with running_router(folder) as router:
        cost_of(router, [FIRST])
        yield router


@pytest.mark.parametrize("name", DEAREST)
def test_one_request_costs_at_most_its_body_and_the_work_of_one_thread(
    router: MeasuredRouter, name: str
) -> None:
    cost = cost_of(router, [DEAREST[name]])
    assert cost.statuses == [DEAREST[name].status]
    assert DEAREST[name].answer in cost.answers[0]
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
    assert set(cost.statuses) == {400}
    assert all(post.answer in answer for post, answer in zip(posts, cost.answers, strict=True))
    assert cost.mib <= len(posts) * BODY_BYTES / 2**20 + 2 * WORK_MIB
    assert cost.health_seconds <= soon(0.2)


def main() -> None:
    with tempfile.TemporaryDirectory() as parent:
        folder = tiny_folder(Path(parent))
        runs = {name: [name] for name in DEAREST} | AT_ONCE
        with running_router(folder) as router:
            for name, posts in runs.items():
                cost = cost_of(router, [DEAREST[post] for post in posts])
                times = f"{cost.seconds:5.2f} s {cost.health_seconds:5.2f} s"
                print(f"{name:25}{cost.mib:6.1f} MiB {times}", set(cost.statuses))  # noqa: T201


if __name__ == "__main__":
    main()
