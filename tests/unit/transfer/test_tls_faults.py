"""Peers of the TLS transport that hold a worker's key and break the protocol, and faults of the own process."""

from __future__ import annotations

import errno
import socket
import ssl
import threading
from collections.abc import Callable, Iterator

import pytest
from structlog.testing import capture_logs

from shared.transfer.reader import ReadState
from shared.transfer.tls.channel import FrameKind, TlsChannel
from shared.transfer.tls.keys import Handshake, TlsError, TlsKeys
from tests.fetcher_contract import PAGE_BYTES, PATIENCE_SECONDS
from tests.unit.transfer.tls_holder_here import (
    CONTEXTS,
    HolderHere,
    dial,
    is_served,
    read_page,
    start_reading,
)
from tests.waiting import until

Answer = Callable[[socket.socket, TlsChannel, TlsKeys], None]


@pytest.fixture
def holder() -> Iterator[HolderHere]:
    here = HolderHere()
    yield here
    here.tls.close()


# ---- holders ---------------------------------------------------------------------------------------------------


def hang_up_in_a_portion(connection: socket.socket, channel: TlsChannel, keys: TlsKeys) -> None:
    del channel, keys
    connection.sendall(PAGE_BYTES.to_bytes(4, "little") + bytes([FrameKind.DATA]) + bytes(PAGE_BYTES // 2))


def send_too_little(connection: socket.socket, channel: TlsChannel, keys: TlsKeys) -> None:
    del connection, keys
    channel.send(FrameKind.DATA, bytes(PAGE_BYTES // 2))


def refuse(connection: socket.socket, channel: TlsChannel, keys: TlsKeys) -> None:
    del connection, keys
    channel.send(FrameKind.REFUSED, b"no such page")


def reflect(connection: socket.socket, channel: TlsChannel, keys: TlsKeys) -> None:
    """What the reader itself might have sealed: with the key of its direction."""
    del channel
    own = TlsChannel(connection, sends_with=keys.requests, receives_with=keys.answers)
    own.send(FrameKind.DATA, bytes(PAGE_BYTES))


BREACHES = {
    "hangs up in mid-portion": (hang_up_in_a_portion, "has ended"),
    "sends another size": (
        send_too_little,
        f"a frame of kind 2 and {PAGE_BYTES // 2} bytes, where pages were expected",
    ),
    "refuses": (refuse, "no such page"),
    "reflects": (reflect, "does not open"),
}


@pytest.mark.parametrize(("answer", "reason"), BREACHES.values(), ids=BREACHES)
def test_a_holder_that_breaks_the_protocol_fails_the_read_with_its_reason(
    answer: Answer, reason: str
) -> None:
    with capture_logs() as logs, socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer_one, args=(listener, answer), daemon=True)
        thread.start()
        reader, handle, _ = start_reading(listener.getsockname())
        ended = lambda: reader.state(handle) is not ReadState.READING  # noqa: E731
        until(ended, PATIENCE_SECONDS, "the end of the read")
        assert reader.state(handle) is ReadState.FAILED
        reader.close()
        thread.join(PATIENCE_SECONDS)
    [line] = [line for line in logs if line["event"] == "transfer.read_failed"]
    assert reason in line["reason"]


def answer_one(listener: socket.socket, answer: Answer) -> None:
    """Take one connection and one request, and answer as told."""
    connection, _ = listener.accept()
    with connection:
        handshake = Handshake(CONTEXTS.holder, holder=True)
        while handshake.keys is None:
            connection.sendall(handshake.advance(connection.recv(4096)))
        keys = handshake.keys
        channel = TlsChannel(connection, sends_with=keys.answers, receives_with=keys.requests)
        size, _ = channel.receive_header()
        channel.receive_payload(memoryview(bytearray(size)))
        answer(connection, channel, keys)


@pytest.mark.timeout(10)
def test_a_holder_that_ends_tls_before_it_gives_keys_ends_the_handshake() -> None:
    """Its thread would otherwise look for keys without end, and no fence could stop it."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = CONTEXTS.holder.wrap_bio(incoming, outgoing, server_side=True)
    reader = Handshake(CONTEXTS.reader, holder=False)
    incoming.write(reader.advance())
    with pytest.raises(ssl.SSLWantReadError):
        tls.do_handshake()
    incoming.write(reader.advance(outgoing.read()))
    tls.do_handshake()
    with pytest.raises(ssl.SSLWantReadError):
        tls.unwrap()
    with pytest.raises(TlsError, match="keys"):
        reader.advance(outgoing.read())


# ---- faults of this process ------------------------------------------------------------------------------------


def test_a_fault_while_one_reader_is_answered_ends_its_connection_and_is_logged(
    holder: HolderHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken, capture_logs() as logs:
        broken.setattr(holder.memory, "page_bytes_at", out_of_memory)
        assert read_page(holder) is ReadState.FAILED
    assert [line["error"] for line in logs if line["event"] == "transfer.connection_failed"] == [
        "MemoryError()"
    ]
    assert read_page(holder) is ReadState.DONE


def out_of_memory(offset: int, size_bytes: int) -> memoryview:
    del offset, size_bytes
    raise MemoryError


class FullListener:
    """A listening socket; the next connection finds no descriptor left."""

    def __init__(self, listener: socket.socket):
        self._listener = listener
        self._full = True

    def fileno(self) -> int:
        return self._listener.fileno()

    def accept(self) -> tuple[socket.socket, object]:
        if self._full:
            self._full = False
            raise OSError(errno.EMFILE, "too many open files")
        return self._listener.accept()

    def close(self) -> None:
        self._listener.close()


def test_a_door_that_cannot_listen_again_tries_once_more(
    holder: HolderHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener, refusals = holder.tls._listener, [errno.ENOSPC]
    register = listener._selector.register

    def register_or_fail(*arguments: object) -> object:
        if arguments[0] is listener._socket and refusals:
            raise OSError(refusals.pop(), "no space for another watch")
        return register(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(listener, "_socket", FullListener(listener._socket))
    monkeypatch.setattr(listener._selector, "register", register_or_fail)
    connection, channel = dial(holder)
    with connection:
        assert is_served(channel)
    assert not refusals
