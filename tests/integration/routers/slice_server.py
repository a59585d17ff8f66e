"""The part of a Kubernetes API server that discovery talks to: list and watch of EndpointSlices, in this process.

Tests put and remove pods; which slices name them is decided here, as the controller does it: a slice has the pods of
one Service with the same port, `SLICE_PODS_MAX` at most. Versions, a history and label selectors are kept as the real
server keeps them, so that a client that asks wrongly misses pods. And it can be in every trouble that a real one is in:
away, silent, forbidding, hasty, trickling, forgetful, cut off.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

POLL_SECONDS = 0.05
PATH = "/apis/discovery.k8s.io/v1/namespaces/"
SLICE_PODS_MAX = 100
Manifest = dict[str, Any]


@dataclass(frozen=True)
class ServedPod:
    """A pod of the chart, as a slice shows it."""

    uid: str
    role: str
    ip: str = ""  # a pod without one is in no slice
    port: int = 8002
    ready: bool = True
    terminating: bool = False
    release: str = "demo"

    @property
    def endpoint(self) -> Manifest:
        conditions = {
            "ready": self.ready and not self.terminating,
            "serving": self.ready,
            "terminating": self.terminating,
        }
        target = {"kind": "Pod", "namespace": "prod", "name": f"{self.release}-{self.role}-{self.uid}"}
        return {"addresses": [self.ip], "conditions": conditions, "targetRef": target | {"uid": self.uid}}

    def slice(self, name: str) -> Manifest:
        """A slice without endpoints that can name this pod."""
        release = {"app.kubernetes.io/name": "segue", "app.kubernetes.io/instance": self.release}
        port = {"name": "admin" if self.role == "router" else "links", "port": self.port, "protocol": "TCP"}
        return {
            "metadata": {"name": name, "labels": release | {"app.kubernetes.io/component": self.role}},
            "addressType": "IPv6" if ":" in self.ip else "IPv4",
            "endpoints": [],
            "ports": [port],
        }


@dataclass(frozen=True)
class Asked:
    """One request."""

    verb: str
    namespace: str
    parameters: dict[str, str]
    authorization: str


@dataclass
class Trouble:
    """What the server does wrong just now."""

    denied: set[str] = field(default_factory=set)  # verbs answered by 403
    broken: bool = False  # all requests are answered by 500
    nonsense: bool = False  # something answers that is no API server
    silent: bool = False  # watches are accepted, then nothing comes, and no end
    mute: bool = False  # requests are read and not answered
    hasty: bool = False  # watches are accepted and ended at once
    trickling: bool = False  # watches never end; empty lines keep coming
    gone_as_status: bool = False  # 410 comes as the HTTP status, not as an event


class SliceServer:
    """Serves from construction to `close`, over TLS where it is given some; all methods from any thread."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.tls = tls
        self.token = ""  # requests with another one are answered by 401; "": any will do
        self.asked: list[Asked] = []
        self.trouble = Trouble()
        self._slices: dict[str, Manifest] = {}  # by name
        self._slice_of: dict[str, str] = {}  # by the pod's uid
        self._history: list[tuple[int, Manifest | None, Manifest]] = []  # version, before, after
        self._version = 100
        self._forgotten = 0  # versions before this one cannot be watched from
        self._changed = threading.Condition()
        self._connections: set[socket.socket] = set()
        self._server: ThreadingHTTPServer | None = None
        self.port = 0
        self.back()

    # ---- the cluster's side

    def put(self, *pods: ServedPod) -> None:
        """Create pods, or change those of the same uid."""
        with self._changed:
            for pod in pods:
                self._take_out(pod.uid, unless=self._slice_for(pod))
                if pod.ip:
                    self._put_in(pod, self._slice_for(pod))
            self._changed.notify_all()

    def remove(self, *uids: str) -> None:
        """Delete pods."""
        with self._changed:
            for uid in uids:
                self._take_out(uid)
            self._changed.notify_all()

    def put_slice(self, manifest: Manifest) -> None:
        """Create a slice as it is, or change the one of this name."""
        with self._changed:
            self._write(manifest["metadata"]["name"], manifest)
            self._changed.notify_all()

    def remove_slices(self) -> None:
        """Delete all slices; their pods live, and nothing writes the slices anew until `put`."""
        with self._changed:
            for name in list(self._slices):
                self._write(name, None)
            self._slice_of.clear()
            self._changed.notify_all()

    def _slice_for(self, pod: ServedPod) -> str:
        """The slice it is in, or the first one of its Service with room for it."""
        family = "v6" if ":" in pod.ip else "v4"
        service = f"{pod.release}-{pod.role}-{pod.port}-{family}"
        held = self._slice_of.get(pod.uid, "")
        if held.rpartition("-")[0] == service:
            return held
        numbers = (f"{service}-{number}" for number in itertools.count())
        return next(name for name in numbers if len(self._endpoints(name)) < SLICE_PODS_MAX)

    def _endpoints(self, name: str) -> list[Manifest]:
        found: list[Manifest] = self._slices[name]["endpoints"] if name in self._slices else []
        return found

    def _put_in(self, pod: ServedPod, name: str) -> None:
        others = [each for each in self._endpoints(name) if each["targetRef"]["uid"] != pod.uid]
        self._slice_of[pod.uid] = name
        self._write(name, pod.slice(name) | {"endpoints": [*others, pod.endpoint]})

    def _take_out(self, uid: str, unless: str = "") -> None:
        name = self._slice_of.get(uid, unless)
        if name == unless:
            return
        del self._slice_of[uid]
        others = [each for each in self._endpoints(name) if each["targetRef"]["uid"] != uid]
        self._write(name, self._slices[name] | {"endpoints": others} if others else None)

    def _write(self, name: str, after: Manifest | None) -> None:
        """Change a slice, or delete it (None)."""
        self._version += 1
        before = self._slices.pop(name, None)
        shown = after or {"metadata": {"name": name, "labels": {}}}
        shown = shown | {"metadata": shown["metadata"] | {"resourceVersion": str(self._version)}}
        self._history.append((self._version, before, shown))
        if after:
            self._slices[name] = shown

    def forget(self) -> None:
        """Compact the history: who watches from an older version than the present one gets 410."""
        with self._changed:
            self._version += 1
            self._forgotten = self._version
            self._changed.notify_all()

    def cut(self) -> None:
        """Break all connections."""
        with self._changed:
            for connection in list(self._connections):
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def away(self) -> None:
        """Be unreachable: connections are refused."""
        assert self._server
        self._server.shutdown()
        self._server.server_close()
        self._server = None
        with self._changed:
            self._changed.notify_all()
        self.cut()

    def back(self) -> None:
        """Be there, on the same port as before."""
        self._server = _Server(self)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(POLL_SECONDS,), daemon=True).start()

    def close(self) -> None:
        """End for good."""
        self.trouble = Trouble()
        if self._server:
            self.away()

    def write_kubeconfig(self, file: Path) -> Path:
        """A file for KUBECONFIG that leads here."""
        named = {
            "clusters": [{"name": "here", "cluster": {"server": f"http://127.0.0.1:{self.port}"}}],
            "users": [{"name": "me", "user": {}}],
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
        }
        file.write_text(json.dumps({"apiVersion": "v1", "kind": "Config", "current-context": "here"} | named))
        return file

    # ---- what handlers ask

    def listing(self, selector: str) -> bytes:
        with self._changed:
            items = [each for each in self._slices.values() if _selects(selector, each)]
            return json.dumps({"metadata": {"resourceVersion": str(self._version)}, "items": items}).encode()

    def events(self, since: int, selector: str, seconds: float) -> Iterator[bytes]:
        """Lines of a watch; an empty one where the connection should be looked after."""
        deadline = time.monotonic() + seconds
        while self._server and (self.trouble.silent or self.trouble.trickling or time.monotonic() < deadline):
            with self._changed:
                if not self._news(since):
                    self._changed.wait(POLL_SECONDS)
                fresh = [] if self.trouble.silent else [each for each in self._history if each[0] > since]
                forgotten = since < self._forgotten and not self.trouble.silent
            if forgotten:
                yield _event(
                    "ERROR", {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}
                )
                return
            for version, before, after in fresh:
                since = version
                kind = _kind(before is not None and _selects(selector, before), _selects(selector, after))
                if kind:
                    yield _event(kind, after)
            if self.trouble.trickling:
                yield b"\n"

    def is_forgotten(self, since: int) -> bool:
        return since < self._forgotten

    def _news(self, since: int) -> bool:
        return bool(self._history) and self._history[-1][0] > since and not self.trouble.silent

    @contextlib.contextmanager
    def connection(self, connection: socket.socket) -> Iterator[None]:
        self._connections.add(connection)
        try:
            yield
        finally:
            self._connections.discard(connection)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, slices: SliceServer):
        self.slices = slices
        super().__init__(("127.0.0.1", slices.port), _Handler)
        if slices.tls:
            self.socket = slices.tls.wrap_socket(self.socket, server_side=True)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hung up is no news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def handle(self) -> None:
        with self.server.slices.connection(self.connection), contextlib.suppress(OSError):
            super().handle()

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        parameters = {name: values[0] for name, values in parse_qs(address.query).items()}
        verb = "watch" if parameters.get("watch", "").lower() == "true" else "list"
        namespace = address.path.removeprefix(PATH).removesuffix("/endpointslices")
        slices = self.server.slices
        asked = Asked(verb, namespace, parameters, self.headers.get("Authorization", ""))
        if self._accepts_watch(asked):
            self._watch(asked)
            return
        slices.asked.append(asked)
        if slices.trouble.mute:
            self.connection.recv(1)  # until the client gives up
            self.close_connection = True
        elif slices.token and asked.authorization.lower() != f"bearer {slices.token}":
            self._fail(401, "Unauthorized")
        elif slices.trouble.broken:
            self._fail(500, "etcd has no leader")
        elif slices.trouble.nonsense:
            self._answer(200, b"<html>please log in</html>")
        elif verb in slices.trouble.denied:
            self._fail(403, f'endpointslices is forbidden: User "router" cannot {verb} them')
        elif verb == "list":
            self._answer(200, slices.listing(parameters.get("labelSelector", "")))
        else:
            self._fail(410, "too old")

    def _accepts_watch(self, asked: Asked) -> bool:
        slices, trouble = self.server.slices, self.server.slices.trouble
        refused = trouble.mute or trouble.broken or trouble.nonsense or "watch" in trouble.denied
        if asked.verb != "watch" or refused or (slices.token and slices.token not in asked.authorization):
            return False
        return not (trouble.gone_as_status and slices.is_forgotten(int(asked.parameters["resourceVersion"])))

    def _watch(self, asked: Asked) -> None:
        slices, parameters = self.server.slices, asked.parameters
        since = int(parameters["resourceVersion"])
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        slices.asked.append(asked)  # not sooner: a test that cuts it now has cut an accepted watch
        seconds = 0.0 if slices.trouble.hasty else float(parameters["timeoutSeconds"])
        for line in slices.events(since, parameters.get("labelSelector", ""), seconds):
            middle = len(line) // 2  # a line need not be a chunk
            for part in (line[:middle], line[middle:]):
                if part:
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
        self.wfile.write(b"0\r\n\r\n")

    def _fail(self, status: int, message: str) -> None:
        self._answer(status, json.dumps({"kind": "Status", "code": status, "message": message}).encode())

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
        """Tests look at `asked`."""


def _selects(selector: str, found: Manifest) -> bool:
    labels = found["metadata"]["labels"]
    return all(
        labels.get(name) == value for name, _, value in (each.partition("=") for each in selector.split(","))
    )


def _kind(before: bool, after: bool) -> str:
    """How a change looks to who selects: out of sight is deleted."""
    return {(False, True): "ADDED", (True, True): "MODIFIED", (True, False): "DELETED"}.get(
        (before, after), ""
    )


def _event(kind: str, what: Manifest) -> bytes:
    return json.dumps({"type": kind, "object": what}).encode() + b"\n"
