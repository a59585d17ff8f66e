"""The admin port: one request a connection, bounded in number, bytes and time, whatever clients do."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import struct
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest
from structlog.testing import capture_logs

from shared.primitives.errors import StartError
from shared.process.admin_port import CONNECTIONS_MAX, HEAD_BYTES_MAX, SILENT_MAX, AdminPage, AdminPort
from tests.waiting import soon, until

GET = b"GET /here HTTP/1.1\r\nhost: localhost\r\n"


class AskedPages:
    """Answers with the path, but for two paths: one raises, one takes until a test allows it."""

    def __init__(self) -> None:
        self.asked, self.allowed = threading.Event(), asyncio.Event()

    async def answer(self, path: str, _accept: str) -> AdminPage:
        if path == "/broken":
            raise KeyError("what a client wrote")
        if path == "/slow":
            self.asked.set()
            await self.allowed.wait()
        return AdminPage(200, "text/plain", path.encode())


@pytest.fixture
def pages() -> AskedPages:
    return AskedPages()


@pytest.fixture
def admin(pages: AskedPages) -> Iterator[AdminPort]:
    admin = AdminPort("127.0.0.1", 0, pages.answer)
    yield admin
    admin.close()


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """As of a process of Segue, which takes all that it may have."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def connect(admin: AdminPort, source: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection(("127.0.0.1", admin.port), timeout=30, source_address=(source, 0))


def answer_to(admin: AdminPort, request: bytes) -> bytes:
    """Everything that comes until the port closes the connection."""
    with connect(admin) as client:
        client.sendall(request)
        parts = []
        while part := client.recv(65536):
            parts.append(part)
        return b"".join(parts)


def is_answered(admin: AdminPort, source: str) -> bool:
    with connect(admin, source) as client:
        try:
            client.sendall(GET + b"\r\n")
            return client.recv(65536).startswith(b"HTTP/1.1 200 ")
        except ConnectionError:
            return False


def get(admin: AdminPort, path: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{admin.port}{path}", timeout=30) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def test_without_descriptors_it_writes_few_lines_and_no_traceback(
    admin: AdminPort, caplog: pytest.LogCaptureFixture
) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert get(admin, "/here") == (200, b"/here")
    with socket.socket() as client, capture_logs() as lines:
        lowest_free = os.dup(client.fileno())
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, before[1]))
        try:
            client.connect(("127.0.0.1", admin.port))
            until(lambda: lines, 30, "a line about it")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
    until(lambda: get(admin, "/here") == (200, b"/here"), 30, "an answer")
    assert {line["event"] for line in lines} == {"admin.exhausted"}
    assert len(lines) <= 8  # of 128 complaints
    assert caplog.records == []


