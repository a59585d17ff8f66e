"""What one client connection may cost: bytes of heads, seconds of silence, its order, and how many there may be."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from router.listener.connection import AHEAD_BYTES_MAX, ClientConnection
from router.listener.connections import ClientCounters
from router.listener.request_parser import FRAMING_BYTES_MAX, HEAD_BYTES_MAX, HEADERS_MAX, URL_BYTES_MAX
from router.listener.server import SEND_BYTES, TCP_USER_TIMEOUT_MS
from tests.unit.router.raw_http import GET, answered, answers, connect, post, received
from tests.unit.router.scripted_workers import MODEL, RunningRouter, Script
from tests.waiting import comes_true, soon

LAST_GET = GET.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
COMPLETION = json.dumps({"model": MODEL, "prompt": "fox", "max_tokens": 100}).encode()
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"


def get(path: str, *headers: str) -> bytes:
    lines = [f"GET {path} HTTP/1.1", "host: localhost", "connection: close", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


@pytest.fixture
def impatient(model_folder: Path) -> Iterator[RunningRouter]:
    """A router whose budgets of seconds are short."""
    with RunningRouter(
        model_folder, head_seconds_max=0.3, idle_seconds_max=0.3, write_seconds_max=0.5, send_bytes=4096
    ) as running:
        yield running


TOO_LARGE = {
    "one long header": get("/health", "a: " + "x" * HEAD_BYTES_MAX),
    "a header that never ends": b"GET /health HTTP/1.1\r\na: " + b"x" * (3 * HEAD_BYTES_MAX),
    "many headers": get("/health", *("a: b" for _ in range(HEADERS_MAX + 1))),
    "headers for an unknown path": get("/nowhere", *("a: " + "x" * 1000 for _ in range(70))),
    "lines before the request": b"\r\n" * HEAD_BYTES_MAX + LAST_GET,
}


@pytest.mark.parametrize("data", TOO_LARGE.values(), ids=TOO_LARGE)
def test_a_head_beyond_its_budget_is_a_431_and_the_end(router: RunningRouter, data: bytes) -> None:
    refused = router.clients.counters.ended["head"]
    (answer,) = answered(router, data)
    assert answer.status == 431
    assert answer.headers["connection"] == "close"
    assert answer.error["type"] == "invalid_request_error"
    assert router.clients.counters.ended["head"] == refused + 1


def test_a_head_within_its_budget_is_served(router: RunningRouter) -> None:
    headers = [f"h{number}: {'x' * 400}" for number in range(100)]
    (answer,) = answered(router, get("/health", *headers, "a: " + "x" * (20 << 10)))
    assert answer.status == 200


@pytest.mark.parametrize("length", [URL_BYTES_MAX + 1, 60_000])
def test_a_url_beyond_its_budget_is_a_414(router: RunningRouter, length: int) -> None:
    (answer,) = answered(router, get("/" + "x" * length))
    assert answer.status == 414
    assert answer.error["message"]


FRAMING = {
    "trailers": b"1\r\n{\r\n0\r\n" + b"a: b\r\n" * FRAMING_BYTES_MAX,
    "one trailer that never ends": b"1\r\n{\r\n0\r\na: " + b"x" * (3 * FRAMING_BYTES_MAX),
    "a chunk extension": b"1;" + b"x" * (3 * FRAMING_BYTES_MAX),
}


@pytest.mark.parametrize("framing", FRAMING.values(), ids=FRAMING)
def test_chunk_headers_and_trailers_have_a_budget_too(router: RunningRouter, framing: bytes) -> None:
    refused = router.clients.counters.ended["framing"]
    (answer,) = answered(router, CHUNKED + framing)
    assert answer.status == 400
    assert answer.error["message"]
    assert router.clients.counters.ended["framing"] == refused + 1


def test_the_head_after_a_good_request_has_the_same_budget(router: RunningRouter) -> None:
    first, second = answered(router, GET + get("/health", "a: " + "x" * HEAD_BYTES_MAX))
    assert (first.status, second.status) == (200, 431)


def test_heads_of_all_connections_together_have_a_budget(
    router: RunningRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.listener.connections.HELD_BYTES_MAX", 100_000)
    half = b"GET /health HTTP/1.1\r\na: " + b"x" * 40_000
    with connect(router) as first, connect(router) as second:
        first.sendall(half)
        second.sendall(half)
        assert comes_true(lambda: router.clients._held_bytes > 80_000)
        (answer,) = answered(router, half)
        assert answer.status == 503
    assert comes_true(lambda: router.clients._held_bytes == 0)
    assert answered(router, LAST_GET)[0].status == 200


SLOW_HEADS = {"the first": b"", "one after an answer": GET}


@pytest.mark.parametrize("before", SLOW_HEADS.values(), ids=SLOW_HEADS)
def test_a_head_that_does_not_end_in_time_is_a_408(impatient: RunningRouter, before: bytes) -> None:
    *_, last = answered(impatient, before + b"GET /health HTTP/1.1\r\na")
    assert last.status == 408
    assert impatient.clients.counters.ended["slow_head"] == 1


def test_a_head_that_comes_byte_by_byte_gets_no_more_time(impatient: RunningRouter) -> None:
    pause = threading.Event()
    with connect(impatient) as connection:
        for byte in get("/health", "a: " + "x" * 1000):
            try:
                connection.sendall(bytes([byte]))
            except OSError:
                break
            pause.wait(0.02)
        assert impatient.clients.counters.ended["slow_head"] == 1


@pytest.mark.parametrize("before", [b"", GET], ids=["never spoke", "was answered"])
def test_a_silent_connection_is_closed_without_an_answer(impatient: RunningRouter, before: bytes) -> None:
    assert len(answered(impatient, before)) == len(before and [GET])
    assert impatient.clients.counters.ended["idle"] == 1


def test_a_check_that_fails_ends_its_connection_and_others_are_still_looked_at(
    impatient: RunningRouter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    check = ClientConnection.check
    failed: list[ClientConnection] = []

    def fail_once(connection: ClientConnection, now: float, silent_since: float) -> None:
        if not failed and connection._clients is impatient.clients:  # other routers run in this process
            failed.append(connection)
            raise ZeroDivisionError
        check(connection, now, silent_since)

    monkeypatch.setattr(ClientConnection, "check", fail_once)
    assert answered(impatient, b"") == []
    assert failed
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ZeroDivisionError]
    assert answered(impatient, b"") == []
    assert impatient.clients.counters.ended["idle"] == 1


def test_a_body_for_an_unknown_path_is_not_waited_for(impatient: RunningRouter) -> None:
    (answer,) = answered(
        impatient, b"POST /nowhere HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n{"
    )
    assert answer.status == 404
    assert answer.headers["connection"] == "close"


def test_an_answer_that_nobody_reads_is_given_up(impatient: RunningRouter) -> None:
    impatient.workers.script = Script(endless=True)
    body = json.dumps({"model": MODEL, "prompt": ["fox"] * 60, "max_tokens": 250}).encode()
    with connect(impatient, receive_bytes=4096) as connection:
        connection.sendall(post("/v1/completions", body))
        assert comes_true(lambda: impatient.clients.counters.ended["unread"] == 1, 20)
        assert comes_true(lambda: len(impatient.clients) == 0)
        with pytest.raises(AssertionError, match="half"):
            answers(received(connection))


@pytest.mark.parametrize("send_bytes", [4096, 0], ids=["in the process", "in the kernel"])
@pytest.mark.parametrize("step", [1 << 30, 1000], ids=["at a look", "at a write"])
def test_unread_answers_of_all_connections_have_a_total_and_the_fullest_is_cut(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, send_bytes: int, step: int
) -> None:
    monkeypatch.setattr("router.listener.connections.UNREAD_BYTES_MAX", 60_000)
    monkeypatch.setattr("router.listener.connections.UNREAD_BYTES_STEP", step)
    if step == 1000:
        monkeypatch.setattr("router.listener.connections.CHECK_SECONDS", 3600)
    with (
        RunningRouter(model_folder, send_bytes=send_bytes) as router,
        connect(router, receive_bytes=2048) as modest,
        connect(router, receive_bytes=2048) as greedy,
    ):
        modest.sendall(GET * 100)
        assert comes_true(lambda: router._server.server_state.total_requests == 100)
        assert router.clients.counters.ended["unread_bytes"] == 0
        greedy.sendall(GET * 350)
        assert comes_true(lambda: router.clients.counters.ended["unread_bytes"] == 1)
        assert comes_true(lambda: len(router.clients) == 1)
        assert received(greedy).count(b"HTTP/1.1 200") < 350
        modest.sendall(LAST_GET)
        assert len(answers(received(modest))) == 101


def test_the_backlogs_of_streams_count_among_the_unread_bytes(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transport and the kernel take a tenth of the total; so a backlog it is that exceeds it."""
    monkeypatch.setattr("router.listener.connections.UNREAD_BYTES_MAX", 1_000_000)
    with RunningRouter(model_folder, stream_backlog_bytes=1 << 30, send_bytes=4096) as router:
        router.workers.script = Script(endless=True)
        body = {"model": MODEL, "prompt": ["fox"] * 60, "max_tokens": 250, "stream": True}
        with connect(router, receive_bytes=2048) as connection:
            connection.sendall(post("/v1/completions", json.dumps(body).encode()))
            assert comes_true(lambda: router.clients.counters.ended["unread_bytes"] == 1, 60)
            assert comes_true(lambda: sum(router.core.requests_by_state.values()) == 0)


