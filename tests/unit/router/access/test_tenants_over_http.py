"""Clients of different addresses share a router's memory for bodies and its threads for text as different tenants."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from router.openai.prompts.prompts import TokenIds
from tests.unit.router.scripted_workers import MODEL, RunningRouter
from tests.waiting import comes_true

GREEDY, MODEST = "127.0.0.2", "127.0.0.3"


def post(router: RunningRouter, source: str, path: str, prompt: str) -> int:
    """The status of the answer to a client of this address of loopback."""
    port = int(router.url.rpartition(":")[2])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20, source_address=(source, 0))
    connection.request("POST", path, json.dumps({"model": MODEL, "prompt": prompt}))
    status = connection.getresponse().status
    connection.close()
    return status


@contextmanager
def tokenizer_stopped(router: RunningRouter) -> Iterator[None]:
    """Within it the one thread for text waits in the first prompt that it gets."""
    prompts, go_on = router.serving.prompts, threading.Event()
    encode = prompts.encode

    def wait_and_encode(text: str, context_len: int, param: str, add_special_tokens: bool = True) -> TokenIds:
        assert go_on.wait(20)
        return encode(text, context_len, param, add_special_tokens)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompts, "encode", wait_and_encode)
        try:
            yield
        finally:
            go_on.set()


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_a_body_weighs_until_it_is_tokenized_and_half_of_the_memory_is_one_clients(
    model_folder: Path, path: str
) -> None:
    prompt = "x" * 150
    with (
        RunningRouter(model_folder, tokenizer_threads=1, router_bytes_max=400) as router,
        ThreadPoolExecutor(1) as clients,
    ):
        budget = router.serving.bodies.budget
        with tokenizer_stopped(router):
            first = clients.submit(post, router, GREEDY, path, prompt)
            assert comes_true(lambda: budget.held_bytes > 150)
            assert post(router, GREEDY, path, prompt) == 429
            assert not first.done()
        assert first.result() == 200
        assert comes_true(lambda: not budget.held_bytes)
        assert post(router, GREEDY, path, prompt) == 200


def test_a_client_with_one_prompt_goes_before_the_line_of_a_client_with_many(model_folder: Path) -> None:
    with RunningRouter(model_folder, tokenizer_threads=1) as router, ThreadPoolExecutor(6) as clients:
        queue, asked = router.serving.prompts._queue, list[Future[int]]()

        def ask(source: str, prompt: str) -> None:
            asked.append(clients.submit(post, router, source, "/v1/completions", prompt))
            others = len(asked) - 1
            assert comes_true(lambda: not queue._free and queue.waiting == others)

        with tokenizer_stopped(router):
            for _ in range(5):
                ask(GREEDY, "fox")
            ask(MODEST, "dog " * 20)
        assert [answer.result() for answer in asked] == [200] * 6
    lengths = [prefill.prompt_len for prefill in router.workers.prefills]
    assert lengths.index(max(lengths)) == 2, "behind one that runs and one in turn"
