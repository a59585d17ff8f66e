"""Bytes of a client become requests, one at a time and within budgets of bytes. No sockets, no clock.

    head ──► body ──► complete ──next()──► head …

httptools (llhttp) parses; by itself it has no limit on a head, gathers header values in quadratic time, and goes on to
the next request at once. So it is never given more than the bytes of one request. Where that ends is found before:
a head ends with an empty line, a body has a length, and `ChunkedEnd` walks over chunks. The walk and llhttp agree on
all that llhttp accepts: hexadecimal digits alone are a size, and CRLF alone is an end of line.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Protocol

import httptools

Headers = list[tuple[bytes, bytes]]

HEAD_BYTES_MAX = 64 << 10  # 431; four times what browsers and proxies send
HEADERS_MAX = 128  # 431; a header costs 130 bytes in Python, however short it is
URL_BYTES_MAX = 8 << 10  # 414; paths of the API have 100 bytes
# 400; chunk sizes, extensions and trailers between two bytes of a body, or after the last
FRAMING_BYTES_MAX = 64 << 10
CHUNKED_READ_BYTES = 16 << 10  # of a chunked body at once; framing is judged between two of these
EMPTY_LINE = b"\r\n\r\n"


class Refusal(Exception):  # noqa: N818  the client's fault, not this program's
    """What a client sent is not served. `cause` is the label of the counter."""

    def __init__(self, status: int, cause: str, message: str):
        super().__init__(message)
        self.status = status
        self.cause = cause
        self.message = message


@dataclass(slots=True)
class RequestHead:
    """A request as its head says; names of headers are in lower case."""

    method: str
    version: str  # 1.0 or 1.1
    path: bytes  # not decoded: an encoded path is no second spelling of one that a proxy denies
    query: bytes
    headers: Headers
    keep_alive: bool
    expects_continue: bool


class RequestHandler(Protocol):
    """Is told what was parsed."""

    def request_begun(self, head: RequestHead) -> None: ...

    def body_received(self, body: bytes) -> None: ...

    def request_complete(self) -> None: ...


class ParserState(Enum):
    """Where in a request the parser is."""

    HEAD = auto()
    BODY = auto()
    COMPLETE = auto()


class RequestParser:
    """Parses the requests of one connection. `spent_bytes` counts against the budget of the moment."""

    def __init__(self, handler: RequestHandler):
        self._handler = handler
        self._llhttp: Any = httptools.HttpRequestParser(self)
        self.next()

    def next(self) -> None:
        """Be ready for another request."""
        self.state = ParserState.HEAD
        self.spent_bytes = 0  # of the head; in a chunked body, of framing since the last byte of the body
        self._tail = b""  # the last bytes that were parsed: an empty line may be cut
        self._refusal: Refusal | None = None
        self._url: list[bytes] = []
        self._url_bytes = 0
        self._headers: Headers = []
        self._body_bytes_left: int | None = 0  # None: chunked
        self._raw_body = False  # llhttp parses no body after a head that asks for an upgrade
        self._chunked_end = ChunkedEnd()

    def feed(self, data: bytes, begin: int) -> int:
        """Parse some of `data` from `begin` on, none of it beyond this request; where the rest begins.

        Raises `Refusal`, after which the parser must not be used.
        """
        end = self._part_end(data, begin)
        part = data[begin:end]
        if self.state is ParserState.HEAD and not self._tail and not part.strip(b"\r\n"):
            self.spent_bytes += len(part)  # lines before a request are empty by RFC 9112 section 2.2
            return end
        if self._raw_body:
            self.on_body(part)
            if not self._body_bytes_left:
                self._complete()
            return end
        self.spent_bytes += len(part)
        self._parse(part)
        if self._refusal:
            raise self._refusal
        self._tail = (self._tail + part)[-3:]
        return end

    def _part_end(self, data: bytes, begin: int) -> int:
        assert self.state is not ParserState.COMPLETE
        in_head = self.state is ParserState.HEAD
        if not in_head and self._body_bytes_left is not None:
            return min(len(data), begin + self._body_bytes_left)
        if in_head and self.spent_bytes >= HEAD_BYTES_MAX:
            raise Refusal(431, "head", f"the head of a request must not exceed {HEAD_BYTES_MAX} bytes")
        if self.spent_bytes >= FRAMING_BYTES_MAX:
            raise Refusal(
                400, "framing", f"chunk headers and trailers must not exceed {FRAMING_BYTES_MAX} bytes"
            )
        if not in_head:
            return self._chunked_end.find(data, begin, min(len(data), begin + CHUNKED_READ_BYTES))
        end = min(len(data), begin + HEAD_BYTES_MAX - self.spent_bytes)
        if not self._tail and (empty := end - begin - len(data[begin:end].lstrip(b"\r\n"))):
            return begin + empty
        return self._after_empty_line(data, begin, end)

    def _after_empty_line(self, data: bytes, begin: int, end: int) -> int:
        """Where the first empty line ends, which may have begun before `begin`; `end` if there is none."""
        cut = (self._tail + data[begin : min(begin + 3, end)]).find(EMPTY_LINE)
        if cut >= 0:
            return begin + cut + len(EMPTY_LINE) - len(self._tail)
        found = data.find(EMPTY_LINE, begin, end)
        return found + len(EMPTY_LINE) if found >= 0 else end

    def _parse(self, part: bytes) -> None:
        try:
            self._llhttp.feed_data(part)
        except httptools.HttpParserUpgrade:
            pass  # not offered: the request is answered in HTTP/1.1, as RFC 9110 section 7.8 allows
        except httptools.HttpParserCallbackError as error:
            if not isinstance(error.__context__, httptools.HttpParserError):
                raise  # a fault of this program
            raise _not_http() from None
        except httptools.HttpParserError:
            raise _not_http() from None

    def _complete(self) -> None:
        self.state = ParserState.COMPLETE
        self._handler.request_complete()

    # ---- httptools calls these ---------------------------------------------------------------------------------

    def on_url(self, url: bytes) -> None:
        """A part of the URL."""
        self._url_bytes += len(url)
        if self._url_bytes > URL_BYTES_MAX:
            self._refusal = Refusal(414, "url", f"the URL must not exceed {URL_BYTES_MAX} bytes")
        else:
            self._url.append(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header; or a trailer, which means nothing here."""
        if self.state is not ParserState.HEAD:
            return
        if len(self._headers) >= HEADERS_MAX:
            self._refusal = Refusal(431, "head", f"a request must not have more than {HEADERS_MAX} headers")
        else:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """The head is complete."""
        if self._refusal:
            return
        try:
            head = self._head()
        except Refusal as refusal:
            self._refusal = refusal
            return
        self.state = ParserState.BODY
        self.spent_bytes = 0
        self._handler.request_begun(head)

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self.spent_bytes = 0
        if self._body_bytes_left is not None:
            self._body_bytes_left -= len(body)
        self._handler.body_received(body)

    def on_message_complete(self) -> None:
        """The request is complete, as far as llhttp knows."""
        if not (self._refusal or self._raw_body):
            self._complete()

    def _head(self) -> RequestHead:
        """The head. Raises `Refusal`."""
        version = self._llhttp.get_http_version()
        if version not in ("1.0", "1.1"):
            raise Refusal(505, "version", "this server speaks HTTP/1.1 and HTTP/1.0")
        if version == "1.1" and sum(name == b"host" for name, _ in self._headers) != 1:
            raise Refusal(400, "not_http", "an HTTP/1.1 request has exactly one host header")
        values = dict(self._headers)
        codings = [value for name, value in self._headers if name == b"transfer-encoding"]
        chunked = bool(codings)
        if chunked and (len(codings) > 1 or codings[0].strip().lower() != b"chunked"):
            raise Refusal(
                501, "coding", "a body may be chunked and nothing else: send transfer-encoding: chunked"
            )
        upgrade = self._llhttp.should_upgrade()
        if upgrade and chunked:
            raise Refusal(400, "not_http", "a request that asks for an upgrade cannot have a chunked body")
        self._body_bytes_left = None if chunked else int(values.get(b"content-length") or 0)
        self._raw_body = bool(upgrade and self._body_bytes_left)
        path, query = _split(b"".join(self._url))
        return RequestHead(
            method=self._llhttp.get_method().decode("ascii"),
            version=version,
            path=path,
            query=query,
            headers=self._headers,
            keep_alive=version == "1.1" and self._llhttp.should_keep_alive(),
            expects_continue=version == "1.1" and values.get(b"expect", b"").lower() == b"100-continue",
        )


