"""A chat with something that is no router: one sentence."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from shared.local.chat_command import ChatSession
from shared.primitives.errors import StartError


def listed(*models: tuple[str, str]) -> bytes:
    """What `/v1/models` says, of names and what they are names of."""
    return json.dumps({"data": [{"id": name, "root": root} for name, root in models]}).encode()


ANSWERS = {
    "html": b"<html>",
    "object": b"{}",
    "list": b"[1]",
    "aliases": listed(("qwen", "qwen"), ("Qwen/Qwen3-0.6B", "qwen")),
    "two": listed(("qwen", "qwen"), ("llama", "llama")),
}


class SomethingElse(BaseHTTPRequestHandler):
    """Answers each path with what the path says."""

    def do_GET(self) -> None:
        """Answer `/html/v1/models` with HTML."""
        self.send_response_only(200)
        self.end_headers()
        self.wfile.write(ANSWERS[self.path.split("/")[1]])


@pytest.fixture
def other_server() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), SomethingElse)
    threading.Thread(target=server.handle_request, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.server_close()


@pytest.mark.parametrize("what", ["html", "object", "list"])
def test_what_is_no_router_is_said_to_be_none(other_server: str, what: str) -> None:
    with pytest.raises(StartError, match="is no router"):
        ChatSession(f"{other_server}/{what}")


@pytest.mark.parametrize("port", ["99999", "x", "0"])
def test_a_port_that_cannot_be_is_no_url(port: str) -> None:
    with pytest.raises(StartError, match="is no URL of a router"):
        ChatSession(f"http://127.0.0.1:{port}")


def test_a_model_of_several_names_is_one(other_server: str) -> None:
    assert ChatSession(f"{other_server}/aliases").model == "qwen"


def test_of_two_models_one_must_be_named(other_server: str) -> None:
    with pytest.raises(StartError, match="serves 2 models; name one with --model"):
        ChatSession(f"{other_server}/two")