def test_the_kernel_holds_a_bounded_part_of_an_unread_answer(router: RunningRouter) -> None:
    with connect(router):
        assert comes_true(lambda: len(router.clients) > 0)
        for connection in router.clients._places:
            accepted = connection.transport.get_extra_info("socket")
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) <= 2 * SEND_BYTES
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) > SEND_BYTES


def test_accepted_connections_notice_a_peer_that_has_vanished(router: RunningRouter) -> None:
    with connect(router):
        assert comes_true(lambda: len(router.clients) > 0)
        for connection in router.clients._places:
            accepted = connection.transport.get_extra_info("socket")
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == TCP_USER_TIMEOUT_MS


@pytest.mark.parametrize("ahead", [GET, GET * 10 + b"GET /l", post("/nowhere", b"{}")])
def test_a_request_sent_ahead_does_not_hide_a_hang_up(model_folder: Path, ahead: bytes) -> None:
    with RunningRouter(model_folder) as router:
        router.workers.script = Script(silent=True)
        with connect(router) as connection:
            connection.sendall(post("/v1/completions", COMPLETION) + ahead)
            assert comes_true(lambda: len(router.workers.prefills) == 1)
        assert comes_true(lambda: router.workers.cancelled, soon(1))
        assert sum(router.core.requests_by_state.values()) == 0


