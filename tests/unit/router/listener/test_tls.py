"""TLS at the API's port: streams go on while the certificate is replaced, and what is no handshake is bounded."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import openai
import pytest

from router.config import RouterConfig
from router.listener.connection import LINGER_SECONDS, ClientConnection
from router.listener.connections import SECURED_BYTES_MAX, places_max
from router.listener.tls import ServerCertificate, certificate_of
from router.listener.tls_input import CONNECTION_BYTES, PORTION_BYTES, TlsInput
from shared.primitives.errors import ConfigError
from tests.certificates import pem_pair, write_pair
from tests.unit.router.scripted_workers import RunningRouter, Script
from tests.unit.router.tiny_model import END_ID
from tests.waiting import soon, until

STREAMS, WORDS = 16, 8


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a certificate and its key."""
    write_pair(tmp_path, *pem_pair())
    return tmp_path


def tls_router(model_folder: Path, folder: Path, **settings: object) -> RunningRouter:
    files = {"tls_cert": str(folder / "tls.crt"), "tls_key": str(folder / "tls.key")}
    return RunningRouter(model_folder, **(files | settings))  # type: ignore[arg-type]


def address(router: RunningRouter) -> tuple[str, int]:
    host, _, port = router.url.removeprefix("https://").partition(":")
    return host, int(port)


def certificate_at(router: RunningRouter) -> bytes:
    """What a new connection is shown, in PEM."""
    return ssl.get_server_certificate(address(router)).encode()


def look(router: RunningRouter) -> None:
    """Let the router look at the files now."""
    assert router.certificate is not None
    asyncio.run_coroutine_threadsafe(router.certificate.look(), router._loop).result(10)


def text_of(pem: bytes) -> str:
    return "".join(pem.decode().split())


def test_a_client_that_trusts_the_certificate_is_served(model_folder: Path, folder: Path) -> None:
    with tls_router(model_folder, folder) as router:
        router.says("Hello there")
        trusting = ssl.create_default_context(cafile=str(folder / "tls.crt"))
        with httpx2.Client(base_url=router.url, verify=trusting, timeout=20) as client:
            answer = client.post("/v1/completions", json={"model": "tiny", "prompt": "Hi", "max_tokens": 20})
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["text"] == "Hello there"
            assert len(router.clients) == 1, "the handshake has given its place to the connection"
        until(lambda: not len(router.clients), 10, "the place given back")


def test_sixteen_streams_go_on_while_the_certificate_is_replaced(model_folder: Path, folder: Path) -> None:
    text = "word " * WORDS
    with tls_router(model_folder, folder) as router, ThreadPoolExecutor(STREAMS) as clients:
        first = certificate_at(router)
        output = (*router.tokenizer.encode(text, add_special_tokens=False), END_ID)
        router.workers.script = Script(output=lambda _: output, on_demand=True)
        begun = threading.Semaphore(0)
        answers = [clients.submit(streamed, router, begun) for _ in range(STREAMS)]
        for _ in answers:
            assert begun.acquire(timeout=20)
        second = pem_pair()
        write_pair(folder, *second)
        look(router)
        assert text_of(certificate_at(router)) == text_of(second[0]) != text_of(first)
        for _ in output:
            router.call(router.workers.step)
        assert [answer.result(30) for answer in answers] == [text] * STREAMS


def streamed(router: RunningRouter, begun: threading.Semaphore) -> str:
    """The text of a stream; `begun` is told when its first piece has come."""
    with httpx2.Client(verify=False, timeout=30) as http:
        client = openai.OpenAI(base_url=f"{router.url}/v1", api_key="none", http_client=http)
        pieces: list[str] = []
        for chunk in client.completions.create(model="tiny", prompt="Go", max_tokens=150, stream=True):
            if not pieces:
                begun.release()
            pieces.append(chunk.choices[0].text)
        return "".join(pieces)


