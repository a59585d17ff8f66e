"""TLS in front of client connections: the certificate that new ones get, and their handshakes.

    accepted ── TlsHandshake ──► ClientConnection       a handshake has a place like any connection, and a deadline
                    └─ no handshake within head_seconds_max, or a wrong one: ended, and counted

The files of the certificate are read each second, and a pair that can be used is what the next connection gets; those
that are open keep theirs. A pair that cannot be used is said in a line and a metric, and the former one stays: a
certificate and its key are two files, so between two writes they may not fit. Their bytes are loaded as they were read.
"""

from __future__ import annotations

import asyncio
import math
import os
import ssl
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import structlog
from cryptography import x509
from uvloop.loop import SSLProtocol  # type: ignore[attr-defined]  # its stubs name the loop alone

from router.config import RouterConfig
from router.listener.connection import ClientConnection
from router.listener.connections import ClientConnections
from router.listener.output import ClientOutput
from router.listener.request_parser import Refusal
from router.listener.tls_input import PORTION_BYTES, HandshakeTurns, TlsInput, keep_buffers_apart
from router.request_context import client_of
from shared.links.keys import open_in_memory
from shared.primitives.errors import ConfigError
from shared.primitives.metric_fields import all_declared, total

READ_SECONDS = 1.0  # between two looks at the files
CHAIN_BYTES = 1 << 20  # of a chain
SHUTDOWN_SECONDS = 600.0  # from a close to its end; `ClientConnection.check` ends those that stall before

log = structlog.get_logger(__name__)


@all_declared
@dataclass(slots=True)
class CertificateCounters:
    """What has gone wrong with the certificate's files; totals since the start."""

    unread: int = total(
        "segue_tls_certificate_unread_total",
        "Looks at the files of the TLS certificate, one a second, at which they were wrong or could not be read: the "
        "certificate of before stays.",
    )


class ServerCertificate:
    """The certificate of the API's port. Raises ConfigError where its files cannot be used at the start."""

    def __init__(self, cert: str, key: str):
        self.counters = CertificateCounters()
        self.turns = HandshakeTurns()
        self._files = Path(cert), Path(key)
        self._trouble = ""
        try:
            self._content = self._read()
            self.context, self.expires_at = load(*self._content)
        except ValueError as error:
            raise ConfigError(f"tls_cert {cert} and tls_key {key} cannot be used: {error}") from None
        keep_buffers_apart()

    async def read_for_ever(self) -> None:
        """Follow the files."""
        while True:
            await asyncio.sleep(READ_SECONDS)
            await self.look()

    async def look(self) -> None:
        """Take what is in the files, if it has changed and can be used."""
        try:
            content = await asyncio.to_thread(self._read)
            if content == self._content:
                self._trouble = ""
                return
            context, expires_at = await asyncio.to_thread(load, *content)
        except ValueError as error:
            self._keep_former(str(error))
        except Exception as error:
            # whatever it is, the next look may go well
            self._keep_former(f"reading them gave {type(error).__name__}")
        else:
            self._content, self._trouble = content, ""
            self.context, self.expires_at = context, expires_at
            log.info(
                "tls.certificate_read", expires=datetime.fromtimestamp(expires_at).astimezone().isoformat()
            )

    def _keep_former(self, reason: str) -> None:
        self.counters.unread += 1
        if reason != self._trouble:
            self._trouble = reason
            log.error("tls.certificate_unread", reason=f"{reason}; the certificate of before stays")

    def _read(self) -> tuple[bytes, bytes]:
        """Both files; raises ValueError where one cannot be read."""
        cert, key = (_bytes_of(path) for path in self._files)
        return cert, key


def certificate_of(config: RouterConfig) -> ServerCertificate | None:
    """What the settings name; None: plain HTTP. Raises ConfigError for a certificate without a key, and the reverse."""
    if bool(config.tls_cert) != bool(config.tls_key):
        given, missing = ("--tls-cert", "--tls-key") if config.tls_cert else ("--tls-key", "--tls-cert")
        raise ConfigError(f"{given} is given without {missing}: give both, or neither for plain HTTP")
    return ServerCertificate(config.tls_cert, config.tls_key) if config.tls_cert else None


