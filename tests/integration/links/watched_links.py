"""Links over real sockets in one test, and all that they report."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import zmq

from shared.links.events import LinkEvent, PeerDown, PeerUp, Received
from shared.links.keys import LINK_ROLES, LinkKeys, new_key_files, parse_keys
from shared.links.session import LinkSettings, seal
from shared.links.sockets import RouterLinks, WorkerLinks
from shared.wire.messages import Hello, Message, encode
from tests.link_settings import link_settings, write_note

PATIENCE_SECONDS = 20.0
WORKER_HELLO = Hello(session=0, role="prefill", uid="prefill-a", epoch=5)
ROUTER_HELLO = Hello(session=0, role="router", uid="router-a", epoch=6)
WORKER, ROUTER = "prefill-a/0000000000000005", "router-a/0000000000000006"
KEY_FILES = new_key_files()
KEYS = {role: parse_keys(KEY_FILES[role], role) for role in LINK_ROLES}
Event = TypeVar("Event", PeerUp, PeerDown, Received)


class Watched:
    """Links, and all their events so far."""

    def __init__(self, links: RouterLinks | WorkerLinks):
        self.links = links
        self.seen: list[LinkEvent] = []

    def until(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"waited for {what}, saw {self.seen[-5:]}"
            self.seen += self.links.receive(0.05)

    def until_up(self, times: int = 1) -> PeerUp:
        self.until(lambda: len(self.of(PeerUp)) >= times, f"PeerUp number {times}")
        return self.of(PeerUp)[-1]

    def until_down(self, times: int = 1) -> PeerDown:
        self.until(lambda: len(self.of(PeerDown)) >= times, f"PeerDown number {times}")
        return self.of(PeerDown)[-1]

    def messages(self) -> list[Message]:
        return [event.message for event in self.of(Received)]

    def of(self, kind: type[Event]) -> list[Event]:
        return [event for event in self.seen if isinstance(event, kind)]


def address_of(watched: Watched) -> str:
    assert isinstance(watched.links, WorkerLinks)
    return watched.links.address


def listen(
    stack: ExitStack,
    settings: LinkSettings | None = None,
    keys: LinkKeys = KEYS["worker"],
    port: int = 0,
    host: str = "127.0.0.1",
) -> WorkerLinks:
    """A worker's links, closed with the stack."""
    links = WorkerLinks(host, port, keys, WORKER_HELLO, settings or link_settings(), write_note=write_note)
    stack.callback(links.close)
    return links


def dial(
    stack: ExitStack, address: str, settings: LinkSettings | None = None, keys: LinkKeys = KEYS["router"]
) -> RouterLinks:
    """A router's links that dial this worker, closed with the stack."""
    links = RouterLinks(keys, ROUTER_HELLO, settings or link_settings(), write_note=write_note)
    stack.callback(links.close)
    links.connect(address)
    return links


def start_echo(
    stack: ExitStack, keys_file: Path, epoch: int, port: str = "0"
) -> tuple[subprocess.Popen[str], str]:
    """An echo worker with the keys in this file, and its address."""
    command = [sys.executable, "-m", "tests.integration.links.echo_worker", str(keys_file), str(epoch), port]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    stack.enter_context(process)
    stack.callback(process.kill)
    assert process.stdout is not None
    line = process.stdout.readline()
    return process, line.strip()


def stranger(stack: ExitStack, address: str, own: bytes | None, server: bytes | None) -> zmq.Socket[bytes]:
    """A DEALER that greets like a router with the secret key `own`, dialing a worker of the public key `server`."""
    context = zmq.Context()
    stack.callback(context.term)
    dealer = context.socket(zmq.DEALER)
    stack.callback(dealer.close)
    dealer.linger = 0
    if own is not None and server is not None:
        dealer.curve_secretkey = own
        dealer.curve_publickey = zmq.curve_public(own)
        dealer.curve_serverkey = server
    dealer.connect(address)
    dealer.send_multipart(seal(1, 0, encode(Hello(session=1, role="router", uid="stranger", epoch=1))))
    return dealer
