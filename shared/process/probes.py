"""`/livez`, `/readyz` and `/metrics` of a worker, answered from threads of their own.

A step that takes a second must not fail a probe. Therefore nothing here asks the main loop: the loop records a beat in
every turn, and the probe checks how old it is. A device step releases the interpreter lock. Knows no role.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec

from shared.errors import StartError
from shared.process.metrics import CONTENT_TYPE, Metrics

CLOSING_POLL_SECONDS = 0.1  # how often the server checks whether it should end; a request wakes it at once
REQUEST_SECONDS_MAX = 5.0  # a client that sends nothing occupies a thread for this long


class Health:
    """The state that probes report; written by the main thread, read by the threads of the probes.

    A process is not ready at first. `doing` is what it does until then, `facts` what it chose (device, pages, …).
    """

    def __init__(self, loop_seconds_max: float, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._loop_seconds_max = loop_seconds_max
        self._beat_at: float | None = None
        self._draining = False
        self.ready = False
        self.doing = "starting"
        self.facts: dict[str, str | int] = {}

    def beat(self) -> None:
        """The main loop runs; called in every turn. Before the first beat the process counts as alive."""
        self._beat_at = self._clock()

    def become_ready(self) -> None:
        """The process takes work: it is loaded and its self-fetch passed. A draining one stays unready."""
        if self._draining:
            return
        self.doing = "serving"
        self.ready = True

    def become_unready(self, why: str) -> None:
        """The process takes no new work, for this reason."""
        if not self._draining:
            self.ready, self.doing = False, why

    def start_draining(self) -> None:
        """The process takes no new work until it ends."""
        self._draining = True
        self.ready, self.doing = False, "draining"

    def alive(self) -> bool:
        """Whether the last beat is recent, or the loop is not running yet."""
        return self._beat_at is None or self._clock() - self._beat_at <= self._loop_seconds_max

    def report(self) -> bytes:
        """The body of `/readyz`."""
        return msgspec.json.encode({"ready": self.ready, "doing": self.doing, "facts": self.facts})


class _ProbeServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Report a failure, but not a client that hung up: a probe does when the answer takes it too long."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class Probes:
    """The HTTP server of a worker's probes."""

    def __init__(self, host: str, port: int, health: Health, metrics: Metrics):
        def respond(path: str) -> tuple[int, str, bytes]:
            if path == "/livez":
                return (
                    (200, "text/plain", b"ok\n")
                    if health.alive()
                    else (503, "text/plain", b"the loop hangs\n")
                )
            if path == "/readyz":
                return 200 if health.ready else 503, "application/json", health.report()
            if path == "/metrics":
                return 200, CONTENT_TYPE, metrics.render()
            return 404, "text/plain", b"only /livez, /readyz and /metrics\n"

        class Handler(BaseHTTPRequestHandler):
            timeout = REQUEST_SECONDS_MAX
            server_version = "segue"
            sys_version = ""

            def do_GET(self) -> None:
                status, content_type, body = respond(self.path.partition("?")[0])
                self.send_response(status)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
                """Write nothing: a line for each probe would bury the others."""

        try:
            self._server = _ProbeServer((host, port), Handler)
        except OSError as error:
            raise StartError(f"cannot listen on {host}:{port} for probes: {error.strerror}") from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(CLOSING_POLL_SECONDS,), name="probes", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """The port it listens on; for port 0, the one that was chosen."""
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
