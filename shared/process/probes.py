"""`/livez`, `/readyz` and `/metrics` of a worker, answered from threads of their own.

A step that takes a second must not fail a probe. Therefore nothing here asks the main loop: the loop records a beat in
every turn, and the probe checks how old it is. A device step releases the interpreter lock. Knows no role.
"""

from __future__ import annotations

import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from shared.errors import StartError
from shared.process.health import Health
from shared.process.listening import listening_socket
from shared.process.metrics import CONTENT_TYPE, Metrics

CLOSING_POLL_SECONDS = 0.1  # how often the server checks whether it should end; a request wakes it at once
REQUEST_SECONDS_MAX = 5.0  # a client that sends nothing occupies a thread for this long


class _ProbeServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, host: str, port: int, handler: type[BaseHTTPRequestHandler]):
        super().__init__((host, port), handler, bind_and_activate=False)
        self.socket.close()
        self.socket, address = listening_socket(host)
        try:
            self.socket.bind((address, port))  # not server_bind: that asks DNS for its own name
            self.server_address = self.socket.getsockname()
            self.server_activate()
        except BaseException:
            self.server_close()
            raise

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
            self._server = _ProbeServer(host, port, Handler)
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
