"""Workers that are listed by name: what a name server that does not answer does to a router's links."""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from shared.links.names import Names
from tests.integration.links.watched_links import WORKER, Watched, address_of, dial, listen
from tests.link_settings import link_settings
from tests.waiting import until

SERVER = "127.0.0.53"


def serve_beside_a_name() -> None:
    """A link to a worker by address, beside one to a worker by a name that nobody resolves."""
    settings = link_settings(heartbeat_seconds=0.1, silence_seconds=1.0)
    with ExitStack() as stack:
        worker = Watched(listen(stack, settings))
        router = Watched(dial(stack, address_of(worker), settings))
        router.until_up()
        router.links.connect("tcp://decode-b.example:5000")  # type: ignore[union-attr]
        assert router.links.receive(4.0) == []


def test_a_name_server_that_is_silent_costs_no_link_to_another_worker(tmp_path: Path) -> None:
    isolated = ("unshare", "--mount")
    if subprocess.run([*isolated, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no namespace for mounts can be made here")
    resolv = tmp_path / "resolv.conf"
    resolv.write_text(f"nameserver {SERVER}\n", encoding="utf-8")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind((SERVER, 53))
        shell = 'mount --bind "$1" /etc/resolv.conf && exec "$2" -m tests.integration.links.test_names'
        command = [*isolated, "sh", "-ec", shell, "sh", str(resolv), sys.executable]
        ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        asked = silent.recv(512, socket.MSG_DONTWAIT)
    assert b"decode-b" in asked
    assert ended.returncode == 0, ended.stderr


def test_a_worker_that_is_listed_by_name_is_dialed(stack: ExitStack) -> None:
    worker = Watched(listen(stack))
    port = address_of(worker).rpartition(":")[2]
    router = Watched(dial(stack, f"tcp://localhost:{port}"))
    assert router.until_up().peer == WORKER
    worker.links.close()
    router.until_down()
    listen(stack, port=int(port))
    router.until_up(2)


def test_a_name_without_an_address_is_said_once_and_asked_for_again() -> None:
    names = Names()
    address = "tcp://no-such-host.invalid:1"
    for _ in range(2):
        with pytest.raises(OSError, match=r"cannot look up no-such-host\.invalid: "):
            until(lambda: names.resolve(address), 20, "the end of the lookup")


def test_addresses_are_not_looked_up() -> None:
    for address in ("tcp://127.0.0.1:1", "tcp://[::1]:1", "tcp://[fe80::1%eth0]:1"):
        assert Names().resolve(address) == address


if __name__ == "__main__":
    serve_beside_a_name()
