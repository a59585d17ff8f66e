"""HTTP as attackers write it: odd framing, odd lines, foreign pages. Nothing is smuggled, echoed or left hanging."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tests.abuse.target import MARKER, AbusedDeployment
from tests.abuse.wire import Conversation, completion, connect, converse, get, post, talk

BODY = completion(MARKER)
SIZE = len(BODY)
JSON = "Content-Type: application/json\r\n"
REFUSED = {400}
CLOSES = {400, 501, 505}  # or no answer at all: the connection just closes


@dataclass(frozen=True, slots=True)
class StreamCase:
    """Bytes of one connection; how many answers come, which statuses they may have, and whether the server closes."""

    data: bytes
    statuses: set[int]
    replies: int = 1
    closes: bool = False
    check: Callable[[Conversation], bool] = lambda _: True


def head(lines: str, body: bytes = b"") -> bytes:
    """A POST of these header lines, which lack their ends."""
    text = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n" + JSON + lines.replace("\n", "\r\n")
    return text.encode() + b"\r\n\r\n" + body


def chunked(data: bytes, lines: str = "Transfer-Encoding: chunked") -> bytes:
    """A POST with a body as given."""
    return head(lines, data)


def line(text: bytes, rest: bytes = b"Host: localhost\r\n\r\n") -> bytes:
    """A request with this first line."""
    return text + b"\r\n" + rest


def only_status(status: int) -> Callable[[Conversation], bool]:
    return lambda said: said.statuses() == [status]


def no_echo(said: Conversation) -> bool:
    return MARKER.encode() not in said.raw


def no_chunks(said: Conversation) -> bool:
    return b"transfer-encoding" not in bytes(said.raw).lower()


def no_leave_for_other_pages(said: Conversation) -> bool:
    return b"access-control-allow" not in bytes(said.raw).lower()


GOOD_CHUNK = b"%x\r\n%s\r\n" % (SIZE, BODY)
END = b"0\r\n\r\n"
SMUGGLED = get("/v1/models")
FRAMING = {
    "length and chunks": StreamCase(
        chunked(GOOD_CHUNK + END, f"Content-Length: {SIZE}\nTransfer-Encoding: chunked"), REFUSED, closes=True
    ),
    "chunks and length": StreamCase(
        chunked(END + SMUGGLED, "Transfer-Encoding: chunked\nContent-Length: 4"), REFUSED, closes=True
    ),
    "two lengths": StreamCase(head(f"Content-Length: {SIZE}\nContent-Length: 0", BODY), REFUSED, closes=True),
    "a list of lengths": StreamCase(head(f"Content-Length: {SIZE}, {SIZE}", BODY), REFUSED, closes=True),
    "a length with a sign": StreamCase(head(f"Content-Length: +{SIZE}", BODY), REFUSED, closes=True),
    "a negative length": StreamCase(head("Content-Length: -1", BODY), REFUSED, closes=True),
    "a hexadecimal length": StreamCase(head("Content-Length: 0x5", BODY), REFUSED, closes=True),
    "a length in two words": StreamCase(head("Content-Length: 1 2", BODY), REFUSED, closes=True),
    "a length beyond 64 bits": StreamCase(
        head("Content-Length: 18446744073709551617", BODY), {400, 413}, closes=True
    ),
    "a length of a terabyte": StreamCase(head("Content-Length: 1099511627776", BODY), {413}, closes=True),
    "an unknown coding": StreamCase(
        chunked(GOOD_CHUNK + END, "Transfer-Encoding: xchunked"), CLOSES, closes=True
    ),
    "chunked before another coding": StreamCase(
        chunked(GOOD_CHUNK + END, "Transfer-Encoding: chunked, gzip"), CLOSES, closes=True
    ),
    "chunked behind a vertical tab": StreamCase(
        chunked(GOOD_CHUNK + END, "Transfer-Encoding: \x0bchunked"), CLOSES, closes=True
    ),
    "a chunk's size with a sign": StreamCase(chunked(b"-1\r\n" + END), REFUSED, closes=True),
    "a chunk's size with 0x": StreamCase(chunked(b"0x5\r\nhello\r\n" + END), REFUSED, closes=True),
    "a chunk's size beyond 64 bits": StreamCase(chunked(b"1" + b"0" * 17 + b"\r\n"), REFUSED, closes=True),
    "two words for a chunk's size": StreamCase(chunked(b"5 5\r\nhello\r\n" + END), REFUSED, closes=True),
    "a chunk longer than its size": StreamCase(chunked(b"2\r\nhello\r\n" + END), REFUSED, closes=True),
    "a chunk's size cut by a bare line feed": StreamCase(
        chunked(b"%x\n%s\n0\n\n" % (SIZE, BODY)), REFUSED, closes=True
    ),
    "chunks and a trailer": StreamCase(chunked(GOOD_CHUNK + b"0\r\nX-Sum: 1\r\n\r\n"), {200}),
    "a byte a chunk": StreamCase(chunked(b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + END), {200}),
    "a folded header": StreamCase(get("/v1/models", headers="X-A: 1\r\n 2\r\n"), REFUSED, closes=True),
    "bare line feeds": StreamCase(b"GET /v1/models HTTP/1.1\nHost: localhost\n\n", REFUSED, closes=True),
    "a bare carriage return": StreamCase(
        get("/v1/models", headers="X-A: 1\rX-B: 2\r\n"), REFUSED, closes=True
    ),
    "NUL in a header": StreamCase(get("/v1/models", headers="X-A: 1\x002\r\n"), REFUSED, closes=True),
    "a space before the colon": StreamCase(get("/v1/models", headers="X-A : 1\r\n"), REFUSED, closes=True),
    "a header without a colon": StreamCase(get("/v1/models", headers=f"{MARKER}\r\n"), REFUSED, closes=True),
    "a header without a name": StreamCase(get("/v1/models", headers=": 1\r\n"), REFUSED, closes=True),
    "a compressed body": StreamCase(
        post("/v1/completions", b"\x1f\x8b\x08" + BODY, headers="Content-Encoding: gzip\r\n"), {400, 415}
    ),
}
LINES = {
    "HTTP/0.9": StreamCase(b"GET /v1/models\r\n\r\n", CLOSES, replies=0, closes=True),
    "HTTP/1.0": StreamCase(b"GET /v1/models HTTP/1.0\r\n\r\n", {200}, closes=True, check=no_chunks),
    "a stream to HTTP/1.0": StreamCase(
        post("/v1/completions", completion(MARKER, stream=True)).replace(b"HTTP/1.1", b"HTTP/1.0"),
        {200},
        closes=True,
        check=lambda said: no_chunks(said) and said.replies()[0].body.endswith(b"data: [DONE]\n\n"),
    ),
    "HTTP/2 with prior knowledge": StreamCase(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", CLOSES, closes=True),
    "HTTP/9.9": StreamCase(line(b"GET /v1/models HTTP/9.9"), CLOSES, closes=True),
    "an unknown method": StreamCase(line(b"FROB /v1/models HTTP/1.1"), {400, 405, 501}),
    "a method in small letters": StreamCase(line(b"get /v1/models HTTP/1.1"), {400, 405, 501}),
    "CONNECT": StreamCase(line(b"CONNECT 127.0.0.1:22 HTTP/1.1"), {400, 404, 405, 501}),
    "TRACE": StreamCase(
        line(b"TRACE /v1/models HTTP/1.1", f"Host: localhost\r\nX-A: {MARKER}\r\n\r\n".encode()),
        {400, 405, 501},
        check=no_echo,
    ),
    "OPTIONS of everything": StreamCase(line(b"OPTIONS * HTTP/1.1"), {400, 404, 405}),
    "a whole URL": StreamCase(line(b"GET http://localhost/v1/models HTTP/1.1"), {200, 400, 404}),
    "NUL in the path": StreamCase(line(b"GET /v1/\0models HTTP/1.1"), REFUSED, closes=True),
    "bytes in the path that are not ASCII": StreamCase(line(b"GET /\xff\xfe HTTP/1.1"), {400, 404}),
    "a space in the path": StreamCase(line(b"GET /v1/models x HTTP/1.1"), REFUSED, closes=True),
    "a path that is written in percents": StreamCase(line(b"GET /v1/%6dodels HTTP/1.1"), {400, 404}),
    "metrics written in percents": StreamCase(line(b"GET /%6detrics HTTP/1.1"), {400, 404}),
    "metrics behind dots": StreamCase(line(b"GET /v1/../metrics HTTP/1.1"), {400, 404}),
    "metrics behind two slashes": StreamCase(line(b"GET //metrics HTTP/1.1"), {400, 404}),
    "metrics in a percent's percent": StreamCase(line(b"GET /%256detrics HTTP/1.1"), {400, 404}),
    "a NUL in percents": StreamCase(line(b"GET /v1/models%00 HTTP/1.1"), {400, 404}),
    "a path with the marker": StreamCase(line(f"GET /{MARKER} HTTP/1.1".encode()), {404}, check=no_echo),
    "a URL of 9 KiB": StreamCase(line(b"GET /" + b"a" * 9216 + b" HTTP/1.1"), {414}, closes=True),
    "a header of 70 KiB": StreamCase(
        get("/v1/models", headers=f"X-A: {'a' * 71_680}\r\n"), {431}, closes=True
    ),
    "10,000 headers": StreamCase(
        get("/v1/models", headers="a: b\r\n" * 10_000 + "x: y\r\n" * 2_000), {431}, closes=True
    ),
    "trailers of 200 KiB": StreamCase(
        chunked(GOOD_CHUNK + b"0\r\n" + b"X-A: b\r\n" * 25_000 + b"\r\n"), {400, 431}
    ),
    "HEAD": StreamCase(line(b"HEAD /v1/models HTTP/1.1"), {200, 405}),
    "a GET with a body": StreamCase(
        get("/v1/models", headers="Content-Length: 5\r\n") + b"hello", {200, 400}
    ),
}
HEADERS = {
    "an upgrade to a web socket": StreamCase(
        get(
            "/v1/models", headers="Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        ),
        {200, 400, 426, 501},
    ),
    "an upgrade to HTTP/2": StreamCase(
        get(
            "/v1/models",
            headers="Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n",
        ),
        {200, 400, 426, 501},
    ),
    "an expectation": StreamCase(post("/v1/completions", BODY, headers="Expect: 100-continue\r\n"), {200}),
    "an unknown expectation": StreamCase(
        post("/v1/completions", BODY, headers=f"Expect: {MARKER}\r\n"), {200, 400, 417}
    ),
    "no host": StreamCase(b"GET /v1/models HTTP/1.1\r\n\r\n", {400, 403, 421}),
    "two hosts": StreamCase(get("/v1/models", headers="Host: other\r\n"), {400, 403, 421}),
    "the host of a page that was bound to this machine": StreamCase(
        b"GET /v1/models HTTP/1.1\r\nHost: evil.example:8000\r\n\r\n", {400, 403, 421}
    ),
    "text of a foreign page": StreamCase(
        post("/v1/completions", BODY, headers="Origin: https://evil.example\r\n", content_type="text/plain"),
        {403, 415},
    ),
    "JSON of a foreign page": StreamCase(
        post("/v1/completions", BODY, headers="Origin: https://evil.example\r\n"), {403}
    ),
    "JSON of a page without an origin": StreamCase(
        post("/v1/completions", BODY, headers="Origin: null\r\n"), {403}
    ),
    "a form of a foreign page": StreamCase(
        post(
            "/v1/completions",
            BODY,
            headers="Origin: https://evil.example\r\n",
            content_type="application/x-www-form-urlencoded",
        ),
        {403, 415},
    ),
    "text of nobody's page": StreamCase(post("/v1/completions", BODY, content_type="text/plain"), {415}),
    "JSON with a charset": StreamCase(
        post("/v1/completions", BODY, content_type="application/json; charset=utf-8"), {200}
    ),
    "a foreign page that asks for leave": StreamCase(
        line(
            b"OPTIONS /v1/completions HTTP/1.1",
            b"Host: localhost\r\nOrigin: https://evil.example\r\nAccess-Control-Request-Method: POST\r\n\r\n",
        ),
        {400, 403, 404, 405},
        check=no_leave_for_other_pages,
    ),
}
PIPES = {
    "1,000 requests in one write": StreamCase(get("/v1/models") * 1000, {200}, replies=1000),
    "a refused request before a good one": StreamCase(
        get("/nothing") + get("/v1/models"),
        {200, 404},
        replies=2,
        check=lambda said: said.statuses() == [404, 200],
    ),
    "answers in the order of the requests": StreamCase(
        post("/v1/completions", BODY) + get("/v1/models") + get("/nothing"),
        {200, 404},
        replies=3,
        check=lambda said: (
            said.statuses() == [200, 200, 404] and b'"text_completion"' in said.replies()[0].body
        ),
    ),
    "what follows a bad request is not served": StreamCase(
        head("Content-Length: x") + SMUGGLED, REFUSED, closes=True, check=only_status(400)
    ),
    "a second request that a short length lays bare": StreamCase(
        head("Content-Length: 0") + get("/nothing"), {400, 404}, replies=2
    ),
}
CASES = FRAMING | LINES | HEADERS | PIPES


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_connection_is_answered_or_closed(target: AbusedDeployment, case: StreamCase) -> None:
    seen_closing = 10**9 if case.closes else case.replies  # a server that closes ends the conversation itself
    method = "HEAD" if case.data.startswith(b"HEAD") else "GET"
    said = talk(target.port, case.data, replies=seen_closing, seconds_max=15, method=method)
    replies = said.replies()
    assert case.replies <= len(replies) or not case.replies, said.raw[:300]
    assert {reply.status for reply in replies} <= case.statuses, said.raw[:300]
    assert said.closed or not case.closes, "the connection is still open"
    assert case.check(said), said.raw[:300]
    for reply in replies:
        if reply.status >= 400 and method != "HEAD":
            reply.error()


@pytest.mark.aggregated
def test_a_hang_up_behind_a_second_request_is_seen(target: AbusedDeployment) -> None:
    long = completion(MARKER, max_tokens=1500, ignore_eos=True)
    with connect(target.port) as connection:
        converse(connection, post("/v1/completions", long) + get("/v1/models"), seconds_max=1)
    target.nothing_held_within(2)


def test_an_error_of_a_path_is_the_same_for_all_spellings(target: AbusedDeployment) -> None:
    one = talk(target.port, get(f"/{MARKER}")).replies()[0]
    other = talk(target.port, get("/v1/nothing")).replies()[0]
    assert json.loads(one.body) == json.loads(other.body)
