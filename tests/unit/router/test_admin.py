"""A router's admin port answers while its event loop hangs, and tells the truth about it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

from tests.unit.router.scripted_workers import RunningRouter


@contextmanager
def hanging_loop(router: RunningRouter) -> Iterator[None]:
    """The router's event loop does nothing within."""
    hangs, goes_on = threading.Event(), threading.Event()

    def hang() -> None:
        hangs.set()
        assert goes_on.wait(60)

    caller = threading.Thread(target=router.call, args=(hang,))
    caller.start()
    assert hangs.wait(10)
    yield
    goes_on.set()
    caller.join()


@pytest.fixture
def own_router(model_folder: Path) -> Iterator[RunningRouter]:
    with RunningRouter(model_folder) as running:
        yield running


def test_while_the_loop_hangs_the_port_answers_and_after_a_while_says_so(own_router: RunningRouter) -> None:
    url, watch = own_router.admin_url, own_router.health.loop_watch
    own_router.health.beat()
    with hanging_loop(own_router):
        assert httpx2.get(f"{url}/livez").status_code == 200, "a stall is no hang yet"
        watch.seconds_max = 0.0
        assert httpx2.get(f"{url}/livez").status_code == 503
        metrics = httpx2.get(f"{url}/metrics", timeout=20)
        assert "segue_ready" in metrics.text, "older figures are better than none"
        debug = httpx2.get(f"{url}/debug/requests/unknown", timeout=20)
        assert debug.status_code == 503
        assert "loop" in debug.json()["error"]["message"]
    watch.seconds_max = 60.0
    own_router.health.beat()
    assert httpx2.get(f"{url}/livez").status_code == 200
    assert httpx2.get(f"{url}/debug/requests/unknown").status_code == 404


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/metrics", "/%6detrics", "/debug/requests/unknown"])
def test_the_port_of_the_api_has_none_of_it(router: RunningRouter, path: str) -> None:
    assert router.http.get(path).status_code == 404
