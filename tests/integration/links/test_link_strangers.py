"""What those cost a worker who have proven no key: memory before the handshake is bounded, and routers still get in."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from shared.wire.messages import Cancel, Refused
from tests.integration.links.watched_links import KEY_FILES, Watched, dial, start_echo

STRANGERS = 130
GROWTH_BYTES_MAX = 32 << 20
GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"CURVE".ljust(20, b"\0") + b"\0" + bytes(31)
LONG_COMMAND = 0x06  # ZMTP 3.1: eight bytes of length follow
LONG_MESSAGE = 0x02
# of one frame: what a worker took until it was bounded, and what it may take now
SIZES = (16 << 20, 60 << 10)


def resident_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return int(status.partition("VmRSS:")[2].split()[0]) * 1024


class Comings:
    """How often strangers have connected."""

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()

    def add(self) -> None:
        with self._lock:
            self.count += 1


def send_all_it_can(port: int, beginning: bytes, comings: Comings, ended: threading.Event) -> None:
    """Connect and send without end; whenever the worker hangs up, come again."""
    filler = bytes(1 << 16)
    while not ended.is_set():
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", port), timeout=0.5) as stranger,
        ):
            comings.add()
            stranger.sendall(beginning)
            while not ended.is_set():
                stranger.sendall(filler)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", [LONG_COMMAND, LONG_MESSAGE])
def test_130_strangers_who_send_all_they_can_cost_little_and_a_router_is_served(
    stack: ExitStack, tmp_path: Path, kind: int, size: int
) -> None:
    keys = tmp_path / "worker.pem"
    keys.touch(0o600)
    keys.write_bytes(KEY_FILES["worker"])
    process, address = start_echo(stack, keys, epoch=1)
    router = Watched(dial(stack, address))
    peer = router.until_up().peer
    before = resident_bytes(process.pid)
    ended, comings = threading.Event(), Comings()
    beginning = GREETING + struct.pack("!BQ", kind, size)
    port = int(address.rpartition(":")[2])
    strangers = [
        threading.Thread(target=send_all_it_can, args=(port, beginning, comings, ended))
        for _ in range(STRANGERS)
    ]
    for each in strangers:
        each.start()
    stack.callback(ended.set)
    most = before

    def all_have_come_again() -> bool:
        nonlocal most
        most = max(most, resident_bytes(process.pid))
        return comings.count >= 2 * STRANGERS

    router.until(all_have_come_again, "all strangers to be hung up on")
    ended.set()
    for each in strangers:
        each.join()
    assert most - before <= GROWTH_BYTES_MAX
    router.links.send(peer, Cancel("served", 0))
    router.until(
        lambda: router.messages() == [Refused("served", 0, "stale")], "an answer in the same session"
    )