class ChunkedEnd:
    """Walks over a chunked body to where it ends, in time linear in its chunks, whatever they hold."""

    def __init__(self) -> None:
        self._line = b""  # a part of a line that has not ended
        self._data_bytes_left = 0  # of the current chunk, with its end of line
        self._in_trailers = False

    def find(self, data: bytes, begin: int, end: int) -> int:
        """Walk on from `begin`; where the body ends, or `end`. Raises `Refusal` for a size that is none."""
        at = begin
        while at < end:
            if self._data_bytes_left:
                step = min(self._data_bytes_left, end - at)
                self._data_bytes_left -= step
                at += step
                continue
            stop = data.find(b"\n", at, end) + 1
            self._line += data[at : stop or end]
            at = stop or end
            if stop and self._line_ends_body():
                break
        return at

    def _line_ends_body(self) -> bool:
        line, self._line = self._line, b""
        if self._in_trailers:
            return line == b"\r\n"
        try:
            size = int(line.partition(b";")[0], 16)
        except ValueError:
            raise _not_http() from None
        self._in_trailers = not size
        self._data_bytes_left = size + 2 if size > 0 else 0
        return False


def _split(url: bytes) -> tuple[bytes, bytes]:
    """Path and query. Raises `Refusal` for what has no path, such as a CONNECT."""
    try:
        parsed = httptools.parse_url(url)
    except httptools.HttpParserInvalidURLError:
        raise _not_http() from None
    return parsed.path or b"/", parsed.query or b""


def _not_http() -> Refusal:
    return Refusal(400, "not_http", "the request is not valid HTTP")
