"""One client connection: requests in their order, answers in the same, and an end to what takes too long.

    HEAD ──► BODY ──► ANSWER ──► HEAD …     and from each, when a budget is exceeded or the client must go:
                                 CLOSING    an error was written; what still comes is discarded for a moment

A request begins when the one before is answered. What comes earlier is held as it is, so that memory has a bound, and
reading goes on, so that a client that hangs up is noticed whatever it has sent ahead. The deadline of the moment is a
number; `ClientConnections` looks at it several times a second. This file knows no paths and no JSON of the API.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

import msgspec
import uvicorn
from starlette.types import Scope

from router.listener.connections import ClientConnections
from router.listener.exchange import CLOSE, Exchange, Framing, encode_head
from router.listener.output import ClientOutput
from router.listener.request_parser import Refusal, RequestHead, RequestParser
from router.replies import error_body
from router.request_context import KEY, RequestContext

if TYPE_CHECKING:
    from uvicorn.server import ServerState

# of later requests that are read before the current one is answered; then reading pauses
AHEAD_BYTES_MAX = 16 << 10
AHEAD_SECONDS_MAX = 1.0  # reading pauses, and so a hang-up goes unnoticed, for at most this long
LINGER_SECONDS = (
    2.0  # what comes after an error is discarded: closing on unread bytes would destroy the answer
)
LINGER_BYTES_MAX = 64 << 20  # and at most this much of it


class Phase(Enum):
    """What a connection is doing."""

    HEAD = auto()  # between two requests, or a head has begun
    BODY = auto()
    ANSWER = auto()
    CLOSING = auto()


class ClientConnection(asyncio.Protocol):
    """One client connection; made by uvicorn's server, which gives all but `clients` and `plain`.

    `plain`: the transport below that of the connection, which then is TLS.
    """

    def __init__(
        self,
        clients: ClientConnections,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        plain: asyncio.Transport | None = None,
    ):
        del app_state
        self.transport: asyncio.Transport  # both from `connection_made` on
        self.output: ClientOutput
        self.held_bytes = 0  # as `clients` was last told
        self._clients = clients
        self._plain = plain
        self._settings = clients.settings
        self._app = config.loaded_app
        self._server_state = server_state
        self._loop = _loop or asyncio.get_running_loop()
        self._parser = RequestParser(self)
        self._phase = Phase.HEAD
        self._deadline = math.inf
        self._silent_from = self._loop.time()  # infinite when a byte has come
        self._exchange: Exchange | None = None
        # Input: what was received and not parsed begins at `_at`.
        self._input = b""
        self._at = 0
        self._reading = True
        self._body_paused = False
        self._discarded_bytes = 0

    # ---- asyncio calls these -----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected."""
        self.transport = transport
        self.output = ClientOutput(
            transport, self._settings.write_seconds_max, self._clients.written, self._plain
        )
        self._server_state.connections.add(self)  # type: ignore[arg-type]  # uvicorn names only its own classes
        self._expect_within(self._settings.head_seconds_max)
        self._clients.admit(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is no more."""
        del exc
        self._server_state.connections.discard(self)
        self._phase = Phase.CLOSING
        self._forget_input()
        self._clients.remove(self)
        self._disconnect()

    def eof_received(self) -> None:
        """The client has gone: a connection that is closed on one side is not kept. The transport closes itself."""
        self._disconnect()

    def pause_writing(self) -> None:
        """Too much is unread: the application waits."""
        self.output.pause()

    def resume_writing(self) -> None:
        """The client has read."""
        self.output.resume()

    def data_received(self, data: bytes) -> None:
        """Bytes of the client."""
        self._silent_from = math.inf
        if self._phase is Phase.CLOSING:
            self._discarded_bytes += len(data)
            if self._discarded_bytes > LINGER_BYTES_MAX:
                self.transport.abort()
            return
        self._input = self._input[self._at :] + data if self._input else data
        self._at = 0
        self._advance()

    # ---- uvicorn's server and `ClientConnections` call these ---------------------------------------------------

    def shutdown(self) -> None:
        """The server ends: close between two requests."""
        if self._exchange is None:
            self._close()
        else:
            self._exchange.keep_alive = False

    def check(self, now: float, silent_since: float = -math.inf) -> None:
        """End the connection if it is over a budget of seconds; called several times a second.

        `silent_since`: and if it has said nothing yet and was opened before then.
        """
        if self._silent_from < silent_since:
            self._clients.count("silent")
            self.transport.abort()
            return
        if self.output.is_stalled(now):
            self._clients.count("unread")
            self.output.reset()
            return
        if self.output.waiting_bytes:
            self._wait_for_the_answer_to_leave(now)
        if now >= self._deadline:
            self._end_overdue()

    def leave(self) -> bool:
        """End the connection for a newer one; False if an answer must leave before. No request is under way."""
        if self._phase is Phase.HEAD and self.output.waiting_bytes:
            self._close()
            return False
        self.transport.abort()
        return True

    def refuse(self, refusal: Refusal) -> None:
        """Answer an error, unless another answer has begun, and end the connection."""
        self._clients.count(refusal.cause)
        self._clients.count_refusal(refusal.status)
        self._fail(refusal.status, refusal.message)

    # ---- the application calls these, by the request's context ---------------------------------------------------

    def abort(self) -> None:
        """Drop the connection with its unread data."""
        self.transport.abort()

    def watch_backlog(self, backlog_bytes: Callable[[], int]) -> None:
        """Count what an answer keeps until it can be written."""
        self.output.watch_backlog(backlog_bytes)

    def show_key(self, name: str) -> None:
        """The request has a valid API key, of this name."""
        self._clients.show_key(self, name)

    def count_refusal(self, status: int, full: str = "") -> None:
        """The application refuses the request; with 429 because this was full."""
        self._clients.count_refusal(status, full)

    # ---- the exchange calls these ------------------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        """Write to the client."""
        self.output.write(data)

    async def writable(self) -> None:
        """Wait while too much is unread."""
        await self.output.writable()

    def pause_body(self) -> None:
        """The application does not take the body."""
        self._body_paused = True
        self._set_reading()

    def resume_body(self) -> None:
        """The application has taken what came of the body."""
        self._body_paused = False
        self._set_reading()

    def answered(self, *, close: bool) -> None:
        """The exchange is complete: go on with the next request, or close."""
        self._server_state.total_requests += 1
        self._exchange = None
        self._clients.request_ended(self)
        self.output.watch_backlog()
        if not close:
            self._phase = Phase.HEAD
            self._parser.next()
            self._expect_within(self._settings.idle_seconds_max)
            self._advance()
        elif self._phase is Phase.BODY or self._at < len(self._input):
            self._linger()
        else:
            self._close()

    def give_up(self, exchange: Exchange) -> None:
        """The application did not complete its answer; its log says why."""
        self._clients.request_ended(self)
        if not exchange.started:
            self._fail(500, "the router failed; its log says where")
        elif exchange.framing is Framing.UNTIL_CLOSE:
            self.transport.abort()  # a plain close would look like the end of a complete answer
        else:
            self._close()

    # ---- the parser calls these --------------------------------------------------------------------------------

    def request_begun(self, head: RequestHead) -> None:
        """A head is complete: start the application."""
        self._phase = Phase.BODY
        self._expect_within(self._settings.body_seconds_max)
        self._exchange = Exchange(self, self._scope(head), self._server_state.default_headers, head)
        task = self._loop.create_task(self._exchange.run(self._app))
        task.add_done_callback(self._server_state.tasks.discard)
        self._server_state.tasks.add(task)

    def body_received(self, body: bytes) -> None:
        """A part of the body."""
        if self._exchange:
            self._exchange.body_received(body)

    def request_complete(self) -> None:
        """The body, if there is any, is complete."""
        self._phase = Phase.ANSWER
        self._clients.request_under_way(self)
        self._deadline = math.inf
        self._body_paused = False
        if self._exchange:
            self._exchange.body_ended()

    def _scope(self, head: RequestHead) -> Scope:
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": head.version,
            "server": _address(self.transport, "sockname"),
            "client": _address(self.transport, "peername"),
            "scheme": "http" if self._plain is None else "https",
            "method": head.method,
            "root_path": "",
            "path": head.path.decode("latin-1"),
            "raw_path": head.path,
            "query_string": head.query,
            "headers": head.headers,
            "state": {},
            KEY: RequestContext(self, self._loop.time()),
        }

    # ---- input -------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Parse up to the end of the current request, and hold the rest."""
        while self._phase in (Phase.HEAD, Phase.BODY) and self._at < len(self._input):
            if self._phase is Phase.HEAD and not self._parser.spent_bytes:
                self._expect_within(self._settings.head_seconds_max)
            try:
                self._at = self._parser.feed(self._input, self._at)
            except Refusal as refusal:
                self.refuse(refusal)
        if self._at >= len(self._input):
            self._input, self._at = b"", 0
        self._hold()

    def _hold(self) -> None:
        """Account for the bytes of this client that are kept; too many pause reading, and end it after a moment."""
        ahead = len(self._input) - self._at
        in_head = self._parser.spent_bytes if self._phase is Phase.HEAD else 0
        if not self._clients.hold(self, ahead + in_head):
            self.refuse(Refusal(503, "held", "too many requests are arriving: try again later"))
            return
        self._set_reading()
        if self._phase is Phase.ANSWER and not self._reading and self._deadline == math.inf:
            self._expect_within(AHEAD_SECONDS_MAX)

    def _set_reading(self) -> None:
        ahead = len(self._input) - self._at
        wanted = self._phase is Phase.CLOSING or not (self._body_paused or ahead > AHEAD_BYTES_MAX)
        if wanted != self._reading and not self.transport.is_closing():
            self._reading = wanted
            (self.transport.resume_reading if wanted else self.transport.pause_reading)()

    def _forget_input(self) -> None:
        self._input, self._at = b"", 0
        self._parser = RequestParser(self)
        self._clients.hold(self, 0)

    # ---- time, and the end -------------------------------------------------------------------------------------

    def _expect_within(self, seconds: float) -> None:
        self._deadline = self._loop.time() + seconds

    def _end_overdue(self) -> None:
        match self._phase:
            case Phase.HEAD if self._parser.spent_bytes:
                seconds = self._settings.head_seconds_max
                message = f"the head of the request did not arrive within {seconds:g} seconds"
                self.refuse(Refusal(408, "slow_head", message))
            case Phase.BODY:
                seconds = self._settings.body_seconds_max
                self.refuse(Refusal(408, "slow_body", f"the body did not arrive within {seconds:g} seconds"))
            case Phase.HEAD:
                self._clients.count("idle")
                self._close()
            case Phase.ANSWER:
                self._clients.count("ahead")
                self.transport.abort()
            case Phase.CLOSING:
                self.transport.abort()

    def _fail(self, status: int, message: str) -> None:
        """Answer an error that is not the application's, and end the connection."""
        if self._exchange and self._exchange.started:
            self.transport.abort()
            return
        self._disconnect()
        body = msgspec.json.encode(error_body(status, message))
        length = (b"content-length", b"%d" % len(body))
        self.write(encode_head(status, [(b"content-type", b"application/json"), length, CLOSE]) + body)
        self._linger()

    def _close(self) -> None:
        """Close when all is sent. Where the client has to confirm that, as with TLS, it has LINGER_SECONDS then."""
        self._phase = Phase.CLOSING
        self._expect_within(LINGER_SECONDS)
        self._forget_input()
        self.transport.close()

    def _linger(self) -> None:
        """Close, but first discard what the client still sends."""
        self._phase = Phase.CLOSING
        self._expect_within(LINGER_SECONDS)
        self._forget_input()
        self._set_reading()
        if not self.transport.is_closing() and self._plain is None:  # TLS ends in both directions at once
            self.transport.write_eof()

    def _disconnect(self) -> None:
        if self._exchange:
            self._exchange.disconnect()
        self.output.resume()

    def _wait_for_the_answer_to_leave(self, now: float) -> None:
        """What follows an answer has its time from when the answer has left."""
        if self._phase is Phase.CLOSING:
            self._deadline = now + LINGER_SECONDS
        elif self._phase is Phase.HEAD and not self._parser.spent_bytes:
            self._deadline = now + self._settings.idle_seconds_max


def _address(transport: asyncio.Transport, which: str) -> tuple[str, int] | None:
    address = transport.get_extra_info(which)
    return (str(address[0]), int(address[1])) if isinstance(address, tuple) else None
