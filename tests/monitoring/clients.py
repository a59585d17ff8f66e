"""Clients of a release: a steady load in the background, and single requests."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import httpx2

WORDS = "the expedition left the harbour at dawn and nobody aboard had expected that it would return"
SECONDS_MAX = 240.0


class Clients:
    """Requests to one router, with a valid key unless another one is given."""

    def __init__(self, url: str, key: str):
        self.url, self.key = url, key
        self._numbers = itertools.count()

    def ask(self, *, words: int = 300, tokens: int = 30, key: str = "", body: bytes = b"") -> int:
        """Read one streamed answer to its end; its status. Each prompt is a new one, or `body` is sent as it is."""
        rotated = WORDS.split() * (words // 16 + 1)
        prompt = " ".join([f"Chapter {next(self._numbers)}.", *rotated[:words]])
        request = {
            "model": "smollm2",
            "prompt": prompt,
            "max_tokens": tokens,
            "stream": True,
            "ignore_eos": True,
        }
        headers = {"Authorization": f"Bearer {key or self.key}", "Content-Type": "application/json"}
        given = {"content": body} if body else {"json": request}
        with httpx2.stream(
            "POST", f"{self.url}/v1/completions", headers=headers, timeout=SECONDS_MAX, verify=False, **given
        ) as answer:
            text = answer.read()
        assert answer.status_code != 200 or b"[DONE]" in text, text[-300:]
        return answer.status_code

    @contextmanager
    def load(self, at_a_time: int, pause_seconds: float = 0.0) -> Iterator[list[int]]:
        """So many requests at a time, with a pause after each, until the block ends; their statuses as they come."""
        ended = threading.Event()
        statuses: list[int] = []

        def work() -> None:
            while not ended.is_set():
                statuses.append(self.ask())
                ended.wait(pause_seconds)

        with ThreadPoolExecutor(at_a_time) as threads:
            working = [threads.submit(work) for _ in range(at_a_time)]
            try:
                yield statuses
            finally:
                ended.set()
        for each in working:
            each.result()

    @contextmanager
    def streams(self, count: int, tokens: int) -> Iterator[list[Future[int]]]:
        """So many long answers at once; the block does not wait for them, its end does."""
        with ThreadPoolExecutor(count) as threads:
            yield [threads.submit(self.ask, words=20, tokens=tokens) for _ in range(count)]
