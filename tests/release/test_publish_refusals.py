"""A registry that does not say what it has gets nothing: its tags may be others' by now. It is this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from images.release.chart import pack_chart
from images.release.make import ReleaseError
from images.release.publish import Registry
from tests.charts.rendering import ROOT, helm
from tests.release.test_chart_package import EPOCH_SECONDS, RELEASE

asked: list[str] = []


class _ClosedRegistry(BaseHTTPRequestHandler):
    """Lets nobody read, and everybody write."""

    def _refuse(self) -> None:
        asked.append(self.command)
        self.send_response(403 if self.command in ("GET", "HEAD") else 202)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = _refuse  # noqa: N815 - http.server asks for these names

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def closed_registry() -> Iterator[Registry]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _ClosedRegistry) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Registry(f"127.0.0.1:{server.server_port}/ai", plain_http=True, helm=helm())
        server.shutdown()


def test_a_chart_is_not_pushed_over_one_that_cannot_be_read(
    closed_registry: Registry, tmp_path: Path
) -> None:
    package = pack_chart(ROOT, tmp_path, RELEASE, EPOCH_SECONDS)
    asked.clear()
    with pytest.raises(ReleaseError, match=r"does not say whether it has 1\.2\.3"):
        closed_registry.push_chart(package)
    assert asked
    assert set(asked) <= {"GET", "HEAD"}
