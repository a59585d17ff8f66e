"""A router of the same release, in other hands, that answers more than anybody asked it: it costs a bounded amount."""

from __future__ import annotations

import asyncio
import gzip
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import msgspec
import pytest

from router.discovery import router_peers
from router.discovery.router_peers import ANSWER_BYTES_MAX, CONNECTIONS_MAX, RouterPeers
from router.live.picture import REQUESTS_MAX
from router.live.router_pictures import ENTRIES_MAX, PICTURE_PATH, Picture, PictureTotals, PodPicture
from tests.abuse.procfs import PeakMemory

MIB = 1 << 20
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
PART = b" " * (64 << 10)
CHUNK = b"%x\r\n%b\r\n" % (len(PART), PART)
BOMB = gzip.compress(bytes(64 * MIB))  # 64 KiB
ANSWERS = {  # how each begins, and what is then sent until nobody reads it
    "without end": (HEAD + b"transfer-encoding: chunked\r\n\r\n", CHUNK),
    "an exabyte": (HEAD + b"content-length: %d\r\n\r\n" % (1 << 60), PART),
    "until it closes": (HEAD + b"\r\n", PART),
    "packed": (HEAD + b"content-encoding: gzip\r\ncontent-length: %d\r\n\r\n%b" % (len(BOMB), BOMB), b""),
    "a head without end": (HEAD, b"a: b\r\n" * 10_000),
}


@contextmanager
def peer(begins: bytes, goes_on: bytes, pause_seconds: float = 0.0) -> Iterator[str]:
    """Another router's URL; it says this to everybody."""
    over = threading.Event()

    def answer(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.recv(1 << 16)
            connection.sendall(begins)
            while goes_on and not over.wait(pause_seconds):
                connection.sendall(goes_on)

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=answer, args=(server.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=accept, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}"
        finally:
            over.set()
            server.shutdown(socket.SHUT_RDWR)


async def asked(url: str, times: int) -> list[tuple[int, bytes] | None]:
    """What a router gets that asks so many times at once."""
    peers = RouterPeers("one", dict)
    try:
        return await asyncio.gather(*(peers.get(url, PICTURE_PATH) for _ in range(times)))
    finally:
        await peers.close()


@pytest.mark.parametrize("name", ANSWERS)
def test_as_many_answers_as_are_read_at_once_cost_no_more_than_their_bound(name: str) -> None:
    with peer(*ANSWERS[name]) as url:
        memory = PeakMemory(os.getpid())
        answers = asyncio.run(asked(url, 2 * CONNECTIONS_MAX))
        # a body grows by copying: for a moment there are two of it
        assert memory.growth() < 2 * CONNECTIONS_MAX * ANSWER_BYTES_MAX + 16 * MIB
    read = {answer for answer in answers if answer is not None}
    assert read == ({(200, BOMB)} if name == "packed" else set()), "it is not unpacked"


def test_an_answer_of_a_byte_now_and_then_is_waited_for_no_longer_than_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(router_peers, "ANSWER_SECONDS_MAX", 0.5)
    with peer(HEAD + b"content-length: 9000\r\n\r\n", b" ", 0.02) as url:
        began = time.monotonic()
        assert asyncio.run(asked(url, 1)) == [None]
        assert time.monotonic() - began < 5, "it was read to its end, or for long"


def test_the_largest_picture_of_real_names_is_within_the_bound() -> None:
    name = "segue-prefill-7d9f8b6c5d-x2x4z." + "n" * 63
    pod = PodPicture(name, "prefill", "serving", 3, (256, 256), (10**6,) * 3, 10**6, 256, 12.345, 10**5)
    totals = PictureTotals(10**6, {"waiting": 10**4}, 123.456, 12.345, *[10**9] * 5)
    request = ("f" * 16, "decoding", name, 10**4, 10**4, 123.456)
    flow = (name, name, "tcp", 10**10)
    picture = Picture(
        name, [pod] * ENTRIES_MAX, totals, [request] * REQUESTS_MAX, 10**4, [flow] * ENTRIES_MAX
    )
    size = len(msgspec.json.encode(picture))
    assert MIB < size < ANSWER_BYTES_MAX / 2