@pytest.mark.parametrize("broken", ["another key", "half a file", "encrypted", "gone"])
def test_a_broken_new_certificate_keeps_the_old_one_and_is_counted(
    model_folder: Path, folder: Path, broken: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with tls_router(model_folder, folder) as router:
        first = certificate_at(router)
        cert, key = pem_pair()
        match broken:
            case "another key":
                write_pair(folder, cert, pem_pair()[1])
            case "half a file":
                write_pair(folder, cert[: len(cert) // 2], key)
            case "encrypted":
                write_pair(folder, cert, key.replace(b"BEGIN PRIVATE", b"BEGIN ENCRYPTED PRIVATE"))
            case "gone":
                (folder / "tls.key").unlink()
        look(router)
        look(router)
        assert router.certificate is not None
        assert router.certificate.counters.unread == 2
        assert text_of(certificate_at(router)) == text_of(first)
        write_pair(folder, cert, key)
        look(router)
        assert text_of(certificate_at(router)) == text_of(cert)
        assert router.certificate.counters.unread == 2
    said = capfd.readouterr()
    assert (said.out + said.err).count(
        "tls.certificate_unread"
    ) == 1  # a line for each trouble, not for each look


def test_probes_stay_plain_http(model_folder: Path, folder: Path) -> None:
    with tls_router(model_folder, folder) as router:
        assert httpx2.get(f"{router.admin_url}/readyz").status_code == 200


def test_plain_http_is_no_handshake(model_folder: Path, folder: Path) -> None:
    with tls_router(model_folder, folder) as router:
        with socket.create_connection(address(router)) as plain:
            plain.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            plain.settimeout(10)
            assert b"HTTP" not in plain.recv(100)
        until(lambda: router.clients.counters.ended["handshake"] == 1, 10, "the count")
        until(lambda: not len(router.clients), 10, "its place given back")


def test_a_silent_connection_has_a_place_and_a_deadline(model_folder: Path, folder: Path) -> None:
    with tls_router(model_folder, folder, head_seconds_max=0.5) as router:
        with socket.create_connection(address(router)) as silent:
            until(lambda: len(router.clients) == 1, 10, "its place")
            silent.settimeout(10)
            assert silent.recv(1) == b""
        until(lambda: router.clients.counters.ended["handshake"] == 1, 10, "the count")


def test_a_newer_connection_takes_the_place_of_an_unfinished_handshake(
    model_folder: Path, folder: Path
) -> None:
    with tls_router(model_folder, folder, connections_max=4) as router:
        silent = [socket.create_connection(address(router)) for _ in range(4)]
        until(lambda: len(router.clients) == 4, 10, "their places")
        assert httpx2.get(f"{router.url}/health", verify=False).status_code == 200
        for each in silent:
            each.close()


def test_a_request_that_comes_with_the_handshake_is_answered(model_folder: Path, folder: Path) -> None:
    """The client sends its request at once behind its last message of the handshake."""
    context = ssl.create_default_context(cafile=str(folder / "tls.crt"))
    with tls_router(model_folder, folder) as router:
        for _ in range(50):
            with (
                socket.create_connection(address(router)) as plain,
                context.wrap_socket(plain, server_hostname="localhost") as secured,
            ):
                secured.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
                assert secured.recv(64).startswith(b"HTTP/1.1 200")


def test_the_protocol_agreed_on_is_http_1_1_over_tls_1_2_at_least(model_folder: Path, folder: Path) -> None:
    context = ssl.create_default_context(cafile=str(folder / "tls.crt"))
    context.set_alpn_protocols(["h2", "http/1.1"])
    with (
        tls_router(model_folder, folder) as router,
        socket.create_connection(address(router)) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as secured,
    ):
        assert secured.selected_alpn_protocol() == "http/1.1"
        assert secured.version() == "TLSv1.3"


def test_a_certificate_without_a_key_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="--tls-cert is given without --tls-key"):
        certificate_of(RouterConfig(tls_cert=str(folder / "tls.crt")))
    assert certificate_of(RouterConfig()) is None


def test_a_wrong_pair_at_the_start_is_one_sentence(folder: Path) -> None:
    write_pair(folder, pem_pair()[0], pem_pair()[1])
    with pytest.raises(ConfigError, match="the key is not that of the certificate"):
        ServerCertificate(str(folder / "tls.crt"), str(folder / "tls.key"))


def test_secured_connections_are_no_more_than_have_memory(folder: Path) -> None:
    secured = RouterConfig(tls_cert=str(folder / "tls.crt"), tls_key=str(folder / "tls.key"))
    assert places_max(secured) == 3072 < secured.connections_max == places_max(RouterConfig())
    assert places_max(RouterConfig(tls_cert="a", tls_key="b", connections_max=10)) == 10
    assert places_max(secured) * CONNECTION_BYTES <= SECURED_BYTES_MAX


def test_a_secured_connection_costs_little_whatever_came_on_it(model_folder: Path, folder: Path) -> None:
    """What uvloop reads at once stays the connection's, in its buffer and in OpenSSL's: it is given a portion."""
    context = ssl.create_default_context(cafile=str(folder / "tls.crt"))
    with (
        tls_router(model_folder, folder) as router,
        socket.create_connection(address(router), timeout=20) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as secured,
    ):
        secured.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\na: " + b"x" * 60_000 + b"\r\n\r\n")
        assert secured.recv(64).startswith(b"HTTP/1.1 200")
        (connection,) = router.clients._places
        assert isinstance(connection, ClientConnection)
        assert connection._plain is not None
        below = connection._plain.get_protocol()
        assert isinstance(below, TlsInput)
        assert len(below.get_buffer(1 << 20)) == PORTION_BYTES


def test_a_slow_client_gets_all_of_its_last_answer(model_folder: Path, folder: Path) -> None:
    """It reads nothing for longer than a client has to confirm the end of a connection; and that, it never does."""
    context = ssl.create_default_context(cafile=str(folder / "tls.crt"))
    body = json.dumps({"prompt": ["fox"] * 60, "model": "tiny", "max_tokens": 250}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: "
    with tls_router(model_folder, folder, send_bytes=4096) as router, socket.socket() as plain:
        router.workers.script = Script(endless=True)
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        plain.connect(address(router))
        with context.wrap_socket(plain, server_hostname="localhost") as secured:
            secured.sendall(f"{head}{len(body)}\r\n\r\n".encode() + body)
            parts = [secured.recv(1000)]
            until(lambda: not any(is_answering(each) for each in router.clients._places), 20, "the answer")
            threading.Event().wait(LINGER_SECONDS + 0.5)
            while part := secured.recv(4096):
                parts.append(part)
            until(lambda: not len(router.clients), LINGER_SECONDS + soon(2), "its place given back")
        answer_head, _, answer = b"".join(parts).partition(b"\r\n\r\n")
        assert b" 200 " in answer_head, answer_head
        assert len(answer) > 30_000
        assert b'"total_tokens":' in answer[-200:], "the end is missing"


def is_answering(connection: object) -> bool:
    return isinstance(connection, ClientConnection) and connection._exchange is not None