def load(cert: bytes, key: bytes) -> tuple[ssl.SSLContext, float]:
    """What a server needs of a chain and its key, in PEM, and when the certificate expires (seconds since 1970).

    Raises ValueError where they cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    with ExitStack() as stack:
        paths = [stack.enter_context(_in_memory(content)) for content in (cert, key)]
        try:
            context.load_cert_chain(paths[0], paths[1], password=_no_password)
        except ssl.SSLError as error:
            what = "the key is not that of the certificate" if "MISMATCH" in str(error) else "they are no PEM"
            raise ValueError(f"{what} ({error.reason or error})") from None
    return context, x509.load_pem_x509_certificate(cert).not_valid_after_utc.timestamp()


@contextmanager
def _in_memory(content: bytes) -> Iterator[str]:
    """A path of these bytes, for what reads files alone."""
    descriptor = open_in_memory(content)
    try:
        yield f"/dev/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _no_password() -> str:
    raise ValueError("the key is encrypted, and there is nobody to ask for its password")


def _bytes_of(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(CHAIN_BYTES)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None


# ---- one handshake ---------------------------------------------------------------------------------------------------


class TlsHandshake(asyncio.Protocol):
    """A connection until its handshake is over; then `make_connection` gives what goes on with it.

    uvloop's TLS is made here and at once: `start_tls` begins in the loop's next turn, and what came before is lost.
    """

    transport: asyncio.Transport  # both from `connection_made` on
    output: ClientOutput

    def __init__(
        self,
        clients: ClientConnections,
        certificate: ServerCertificate,
        make_connection: Callable[[asyncio.Transport], ClientConnection],
    ):
        self.held_bytes = 0  # as `clients` was last told
        self._clients = clients
        self._certificate = certificate
        self._make_connection = make_connection
        self._loop = asyncio.get_running_loop()
        self._opened_at = self._loop.time()
        self._succeeded = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected."""
        self.transport = transport
        self.output = ClientOutput(transport, math.inf, self._clients.written)
        ended: asyncio.Future[None] = self._loop.create_future()
        ended.add_done_callback(self._handshake_ended)
        tls = SSLProtocol(
            self._loop,
            _Handshaken(self._go_on),
            self._certificate.context,
            ended,
            server_side=True,
            ssl_handshake_timeout=self._clients.settings.head_seconds_max,
            ssl_shutdown_timeout=SHUTDOWN_SECONDS,
        )
        address = client_of(transport.get_extra_info("peername"))
        self._input = TlsInput(tls, self._certificate.turns, address)
        transport.set_protocol(self._input)
        self._input.connection_made(transport)
        self._clients.admit(self)

    def check(self, now: float, silent_since: float = -math.inf) -> None:
        """End the connection where others need its place; uvloop ends it where the handshake takes too long."""
        del now
        if self._opened_at < silent_since:
            self._clients.count("silent")
            self.transport.abort()

    def leave(self) -> bool:
        """End the connection for a newer one."""
        self.transport.abort()
        return True

    def refuse(self, refusal: Refusal) -> None:
        """End the connection: there is nothing that could be said before a handshake."""
        self._clients.count(refusal.cause)
        self.transport.abort()

    def _go_on(self, secured: asyncio.Transport) -> None:
        self._succeeded = True
        self._input.in_handshake = False
        self._clients.remove(self)
        secured.set_read_buffer_limits(high=PORTION_BYTES)  # type: ignore[attr-defined]  # what waits while paused
        connection = self._make_connection(self.transport)
        secured.set_protocol(connection)
        connection.connection_made(secured)

    def _handshake_ended(self, ended: asyncio.Future[None]) -> None:
        """Note how: no TLS, no version in common, no answer in time, or a client that has gone, unless all is well."""
        if ended.cancelled() or ended.exception() or not self._succeeded:
            self._clients.count("handshake")
            self._clients.remove(self)


class _Handshaken(asyncio.Protocol):
    """Is told by uvloop that a handshake is over."""

    def __init__(self, go_on: Callable[[asyncio.Transport], None]):
        self._go_on = go_on

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The client has proved that it speaks TLS."""
        self._go_on(transport)