def test_more_sent_ahead_than_is_read_ends_the_connection_after_a_moment(model_folder: Path) -> None:
    with RunningRouter(model_folder) as router:
        router.workers.script = Script(silent=True)
        with connect(router) as connection:
            connection.sendall(post("/v1/completions", COMPLETION) + GET * (2 * AHEAD_BYTES_MAX // len(GET)))
            assert comes_true(lambda: len(router.workers.prefills) == 1)
        assert comes_true(lambda: router.workers.cancelled, soon(2))
        assert router.clients.counters.ended["ahead"] == 1
        assert sum(router.core.requests_by_state.values()) == 0


def test_a_request_sent_ahead_of_a_long_answer_is_answered(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.listener.connection.AHEAD_SECONDS_MAX", 0.1)
    with RunningRouter(model_folder) as router, connect(router) as patient, connect(router) as other:
        router.workers.script = Script(stalled=True)
        patient.sendall(post("/v1/completions", COMPLETION) + LAST_GET)
        assert comes_true(lambda: len(router.workers.prefills) == 1)
        other.sendall(post("/v1/completions", COMPLETION) + GET * (2 * AHEAD_BYTES_MAX // len(GET)))
        assert comes_true(lambda: router.clients.counters.ended["ahead"] > 0), "the time is over"
        router.call(router.workers.go_on)
        assert [answer.status for answer in answers(received(patient))] == [200, 200]


def test_a_thousand_requests_sent_ahead_are_answered_in_their_order(router: RunningRouter) -> None:
    tokenize = [post("/tokenize", json.dumps({"prompt": "x" * number}).encode()) for number in range(1, 11)]
    requests = [GET, tokenize[3], get("/nowhere").replace(b"connection: close\r\n", b""), *tokenize] * 80
    all_answers = answered(router, b"".join(requests) + LAST_GET)
    assert len(all_answers) == len(requests) + 1 == 1041
    once = [(answer.status, answer.body) for answer in all_answers[:13]]
    assert [status for status, _ in once] == [200, 200, 404, *[200] * 10]
    assert [(answer.status, answer.body) for answer in all_answers[:-1]] == once * 80
    assert len({body for _, body in once}) == 12, "so an exchange of two would be seen"


@pytest.mark.parametrize("coding", ["gzip, chunked", "identity, chunked", "gzip, Chunked"])
def test_a_body_in_another_coding_than_chunked_is_a_501(router: RunningRouter, coding: str) -> None:
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: %s\r\n\r\n" % coding.encode()
    )
    (answer,) = answered(router, head + b"1\r\n{\r\n0\r\n\r\n")
    assert answer.status == 501
    assert "transfer-encoding: chunked" in answer.error["message"]


def test_the_name_of_the_coding_may_be_written_in_any_case(router: RunningRouter) -> None:
    head = CHUNKED.replace(b": chunked", b":  Chunked ").replace(
        b"HTTP/1.1\r\n", b"HTTP/1.1\r\nconnection: close\r\n"
    )
    body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(COMPLETION), COMPLETION)
    assert answered(router, head + body)[0].status == 200


def test_http_0_9_is_refused(router: RunningRouter) -> None:
    (answer,) = answered(router, b"GET /health\r\n\r\n")
    assert answer.status == 505


@pytest.mark.parametrize("hosts", ["", "host: a\r\nhost: b\r\n"], ids=["no host", "two hosts"])
def test_a_request_has_exactly_one_host(router: RunningRouter, hosts: str) -> None:
    (answer,) = answered(router, f"GET /health HTTP/1.1\r\n{hosts}\r\n".encode())
    assert answer.status == 400


def test_a_stream_for_an_http_1_0_client_ends_with_its_connection(router: RunningRouter) -> None:
    body = json.dumps({"model": MODEL, "prompt": "fox", "stream": True}).encode()
    (answer,) = answered(router, post("/v1/completions", body).replace(b"HTTP/1.1", b"HTTP/1.0"))
    assert answer.status == 200
    assert "transfer-encoding" not in answer.headers
    assert answer.body.startswith(b"data: {")
    assert answer.body.endswith(b"data: [DONE]\n\n")


def test_an_answer_in_one_piece_has_its_length(router: RunningRouter) -> None:
    for version in (b"HTTP/1.0", b"HTTP/1.1"):
        data = post("/v1/completions", COMPLETION, "connection: close").replace(b"HTTP/1.1", version)
        (answer,) = answered(router, data)
        assert int(answer.headers["content-length"]) == len(answer.body)


@pytest.mark.parametrize("path", ["/%6detrics", "/healt%68", "/v1%2Fmodels", "//health", "/./health"])
def test_a_path_has_one_spelling(router: RunningRouter, path: str) -> None:
    (answer,) = answered(router, get(path))
    assert answer.status == 404


def test_the_name_of_a_model_may_be_encoded(router: RunningRouter) -> None:
    (answer,) = answered(router, get("/v1/models/%74iny"))
    assert json.loads(answer.body)["id"] == MODEL


UPGRADE = ("connection: upgrade", "upgrade: h2c")


def test_an_offer_to_upgrade_is_passed_over_in_silence(
    router: RunningRouter, caplog: pytest.LogCaptureFixture
) -> None:
    """Java's HTTP client offers HTTP/2 in this way with every first request, bodies included."""
    data = post("/v1/completions", COMPLETION, *UPGRADE)
    cut = len(data) - 5
    with connect(router) as connection:
        connection.sendall(data[:cut])
        connection.sendall(
            data[cut:] + GET.replace(b"\r\n\r\n", b"\r\n" + "\r\n".join(UPGRADE).encode() + b"\r\n\r\n")
        )
        connection.sendall(data + LAST_GET)
        found = answers(received(connection))
    assert [answer.status for answer in found] == [200] * 4
    assert b"choices" in found[0].body
    assert not caplog.records


JSON_BODY = "content-type: application/json"
REFUSED = {
    "400": post("/v1/completions", b"{", JSON_BODY, "connection: close"),
    "403": get("/health", "origin: https://evil.example"),
    "404": get("/nowhere"),
    "405": get("/v1/completions"),
    "413": post("/v1/completions", b"x" * 5000, JSON_BODY, "connection: close"),
    "414": get("/" + "x" * (URL_BYTES_MAX + 1)),
    "415": post("/tokenize", b"{}", "content-type: text/plain", "connection: close"),
    "429": post("/detokenize", b"x" * 3000, JSON_BODY, "connection: close"),
    "431": get("/health", "a: " + "x" * HEAD_BYTES_MAX),
    "501": CHUNKED.replace(b"chunked", b"gzip, chunked"),
    "505": b"GET /health\r\n\r\n",
}


@pytest.fixture(scope="module")
def small(model_folder: Path) -> Iterator[RunningRouter]:
    """A router with little room for bodies."""
    with RunningRouter(model_folder, max_body_bytes=4096, router_bytes_max=2048) as running:
        yield running


@pytest.mark.parametrize("status", REFUSED)
def test_what_is_refused_before_the_core_is_counted_once_by_its_status(
    small: RunningRouter, status: str
) -> None:
    before = small.clients.counters.refusals.copy()
    (answer,) = answered(small, REFUSED[status])
    assert answer.status == int(status)
    assert small.clients.counters.refusals - before == {status: 1}
    assert set(small.clients.counters.refusals) == set(ClientCounters().refusals)
    assert not small.core.counters.requests.total()


def test_what_is_served_is_no_refusal(router: RunningRouter) -> None:
    before = router.clients.counters.refusals.copy()
    (answer,) = answered(router, post("/v1/completions", COMPLETION, "connection: close"))
    assert answer.status == 200
    assert router.clients.counters.refusals == before
