"""What a request takes of a router's memory while it waits for its answer: next to nothing of its body.

Each shape is sent many times to workers that say nothing. Its body is large by what the request does not need, so what
each of them kept would show.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.unit.router.openai.test_request_memory import CONTEXT_LEN, MeasuredRouter, tiny_folder
from tests.unit.router.scripted_workers import MODEL
from tests.waiting import until

GROWTH_MIB = 20  # live requests take 7 at most; what they might keep is 32 MiB of junk or of lists
JUNK = "x" * 3_500_000
LISTS: list[Any] = [[]] * 120_000  # 468 KiB of JSON; as objects 8 MiB
LISTS_JSON = b"[[],[],"
CHAT = {"messages": [{"role": "user", "content": "fox"}]}
UNASKED = {"tool_choice": "none"}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("chat/completions", CHAT | {"junk": JUNK}),
    "chat, no tools": ("chat/completions", CHAT | UNASKED | {"junk": JUNK}),
    "chat, any text": ("chat/completions", CHAT | {"junk": JUNK, "response_format": {"type": "text"}}),
    "completions": ("completions", {"prompt": "fox", "junk": JUNK, "response_format": {"type": "text"}}),
    "responses": ("responses", {"input": "fox", "junk": JUNK}),
    "responses, no tools": ("responses", {"input": "fox", "junk": JUNK} | UNASKED),
    "messages": ("messages", CHAT | {"max_tokens": 9, "junk": JUNK}),
    "messages, no tools": (
        "messages",
        CHAT | {"max_tokens": 9, "junk": JUNK, "tool_choice": {"type": "none"}},
    ),
    "variables of a template": ("chat/completions", CHAT | {"chat_template_kwargs": {"x": LISTS}}),
    "an unknown field of a tool": (
        "responses",
        {"input": "fox", "tools": [{"type": "function", "name": "a", "x": LISTS}]} | UNASKED,
    ),
    "parameters of a tool": (
        "responses",
        {"input": "fox", "tools": [{"type": "function", "name": "a", "parameters": {"x": LISTS}}]} | UNASKED,
    ),
    "metadata": ("responses", {"input": "fox", "metadata": {f"{at:06d}": "" for at in range(30_000)}}),
}


def posted(path: str, body: bytes) -> bytes:
    head = f"POST /v1/{path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


@dataclass
class SilentRouter(MeasuredRouter):
    """A router in another process, whose workers answer nothing."""

    child: subprocess.Popen[str]

    def has_live(self, count: int) -> bool:
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        self.child.stdin.write("\n")
        self.child.stdin.flush()
        return int(self.child.stdout.readline()) == count

    def grown_mib(self, path: str, body: bytes, count: int) -> float:
        """By how much it is larger while so many requests are live."""
        before = self.status_mib("VmRSS")
        address = urlsplit(self.url)
        with ExitStack() as connections:
            for at in range(count):
                connection = connections.enter_context(
                    socket.create_connection((address.hostname, address.port))
                )
                connection.sendall(posted(path, body))
                until(partial(self.has_live, at + 1), 20, "the request")
            grown = self.status_mib("VmRSS") - before
        until(partial(self.has_live, 0), 20, "the end of all")
        return grown


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SilentRouter]:
    folder = tiny_folder(tmp_path_factory.mktemp("live"))
    command = [
        sys.executable,
        "-m",
        "tests.unit.router.router_child",
        str(folder),
        str(CONTEXT_LEN),
        "silent",
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        yield SilentRouter(child.stdout.readline().strip(), child.pid, child)
        child.stdin.close()
        assert child.wait(20) == 0


@pytest.mark.parametrize("shape", SHAPES)
def test_live_requests_hold_next_to_nothing_of_their_bodies(router: SilentRouter, shape: str) -> None:
    path, fields = SHAPES[shape]
    body = json.dumps({"model": MODEL} | fields, separators=(",", ":")).encode()
    router.grown_mib(path, body, 2)  # what the work itself takes, and the allocator keeps
    live = 10 if len(body) > 1 << 20 else 4 if LISTS_JSON in body else 12
    grown = router.grown_mib(path, body, live)
    assert grown < GROWTH_MIB, f"{live} requests of {len(body)} bytes took {grown:.0f} MiB"
