"""A web server that speaks as much of the Hub's API as a download of a model needs, and counts what it sends.

`GET /api/models/ID/revision/REVISION?blobs=true` lists files with sizes and hashes; `GET /ID/resolve/COMMIT/FILE` leads
to another path, as the real one leads to a store, which sends the file, or the rest of it from a place on (`Range`).
Connections can be cut after some bytes, and slowed down; repositories can be gated, and ask for a token.
"""

from __future__ import annotations

import hashlib
import json
import ssl
import threading
from dataclasses import dataclass, field
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
PIECE_BYTES = 1 << 16


@dataclass(slots=True)
class Repository:
    """What the server has under one id. `sizes` are claimed of files that nobody fetches."""

    files: dict[str, bytes | Path]
    token: str = ""  # asked for where it is given
    gated_for: frozenset[str] = (
        frozenset()
    )  # tokens whose account has not accepted the licence; "": none given
    sizes: dict[str, int] = field(default_factory=dict)
    commit: str = COMMIT


@dataclass
class HubServer:
    """The repositories by id, what they have sent, and how connections are treated."""

    repositories: dict[str, Repository]
    host: str = "127.0.0.1"
    tls: ssl.SSLContext | None = None
    cut_after_bytes: list[int] = field(default_factory=list)  # of the next answers with a file, one each
    bytes_per_second: float = float("inf")  # of one answer
    sent: dict[str, int] = field(default_factory=dict)  # bytes of files, by name
    asked: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    ended: threading.Event = field(default_factory=threading.Event)

    @cached_property
    def server(self) -> ThreadingHTTPServer:
        """The listening server."""
        hub = self

        class Handler(_Handler):
            served = hub

        server = ThreadingHTTPServer((self.host, 0), Handler)
        server.daemon_threads = True
        if self.tls is not None:
            server.socket = self.tls.wrap_socket(server.socket, server_side=True)
        return server

    @property
    def url(self) -> str:
        """Its address."""
        return f"http{'s' if self.tls else ''}://{self.host}:{self.server.server_address[1]}"

    @property
    def sent_bytes(self) -> int:
        """Of files, all together."""
        return sum(self.sent.values())

    def __enter__(self) -> HubServer:
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.server.shutdown()
        self.server.server_close()


class _Handler(BaseHTTPRequestHandler):
    served: HubServer

    def do_GET(self) -> None:
        """One of the three paths."""
        hub, path = self.served, urlsplit(self.path).path  # a proxy is asked for a whole address
        hub.asked.append(path)
        if path.startswith("/store/"):
            self._send_file(*path.removeprefix("/store/").split("/", 2))
            return
        parts = path.removeprefix("/api/models").strip("/").split("/")
        repository = hub.repositories.get("/".join(parts[:2]))
        if repository is None:
            self._refuse(401, "RepoNotFound", "Repository not found")
        elif not self._is_refused(repository) and not self._is_of_another_commit(repository, parts[3]):
            if path.startswith("/api/models/"):
                self._answer(200, self._info("/".join(parts[:2]), repository))
            else:
                self.send_response(302)
                self.send_header("Location", f"/store/{parts[0]}/{parts[1]}/{'/'.join(parts[4:])}")
                self.send_header("Content-Length", "0")
                self.end_headers()

    def _is_refused(self, repository: Repository) -> bool:
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if repository.gated_for and token in repository.gated_for:
            self._refuse(403, "GatedRepo", "Access to this model is restricted")
        elif repository.token and token not in (repository.token, *repository.gated_for):
            self._refuse(
                401,
                "",
                "Invalid credentials in Authorization header" if token else "Invalid username or password.",
            )
        else:
            return False
        return True

    def _is_of_another_commit(self, repository: Repository, revision: str) -> bool:
        if revision in (repository.commit, "main"):
            return False
        self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return True

    def _info(self, model: str, repository: Repository) -> dict[str, object]:
        siblings = []
        for name, content in repository.files.items():
            data = content.read_bytes() if isinstance(content, Path) else content
            size = repository.sizes.get(name, len(data))
            sibling: dict[str, object] = {"rfilename": name, "size": size, "blobId": "0" * 40}
            if name.endswith((".safetensors", ".gguf")):
                digest = hashlib.sha256(data).hexdigest()
                sibling["lfs"] = {"size": size, "sha256": digest, "pointerSize": 134}
            siblings.append(sibling)
        return {"id": model, "modelId": model, "sha": repository.commit, "siblings": siblings}

    def _send_file(self, owner: str, name: str, file: str) -> None:
        hub = self.served
        content = hub.repositories[f"{owner}/{name}"].files[file]
        data = memoryview(content.read_bytes() if isinstance(content, Path) else content)
        wanted = self.headers.get("Range")
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted else 0
        with hub.lock:
            cut = hub.cut_after_bytes.pop(0) if hub.cut_after_bytes and len(data) > PIECE_BYTES else None
        self.send_response(206 if wanted else 200)
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        end = len(data) if cut is None else min(len(data), start + cut)
        while start < end:
            piece = data[start : min(start + PIECE_BYTES, end)]
            try:
                self.wfile.write(piece)
            except OSError:
                return  # whoever asked has gone
            with hub.lock:
                hub.sent[file] = hub.sent.get(file, 0) + len(piece)
            start += len(piece)
            hub.ended.wait(len(piece) / hub.bytes_per_second)
        self.close_connection = cut is not None

    def _refuse(self, status: int, code: str, message: str) -> None:
        headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self._answer(status, {"error": message}, headers)

    def _answer(self, status: int, body: dict[str, object], headers: dict[str, str] | None = None) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
        """Tests look at answers."""
