"""The part of a Kubernetes API server that the Jobs of keys talk to: Secrets and Deployments of one namespace.

Objects are made once (409), found or not (404) and deleted, as the real server does it. `refused` is a quota or a Role
that forbids the verb for an object; `meanwhile` is what somebody else makes right before a request is looked at.
`moved_to` is another server that every answer points at; `lost` are names of Secrets that are made without an answer.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

POLL_SECONDS = 0.01
TOKEN = "token-of-the-job"
SECRETS = "/api/v1/namespaces/serving/secrets"
DEPLOYMENTS = "/apis/apps/v1/namespaces/serving/deployments"


@dataclass
class SecretServer:
    """What lives in the namespace, by path, and what was asked."""

    url: str = ""
    live: dict[str, dict[str, Any]] = field(default_factory=dict)
    refused: set[tuple[str, str]] = field(default_factory=set)  # verb and name
    moved_to: str = ""
    lost: set[str] = field(default_factory=set)
    meanwhile: Callable[[str], None] = lambda _verb: None
    asked: list[tuple[str, str]] = field(default_factory=list)

    def secrets(self) -> dict[str, dict[str, Any]]:
        """The Secrets by name."""
        return {
            path.rpartition("/")[2]: thing for path, thing in self.live.items() if path.startswith(SECRETS)
        }

    def answer(self, verb: str, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        """Status and object."""
        sent = json.loads(body) if body else {}
        at = f"{path}/{sent['metadata']['name']}" if verb == "POST" else path
        name = at.rpartition("/")[2]
        self.asked.append((verb, name))
        self.meanwhile(verb)
        if self.moved_to:
            return 307, {"message": "look elsewhere"}
        if (verb, name) in self.refused:
            return 403, {"kind": "Status", "message": f"secrets {name!r} is forbidden: exceeded quota"}
        if verb == "POST" and at in self.live:
            return 409, {"kind": "Status", "message": f"secrets {name!r} already exists"}
        if verb == "POST":
            self.live[at] = sent
            return (0 if name in self.lost else 201), sent
        if at not in self.live:
            return 404, {"kind": "Status", "message": f"{name!r} not found"}
        return 200, self.live.pop(at) if verb == "DELETE" else self.live[at]


@contextlib.contextmanager
def serving(port: int = 0) -> Iterator[SecretServer]:
    """Such a server, at `url`; 0: at a free port."""
    served = SecretServer()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply()

        def do_POST(self) -> None:
            self.reply()

        def do_DELETE(self) -> None:
            self.reply()

        def reply(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            known = self.headers["Authorization"] == f"Bearer {TOKEN}"
            status, thing = (
                served.answer(self.command, self.path, body) if known else (401, {"message": "who?"})
            )
            if not status:
                return
            answer = json.dumps(thing).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(answer)))
            if served.moved_to:
                self.send_header("Location", f"{served.moved_to}{self.path}")
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
            """Nothing: pytest would show it."""

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(POLL_SECONDS,))
        thread.start()
        served.url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield served
        finally:
            server.shutdown()
            thread.join()
