"""One client asks for more than everything, from its address; another one is served meanwhile, and nothing stays."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx2
import pytest

from tests.integration.deployments.deployment import LocalDeployment
from tests.waiting import soon, until

GREEDY, OTHER = "127.0.0.2", "127.0.0.3"  # source addresses on loopback
CONNECTIONS, PROMPTS, TOKENS = 6, 64, 2000  # 384 generations


@contextmanager
def flood(port: int) -> Iterator[None]:
    """Connections of one client that read all they get; at the end all hang up at once."""
    sockets = [_generate(port, number) for number in range(CONNECTIONS)]
    readers = [threading.Thread(target=_read, args=(each,)) for each in sockets]
    for reader in readers:
        reader.start()
    yield
    for each in sockets:
        each.shutdown(socket.SHUT_RDWR)
        each.close()
    for reader in readers:
        reader.join()


def _generate(port: int, number: int) -> socket.socket:
    prompts = [f"Story {number} of {index} tells" for index in range(PROMPTS)]
    fields = {"model": "smollm2", "prompt": prompts, "max_tokens": TOKENS, "stream": True, "ignore_eos": True}
    body = json.dumps(fields).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    connection = socket.create_connection(("127.0.0.1", port), source_address=(GREEDY, 0))
    connection.sendall(head.encode() + body)
    return connection


def _read(connection: socket.socket) -> None:
    try:
        while connection.recv(1 << 16):
            pass
    except OSError:
        pass  # this end has hung up


def _seconds_for_four_tokens(url: str, number: int) -> float:
    began_at = time.monotonic()
    with httpx2.Client(transport=httpx2.HTTPTransport(local_address=OTHER), timeout=60.0) as client:
        fields = {"model": "smollm2", "prompt": f"Short {number}", "max_tokens": 4, "ignore_eos": True}
        answer = client.post(f"{url}/v1/completions", json=fields)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 4
    return time.monotonic() - began_at


def waiting(running: LocalDeployment) -> float:
    """Requests in front of prefill or decode."""
    return running.live_requests("waiting") + running.live_requests("ready")


@pytest.mark.timeout(300)
def test_a_client_that_takes_everything_holds_up_no_other_and_leaves_nothing_behind(
    two_each: LocalDeployment,
) -> None:
    failed = two_each.total("router", "segue_requests_total{outcome=500}")
    with flood(two_each.router_port):
        until(lambda: two_each.live_requests("ready") > 0, 120, "a line for decode")
        until(lambda: waiting(two_each) > CONNECTIONS * PROMPTS / 2, 120, "a line")
        seconds = [_seconds_for_four_tokens(two_each.url, number) for number in range(5)]
        assert waiting(two_each) > 0, "the flood was over"
    assert max(seconds) <= soon(2), seconds
    until(lambda: not two_each.held(), soon(2), "everything given back")
    assert two_each.total("router", "segue_requests_total{outcome=500}") == failed
