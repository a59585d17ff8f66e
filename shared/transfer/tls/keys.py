"""TLS for the KV plane: who may open a connection, and the keys that seal what follows on it.

TLS 1.3 does what it is for: both ends prove that they hold a worker's key, and the answering end hands over two keys
drawn for this connection alone. The rest of the connection is sealed with those (`channel`): Python's TLS cuts
pages into 16 KiB records and carries half of what UCX does (docs/decisions/0012-sealed-kv.md).

The handshake also settles the version of what follows. A reader names those that it speaks (ALPN), and nobody in
between can take one away; one of the release before names none, and a holder of the release before chooses none.

A worker's certificate is only a public key with a name: exactly those of the workers' keys that are listed now are
trusted, so issuer and dates mean nothing. Knows no sockets: bytes go in, bytes come out.
"""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass, field
from enum import Enum

from shared.links.keys import LinkKeys, open_in_memory

KEY_BYTES = 32
# that one end sends the other; certificates of Ed25519 take less than 1 KiB each
HANDSHAKE_BYTES_MAX = 16 * 1024
_NO_CHECK_TIME = 0x200000  # X509_V_FLAG_NO_CHECK_TIME


class Version(Enum):
    """What is spoken on a connection: the name that its handshake chose."""

    OLDER = None  # with a worker of the release before: see `grants`
    BOUND = "segue-kv/2"  # a lease is worth its own pages, and nobody is told a nonce


class TlsError(Exception):
    """The other end is not a worker of this deployment, or does not keep to the protocol."""


@dataclass(frozen=True, slots=True)
class TlsKeys:
    """What a handshake leaves: a key of `KEY_BYTES` for each direction, and the version that both ends speak."""

    requests: bytes = field(repr=False)
    answers: bytes = field(repr=False)
    version: Version


@dataclass(frozen=True, slots=True)
class TlsContexts:
    """TLS as this worker speaks it."""

    holder: ssl.SSLContext
    reader: ssl.SSLContext


def make_contexts(keys: LinkKeys) -> TlsContexts:
    """Admit the workers' keys that `keys` lists, and prove this worker's own."""
    holder = _make_context(ssl.PROTOCOL_TLS_SERVER, keys)
    holder.num_tickets = 0  # nothing is resumed; and the holder is silent until it hands over the keys
    return TlsContexts(holder, _make_context(ssl.PROTOCOL_TLS_CLIENT, keys))


def _make_context(protocol: int, keys: LinkKeys) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.set_alpn_protocols([version.value for version in Version if version.value])
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # a worker is known by its key, not by a name
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | _NO_CHECK_TIME
    context.load_verify_locations(cadata=keys.siblings_pem.decode())
    descriptor = open_in_memory(keys.own_pem)  # the ssl module reads keys from files only
    try:
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
    return context


class Handshake:
    """One end of a handshake, without a socket: feed what arrives, send what comes out, until `keys` are there."""

    def __init__(self, context: ssl.SSLContext, *, holder: bool):
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=holder)
        self._holder = holder
        self._shaken = False
        self._received_bytes = 0
        self._material = b""
        self.keys: TlsKeys | None = None

    def advance(self, received: bytes = b"") -> bytes:
        """Take the bytes that arrived; returns those to send. `TlsError` when the other end is not to be trusted."""
        self._received_bytes += len(received)
        if self._received_bytes > HANDSHAKE_BYTES_MAX:
            raise TlsError(f"the handshake is longer than {HANDSHAKE_BYTES_MAX} bytes")
        self._incoming.write(received)
        try:
            self._shake()
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            raise TlsError(f"TLS: {error.reason or error}") from None
        return self._outgoing.read()

    def _shake(self) -> None:
        if not self._shaken:
            self._tls.do_handshake()
            self._shaken = True
            if self._holder:
                self._material = os.urandom(2 * KEY_BYTES)
                self._tls.write(self._material)
        while len(self._material) < 2 * KEY_BYTES:
            part = self._tls.read(2 * KEY_BYTES - len(self._material))
            if not part:
                raise TlsError("it ended TLS before it gave the keys")
            self._material += part
        if self._incoming.pending:
            raise TlsError("bytes follow the handshake before their time")
        version = Version(self._tls.selected_alpn_protocol())
        self.keys = TlsKeys(self._material[:KEY_BYTES], self._material[KEY_BYTES:], version)
