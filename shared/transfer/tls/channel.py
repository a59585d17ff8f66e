"""Frames on a connection after its handshake, each sealed with AES-256-GCM by a key of this connection and direction.

    size of the payload: 4 bytes ── kind: 1 byte ── payload, encrypted ── tag: 16 bytes

Size and kind are authenticated with the payload. The nonce is the number of the frame, so a frame that is cut out,
repeated, moved or changed does not open, and that ends the connection. Frames are large: one call of the cipher and one
of the kernel carry `PORTION_BYTES`, and the interpreter's lock is taken as seldom.

Keys are not for ever: one that has sealed much, or for long, is `worn`, and the reader opens another connection
(`transport`). TLS 1.3 lets a key seal 2^24.5 records of 16 KiB (RFC 8446, 5.5), and so many bytes as `FRAMES_MAX`
frames hold at most are seven tenths of that.

Knows no leases and no pages. A channel belongs to one thread; only `cut` may come from another.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from enum import IntEnum
from time import monotonic

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from shared.transfer.tls.keys import TlsError

PORTION_BYTES = 256 * 1024  # of pages in one frame; fits the processor's cache
TAG_BYTES = 16
FRAMES_MAX = 2**20  # of one key: 256 GiB
KEY_SECONDS_MAX = 3600.0
_HEADER = struct.Struct("<IB")
_NONCE_BYTES = 12


def cut(connection: socket.socket) -> None:
    """End a connection that another thread may wait on. It must not be closed meanwhile."""
    with contextlib.suppress(OSError):  # it has ended already
        connection.shutdown(socket.SHUT_RDWR)


class FrameKind(IntEnum):
    """What a frame carries."""

    REQUEST = 1
    DATA = 2
    GONE = 3  # the lease has ended: no more data of this read
    REFUSED = 4  # a sentence


class _Direction:
    """One key, and the number of the next frame."""

    def __init__(self, key: bytes):
        self.cipher = AESGCM(key)
        self.frames = 0

    def next_nonce(self) -> bytes:
        self.frames += 1
        return self.frames.to_bytes(_NONCE_BYTES, "little")


class TlsChannel:
    """Both directions of one connection. The socket blocks; its options say for how long."""

    def __init__(
        self,
        connection: socket.socket,
        *,
        sends_with: bytes,
        receives_with: bytes,
        scratch: memoryview | None = None,
    ):
        self._connection = connection
        self._sending, self._receiving = _Direction(sends_with), _Direction(receives_with)
        self._frame = memoryview(bytearray(_HEADER.size + PORTION_BYTES + TAG_BYTES))
        self._began = monotonic()
        # For whoever gathers or scatters small pieces, or copies from and to a device.
        self.scratch = scratch or memoryview(bytearray(PORTION_BYTES))

    @property
    def worn(self) -> bool:
        """Whether its keys have sealed enough: between two requests a reader leaves it for a fresh one."""
        frames = max(self._sending.frames, self._receiving.frames)
        return frames >= FRAMES_MAX or monotonic() - self._began >= KEY_SECONDS_MAX

    def send(self, kind: FrameKind, payload: bytes | memoryview = b"") -> None:
        """Seal and send one frame of at most `PORTION_BYTES`. `OSError` when the connection has ended."""
        frame, header = self._frame, _HEADER.pack(len(payload), kind)
        end = len(header) + len(payload) + TAG_BYTES
        frame[: len(header)] = header
        nonce = self._sending.next_nonce()
        self._sending.cipher.encrypt_into(nonce, payload, header, frame[len(header) : end])
        self._connection.sendall(frame[:end])

    def receive_header(self) -> tuple[int, int]:
        """Size and kind of the next frame: not to be believed before `receive_payload` has opened it."""
        self._receive(self._frame[: _HEADER.size])
        size, kind = _HEADER.unpack(self._frame[: _HEADER.size])
        if size > PORTION_BYTES:
            raise TlsError(f"a frame of {size} bytes: expected at most {PORTION_BYTES}")
        return size, kind

    def receive_payload(self, into: memoryview) -> None:
        """Open the frame that `receive_header` told of into memory of its size. Where it does not open, that memory may
        hold any bytes."""
        header, body = bytes(self._frame[: _HEADER.size]), self._frame[_HEADER.size :]
        sealed = body[: len(into) + TAG_BYTES]
        self._receive(sealed)
        try:
            self._receiving.cipher.decrypt_into(self._receiving.next_nonce(), sealed, header, into)
        except InvalidTag:
            raise TlsError("a frame does not open: it was changed, or sealed with another key") from None

    def cut(self) -> None:
        """End the connection: a thread that waits on it stops waiting. From any thread, while the socket is open."""
        cut(self._connection)

    def _receive(self, into: memoryview) -> None:
        done = 0
        while done < len(into):
            count = self._connection.recv_into(into[done:], 0, socket.MSG_WAITALL)
            if count == 0:
                raise ConnectionResetError("the connection has ended")
            done += count
