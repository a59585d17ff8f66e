"""`/livez`, `/readyz` and `/metrics` of a worker, answered from a thread of their own.

A step that takes a second must not fail a probe, so nothing here asks the loop: the loop leaves a mark each turn, and
the probe looks how old it is. The interpreter lock is released during a device step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec

from shared.errors import StartError
from shared.process.metrics import CONTENT_TYPE, Metrics

CLOSING_POLL_SECONDS = 0.1  # how often the server looks whether it should end; requests wake it at once
REQUEST_SECONDS_MAX = 5.0  # a client that says nothing holds a thread so long


class Health:
    """What probes are told about a process; written by its main thread, read by the probes' threads.

    Not ready at first; `doing` says what it does until it is, and `facts` what it chose (device, dtype, pages, …).
    """

    def __init__(self, loop_seconds_max: float, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._loop_seconds_max = loop_seconds_max
        self._turned_at: float | None = None
        self._leaving = False
        self.ready = False
        self.doing = "starting"
        self.facts: dict[str, str | int] = {}

    def turned(self) -> None:
        """The main loop has come round; called each turn. Before the first one the process counts as alive."""
        self._turned_at = self._clock()

    def become_ready(self) -> None:
        """Loaded, warmed up, self-fetch passed: work is welcome. Not for one that leaves."""
        if self._leaving:
            return
        self.doing = "serving"
        self.ready = True

    def become_unready(self, why: str) -> None:
        """No new work, for this reason."""
        if not self._leaving:
            self.ready, self.doing = False, why

    def leave(self) -> None:
        """No new work ever again."""
        self._leaving = True
        self.ready, self.doing = False, "leaving"

    def alive(self) -> bool:
        """Whether the loop has turned lately, or is not running yet."""
        return self._turned_at is None or self._clock() - self._turned_at <= self._loop_seconds_max

    def report(self) -> bytes:
        """The body of `/readyz`."""
        return msgspec.json.encode({"ready": self.ready, "doing": self.doing, "facts": self.facts})


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
                """A line a probe would drown the others."""

        try:
            self._server = ThreadingHTTPServer((host, port), Handler)
        except OSError as error:
            raise StartError(f"cannot listen on {host}:{port} for probes: {error.strerror}") from error
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(CLOSING_POLL_SECONDS,), name="probes", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """The port that was given, or chosen when 0 was."""
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
