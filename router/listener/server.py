"""The router's HTTP server: uvicorn's, with connections of our own (`client_connection`).

A port in use is one sentence. A signal only ends the serving: uvicorn would raise it once more and so kill the process
before its links are closed. What a signal means and when the server may end is decided by `router.core.drain`; it is
carried out here.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from router.config import RouterConfig
from router.core.drain import RouterDrain, RouterDrainStep
from router.listener.connection import ClientConnection
from router.listener.connections import ClientConnections
from router.listener.tls import ServerCertificate, TlsHandshake
from shared.batch.effects import Note
from shared.primitives.errors import StartError
from shared.process.listening import listening_socket
from shared.process.logs import write_note

CONNECTIONS_WAITING = 2048  # in the kernel, before they are accepted

# A client whose cable was pulled confirms nothing: sent bytes may stay unconfirmed, or unread, for this long; where
# nothing is sent, the kernel asks after 15 s and then each 5 s. Accepted sockets inherit these from the listener.
TCP_USER_TIMEOUT_MS = 30_000
KEEPALIVE_IDLE_SECONDS, KEEPALIVE_INTERVAL_SECONDS = 15, 5
# What the kernel may hold of a client's unread answers; left alone, it grows to megabytes. Inherited as well.
SEND_BYTES = 256 << 10


class Server(uvicorn.Server):
    """uvicorn's server, ended as `RouterDrain` decides."""

    def __init__(
        self,
        app: ASGIApp,
        config: RouterConfig,
        clients: ClientConnections,
        on_unready: Callable[[], None],
        end_answers: Callable[[], None],
        certificate: ServerCertificate | None = None,
    ):
        super().__init__(
            uvicorn.Config(
                app,
                http=_protocol(clients, certificate),  # type: ignore[arg-type]  # it is only called
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                backlog=CONNECTIONS_WAITING,
                proxy_headers=bool(config.trusted_proxies),  # by default uvicorn trusts those of loopback
                forwarded_allow_ips=list(config.trusted_proxies),
            )
        )
        self._drain = RouterDrain(config.endpoint_lag_seconds, config.drain_seconds)
        self._clients = clients
        self._on_unready = on_unready
        self._end_answers = end_answers
        self._certificate = certificate
        self._following: asyncio.Task[None] | None = None
        self._exit = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """SIGTERM drains the server, SIGINT stops it."""
        if threading.current_thread() is threading.main_thread():
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.start_draining)
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self.stop)
        yield

    def start_draining(self) -> None:
        """Let `serve` return when nothing is open any more. Called twice, it stops as `stop` does."""
        self._drain.sigterm(asyncio.get_running_loop().time())
        self._carry_out()

    def stop(self) -> None:
        """Let `serve` return soon; running answers end now."""
        self._drain.sigint(asyncio.get_running_loop().time())
        self._carry_out()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        await super().startup(sockets)
        self._clients.start()
        if self._certificate is not None:
            self._following = asyncio.create_task(self._certificate.read_for_ever())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening and wait until the drain is over; uvicorn waits for its connections as well."""
        await super().shutdown(sockets)
        await self._exit.wait()
        self._clients.stop()
        if self._following is not None:
            self._following.cancel()

    def _carry_out(self) -> None:
        loop = asyncio.get_running_loop()
        for effect in self._drain.take_effects():
            match effect:
                case Note():
                    write_note(effect, "router.core")
                case RouterDrainStep.BECOME_UNREADY:
                    self._become_unready()
                case RouterDrainStep.STOP_LISTENING:
                    self._stop_listening()
                case RouterDrainStep.END_ANSWERS:
                    self._end_answers()
                case RouterDrainStep.EXIT:
                    self._drop_connections()
                    self._exit.set()
        if self._timer:
            self._timer.cancel()
        deadline = self._drain.next_deadline()
        self._timer = loop.call_at(deadline, self._tick) if deadline is not None else None

    def _tick(self) -> None:
        self._drain.tick(asyncio.get_running_loop().time(), len(self.server_state.connections))
        self._carry_out()

    def _become_unready(self) -> None:
        self._on_unready()
        for headers in (self.server_state.default_headers, self.config.encoded_headers):
            headers.append((b"connection", b"close"))  # of answers until the next tick, and from it on

    def _stop_listening(self) -> None:
        for server in self.servers:
            server.close()
        self.should_exit = True  # uvicorn closes idle connections at its next tick

    def _drop_connections(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        self.force_exit = True


def _protocol(
    clients: ClientConnections, certificate: ServerCertificate | None
) -> Callable[..., asyncio.Protocol]:
    """What uvicorn makes for each connection: with a certificate, a handshake comes first."""
    if certificate is None:
        return partial(ClientConnection, clients)

    def handshake(**given: Any) -> TlsHandshake:
        return TlsHandshake(
            clients, certificate, lambda plain: ClientConnection(clients, **given, plain=plain)
        )

    return handshake


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; raises `StartError` when the port is taken or not allowed."""
    try:
        listener, address = listening_socket(host)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_SECONDS)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_SECONDS)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, TCP_USER_TIMEOUT_MS)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
        listener.bind((address, port))
    except OSError as error:
        raise StartError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    return listener
