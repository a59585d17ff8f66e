"""Strangers who begin TLS handshakes, as many as they can: who is there goes on, and who comes gets in.

The key is RSA of 4,096 bits, so a handshake takes the router some milliseconds, and a stranger nothing: the same few
bytes each time. Without turns the router makes all that have come before it looks at anything else.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import httpx2
import pytest

from router.listener.tls_input import HANDSHAKE_SHARE
from tests.abuse.procfs import cpu_seconds
from tests.abuse.wire import connect
from tests.certificates import pem_pair, write_pair
from tests.link_keys import write_new_keys
from tests.unit.router.tiny_model import write_folder
from tests.waiting import soon, until

STRANGERS = 400  # that come at once, from each of these in turn
ADDRESSES = [f"127.0.3.{number}" for number in range(1, 9)]
OWN_ADDRESS = "127.0.0.9"
ANSWER_SECONDS = 0.15  # for one who is there
WELCOME_SECONDS = 0.6  # for one who comes: behind one handshake of each stranger's address
FLOOD_SECONDS = 2.0


def client_hello() -> bytes:
    """The first bytes of an honest client."""
    context = ssl.create_default_context()
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname="localhost").do_handshake()
    return outgoing.read()


@dataclass(frozen=True, slots=True)
class SecuredRouter:
    """A router with TLS, in a process of its own; it has no worker."""

    port: int
    pid: int
    context: ssl.SSLContext

    def secured(self) -> http.client.HTTPSConnection:
        """A connection of one who is no stranger."""
        connection = http.client.HTTPSConnection(
            "localhost", self.port, timeout=60, source_address=(OWN_ADDRESS, 0), context=self.context
        )
        connection.connect()
        return connection


def seconds_to_ask(connection: http.client.HTTPSConnection) -> float:
    began = time.monotonic()
    connection.request("GET", "/health")
    connection.getresponse().read()
    return time.monotonic() - began


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredRouter]:
    root = tmp_path_factory.mktemp("secured")
    write_new_keys(root / "keys")
    write_folder(root / "tiny")
    write_pair(root, *pem_pair(rsa_bits=4096))
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        command = [sys.executable, "-m", "router", "--model", str(root / "tiny"), "--port", str(port)]
        command += ["--admin-port", "0", "--workers", "prefill=127.0.0.1:1", "--log-level", "error"]
        command += ["--link-keys-file", str(root / "keys" / "router.pem")]
        command += ["--tls-cert", str(root / "tls.crt"), "--tls-key", str(root / "tls.key")]
        process = subprocess.Popen(command)
        try:
            until(lambda: answers(port) or process.poll() is not None, 60, "a router that answers")
            yield SecuredRouter(port, process.pid, ssl.create_default_context(cafile=str(root / "tls.crt")))
            assert process.poll() is None, "the router has not lived through all that"
        finally:
            process.kill()
            process.wait()


def answers(port: int) -> bool:
    with suppress(httpx2.TransportError):
        return httpx2.get(f"https://localhost:{port}/health", verify=False).status_code == 503
    return False


@contextmanager
def flood(router: SecuredRouter) -> Iterator[None]:
    """Meanwhile as many handshakes are begun as one thread can, and STRANGERS of them at once before."""
    hello, over = client_hello(), threading.Event()
    crowd = [connect(router.port, ADDRESSES[number % len(ADDRESSES)]) for number in range(STRANGERS)]

    def go_on() -> None:
        number = 0
        while not over.wait(0.001):
            with suppress(OSError):
                begin(crowd, number % STRANGERS)
            number += 1

    def begin(crowd: list[socket.socket], at: int) -> None:
        crowd[at].close()
        crowd[at] = connect(router.port, ADDRESSES[at % len(ADDRESSES)])
        crowd[at].sendall(hello)

    for each in crowd:
        each.sendall(hello)
    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        for each in crowd:
            each.close()


def test_handshakes_of_strangers_delay_nobody_and_leave_the_router_most_of_its_time(
    router: SecuredRouter,
) -> None:
    present = router.secured()
    asked = [seconds_to_ask(present)]
    with flood(router):
        began, cpu_before = time.monotonic(), cpu_seconds(router.pid)
        asked.append(seconds_to_ask(present))
        welcomes = []
        while (elapsed := time.monotonic() - began) < FLOOD_SECONDS:
            came = time.monotonic()
            router.secured().close()
            welcomes.append(time.monotonic() - came)
            asked.append(seconds_to_ask(present))
        share = (cpu_seconds(router.pid) - cpu_before) / elapsed
    assert max(asked) <= soon(ANSWER_SECONDS), f"one who was there waited for {max(asked):.2f} s"
    assert max(welcomes) <= soon(WELCOME_SECONDS), f"one who came waited for {max(welcomes):.2f} s"
    assert HANDSHAKE_SHARE / 4 < share < 2 * HANDSHAKE_SHARE, f"the router computed {share:.0%} of the time"
    present.close()
