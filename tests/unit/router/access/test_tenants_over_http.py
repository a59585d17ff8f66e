"""Clients of different addresses share a router's memory for bodies and its threads for text as different tenants."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from router.openai.prompts.prompts import TokenIds
from router.request_context import client_of, tenant_of
from tests.unit.router.request_contexts import scope_of
from tests.unit.router.scripted_workers import MODEL, RunningRouter
from tests.waiting import comes_true

# ---- a client is known by its address: that of its connection, or the one that a trusted proxy names -----------------


def ask(router: RunningRouter, source: str, **headers: str) -> str:
    """Send a request from an address of loopback; returns the tenant as workers see it."""
    port = int(router.url.rpartition(":")[2])
    connection = http.client.HTTPConnection("127.0.0.1", port, source_address=(source, 0))
    body = msgspec.json.encode({"model": MODEL, "prompt": "fox"})
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json", **names})
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    connection.close()
    return router.last_prefill.tenant


def test_clients_of_different_addresses_are_different_tenants(router: RunningRouter) -> None:
    first, second = ask(router, "127.0.0.2"), ask(router, "127.0.0.3")
    assert first != second
    assert first == ask(router, "127.0.0.2")
    assert "127.0.0" not in first + second


def test_what_a_client_says_of_itself_is_ignored(router: RunningRouter) -> None:
    plain = ask(router, "127.0.0.1")
    assert ask(router, "127.0.0.1", X_Forwarded_For="10.0.0.7") == plain


def test_a_trusted_proxy_names_its_clients(model_folder: Path) -> None:
    with RunningRouter(model_folder, trusted_proxies=("127.0.0.0/29",)) as router:
        named = ask(router, "127.0.0.2", X_Forwarded_For="10.0.0.7")
        assert named != ask(router, "127.0.0.2", X_Forwarded_For="10.0.0.8")
        assert named == ask(router, "127.0.0.3", X_Forwarded_For="10.0.0.7")
        assert named != ask(router, "127.0.0.9", X_Forwarded_For="10.0.0.7"), "not a trusted proxy"


@pytest.mark.parametrize(
    ("host", "tenant"),
    [
        ("10.0.0.7", "10.0.0.7"),
        ("::ffff:10.0.0.7", "10.0.0.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::ffff", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("unknown" * 20, ("unknown" * 20)[:64]),
    ],
)
def test_an_ipv6_client_is_its_network(host: str, tenant: str) -> None:
    assert tenant_of(scope_of(client=(host, 1))) == client_of((host, 1, 0, 3)) == tenant


def test_a_connection_without_an_address_has_no_name() -> None:
    assert tenant_of(scope_of(client=None)) == client_of(None) == client_of("/run/router.sock") == ""


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
