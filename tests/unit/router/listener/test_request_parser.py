"""What a request costs to parse: bytes that look like its end do not make it dear."""

from __future__ import annotations

import pytest

from router.listener.request_parser import CHUNKED_READ_BYTES, ParserState, RequestHead, RequestParser

BODY_BYTES = 256 << 10
CHUNKED = b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"


class CountingHandler:
    """Counts what it is told."""

    def __init__(self) -> None:
        self.parts = 0
        self.body = b""
        self.complete = 0

    def request_begun(self, head: RequestHead) -> None:
        assert head.path == b"/"

    def body_received(self, body: bytes) -> None:
        self.parts += 1
        self.body += body

    def request_complete(self) -> None:
        self.complete += 1


def feed_all(parser: RequestParser, data: bytes) -> int:
    """The number of calls until the request is complete or the data is used up."""
    at = calls = 0
    while at < len(data) and parser.state is not ParserState.COMPLETE:
        at = parser.feed(data, at)
        calls += 1
    return calls


@pytest.mark.parametrize("line", [b"\r\n", b"0\r\n\r\n", b"0\r\na: b\r\n\r\n"])
def test_a_chunk_full_of_ends_of_bodies_is_parsed_in_few_parts(line: bytes) -> None:
    handler = CountingHandler()
    body = line * (BODY_BYTES // len(line))
    wire = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    calls = feed_all(RequestParser(handler), CHUNKED + wire)
    assert calls <= len(wire) // CHUNKED_READ_BYTES + 3
    assert handler.body == body
    assert handler.complete == 1


def test_empty_lines_before_a_request_are_passed_over_at_once() -> None:
    handler = CountingHandler()
    parser = RequestParser(handler)
    assert feed_all(parser, b"\r\n" * 10_000 + b"GET / HTTP/1.1\r\nhost: a\r\n\r\n") == 2
    assert handler.complete == 1


def test_nothing_beyond_a_request_is_parsed_before_the_next_is_wanted() -> None:
    handler = CountingHandler()
    parser = RequestParser(handler)
    data = CHUNKED + b"1;ext\r\nx\r\n00\r\na: b\r\n\r\n" + CHUNKED + b"0\r\n\r\n"
    at = 0
    while parser.state is not ParserState.COMPLETE:
        at = parser.feed(data, at)
    assert data[at:].startswith(CHUNKED)
    assert handler.complete == 1
    parser.next()
    feed_all(parser, data[at:])
    assert handler.complete == 2