def test_a_page_is_answered_without_its_query_and_the_connection_ends(admin: AdminPort) -> None:
    answer = answer_to(admin, GET.replace(b"/here", b"/here?there=1") + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.endswith(b"\r\n\r\n/here")
    assert b"connection: close" in answer.lower()


@pytest.mark.parametrize(("path", "status"), [("/here", 200), ("/broken", 500)])
def test_head_is_answered_as_get_is_but_without_the_body(admin: AdminPort, path: str, status: int) -> None:
    got = answer_to(admin, GET.replace(b"/here", path.encode()) + b"\r\n")
    head = answer_to(admin, GET.replace(b"GET /here", b"HEAD " + path.encode()) + b"\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert head == got.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        pytest.param(b"\x16\x03\x01\x00\xa5\x01", 400, id="TLS"),
        pytest.param(b"GET /here\r\n\r\n", 400, id="HTTP/0.9"),
        pytest.param(
            b"POST /here HTTP/1.1\r\nhost: localhost\r\ncontent-length: 3\r\n\r\nabc", 405, id="a POST"
        ),
        pytest.param(GET + b"a: " + b"b" * 2 * HEAD_BYTES_MAX, 431, id="an endless head"),
        pytest.param(GET + b"\r\n" + GET + b"\r\n", 200, id="two requests: one is read"),
    ],
)
def test_what_else_comes_gets_one_short_answer(admin: AdminPort, request_bytes: bytes, status: int) -> None:
    answer = answer_to(admin, request_bytes)
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert answer.count(b"HTTP/1.1") == 1
    assert get(admin, "/here") == (200, b"/here")


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        pytest.param(b"host: localhost:8001", 200, id="localhost"),
        pytest.param(b"host: [::1]:8001", 200, id="an address"),
        pytest.param(b"host: router.internal", 200, id="a private name"),
        pytest.param(b"host: pages.example.com:8001", 403, id="DNS rebinding"),
        pytest.param(b"host: localhost\r\norigin: http://localhost:3000", 403, id="a web page"),
        pytest.param(b"host: localhost\r\norigin: null", 403, id="a web page without an origin"),
    ],
)
def test_web_pages_read_nothing_of_a_port_on_loopback(admin: AdminPort, lines: bytes, status: int) -> None:
    answer = answer_to(admin, b"GET /here HTTP/1.1\r\n" + lines + b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert answer.endswith(b"/here") == (status == 200)


def test_an_open_port_answers_all_names_but_no_web_page(pages: AskedPages) -> None:
    with closing(AdminPort("0.0.0.0", 0, pages.answer)) as admin:
        named = b"GET /here HTTP/1.1\r\nhost: router.example.com\r\n"
        assert answer_to(admin, named + b"\r\n").startswith(b"HTTP/1.1 200 ")
        assert answer_to(admin, named + b"origin: http://router.example.com\r\n\r\n").startswith(
            b"HTTP/1.1 403 "
        )


@pytest.mark.usefixtures("many_descriptors")
def test_silent_connections_keep_nobody_out(pages: AskedPages) -> None:
    """Hundreds come between a probe's connection and its first bytes, without a thread each; the oldest are closed."""
    with closing(AdminPort("127.0.0.1", 0, pages.answer)) as admin, ExitStack() as stack:
        threads = threading.active_count()
        silent = [stack.enter_context(connect(admin)) for _ in range(600)]
        probe = stack.enter_context(connect(admin))
        silent += [stack.enter_context(connect(admin)) for _ in range(SILENT_MAX - 300)]
        probe.sendall(GET + b"\r\n")
        assert probe.recv(65536).startswith(b"HTTP/1.1 200 ")
        assert threading.active_count() == threads
        assert len(admin.open) <= CONNECTIONS_MAX
        assert silent[0].recv(1) == b""


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    """As of a process that may open a thousand."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("few_descriptors")
def test_with_few_descriptors_fewer_silent_connections_are_kept(
    pages: AskedPages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.process.admin_port.SILENT_SECONDS_MAX", 3600)
    with closing(AdminPort("127.0.0.1", 0, pages.answer)) as admin, ExitStack() as stack:
        silent = [stack.enter_context(connect(admin)) for _ in range(SILENT_MAX // 2)]
        assert get(admin, "/here") == (200, b"/here")
        assert silent[0].recv(1) == b""


def test_half_heads_go_the_oldest_first_of_the_address_with_most(admin: AdminPort) -> None:
    with ExitStack() as stack:

        def half(source: str) -> socket.socket:
            connection = stack.enter_context(connect(admin, source))
            connection.sendall(GET)
            return connection

        modest = half("127.0.0.3")
        greedy = [half("127.0.0.2") for _ in range(CONNECTIONS_MAX)]
        assert greedy[0].recv(1) == b""
        modest.sendall(b"\r\n")
        assert modest.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_a_probe_waits_for_answers_that_take_long_but_not_for_their_end(
    admin: AdminPort, pages: AskedPages
) -> None:
    with ExitStack() as stack:
        for _ in range(CONNECTIONS_MAX):
            slow = stack.enter_context(connect(admin))
            slow.sendall(GET.replace(b"/here", b"/slow") + b"\r\n")
        until(lambda: len(admin.answering) == CONNECTIONS_MAX, 30, "so many answers under way")
        assert get(admin, "/here") == (200, b"/here")
        admin.loop.call_soon_threadsafe(pages.allowed.set)
        assert slow.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_an_address_that_connects_too_often_is_closed_unread_but_not_the_machines_own(
    pages: AskedPages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.process.admin_port.SECOND", 3600)
    monkeypatch.setattr("shared.process.admin_port.ACCEPTED_PER_SECOND_MAX", 20)
    with closing(AdminPort("127.0.0.1", 0, pages.answer)) as admin:
        assert sum(is_answered(admin, "127.0.0.2") for _ in range(40)) == 20
        assert sum(is_answered(admin, "127.0.0.1") for _ in range(40)) == 40


def test_a_silent_connection_ends_by_itself(admin: AdminPort, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.process.admin_port.REQUEST_SECONDS_MAX", 0.2)
    monkeypatch.setattr("shared.process.admin_port.SILENT_SECONDS_MAX", 0.2)
    for begun in (b"", b"GET /here HT"):
        with connect(admin) as silent:
            silent.settimeout(soon(5))
            silent.sendall(begun)
            assert silent.recv(1) == b""


def test_a_page_that_fails_is_a_500_without_the_error_and_the_port_lives_on(admin: AdminPort) -> None:
    status, body = get(admin, "/broken")
    assert status == 500
    assert b"what a client wrote" not in body
    assert get(admin, "/here") == (200, b"/here")


def test_a_probe_that_hangs_up_leaves_no_traceback(
    admin: AdminPort, pages: AskedPages, capfd: pytest.CaptureFixture[str]
) -> None:
    with connect(admin) as impatient:
        impatient.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close by a reset
        impatient.sendall(b"GET /slow HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert pages.asked.wait(10)
    until(lambda: not admin.open, 10, "the end of the connection")
    admin.loop.call_soon_threadsafe(pages.allowed.set)
    assert get(admin, "/slow") == (200, b"/slow")
    assert capfd.readouterr().err == ""


def test_a_port_in_use_is_one_sentence(pages: AskedPages) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartError, match=f"127.0.0.1:{port}.*in use"):
            AdminPort("127.0.0.1", port, pages.answer)
