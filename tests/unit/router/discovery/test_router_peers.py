"""Any router answers for a request that another one served."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest

from router.discovery import router_peers
from router.discovery.router_peers import CONNECTIONS_MAX
from tests.unit.router.scripted_workers import MODEL, RunningRouter


@pytest.fixture
def routers(model_folder: Path) -> Iterator[tuple[RunningRouter, RunningRouter]]:
    """Two that know each other and themselves."""
    with RunningRouter(model_folder, uid="one") as one, RunningRouter(model_folder, uid="other") as other:
        one.peers.update({"one": one.admin_url, "other": other.admin_url})
        other.peers.update(one.peers)
        yield one, other


def ask(router: RunningRouter, rid: str) -> httpx2.Response:
    return router.http.get(f"{router.admin_url}/debug/requests/{rid}")


def serve(router: RunningRouter, prompt: str | list[str] = "fox") -> str:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
    rid: str = router.http.post("/v1/completions", json=body).raise_for_status().json()["id"]
    return rid


@pytest.mark.parametrize("prompt", ["fox", ["fox", "dog"]], ids=["one prompt", "two prompts"])
def test_a_router_answers_for_its_peer(
    routers: tuple[RunningRouter, RunningRouter], prompt: str | list[str]
) -> None:
    one, other = routers
    rid = serve(one, prompt)
    own, asked = ask(one, rid), ask(other, rid)
    assert asked.status_code == 200
    assert asked.json() == own.json()
    assert "worker" in asked.text


def test_an_unknown_request_is_a_404_at_every_router(routers: tuple[RunningRouter, RunningRouter]) -> None:
    one, other = routers
    unknown = serve(one)[:-4] + "beef"
    for router in routers:
        assert ask(router, unknown).status_code == 404
    for strange in ("", "..%2f..%2fmetrics", "ÿ", "0" * 4000):
        assert ask(other, f"cmpl-{strange}").status_code == 404
    prefix = serve(one).removeprefix("cmpl-")[:8]
    assert ask(other, f"{prefix}%2F..%2F..%2Fmetrics").status_code == 404


def test_a_peer_that_gives_no_answer_is_a_502_and_one_that_is_not_known_a_404(
    routers: tuple[RunningRouter, RunningRouter],
) -> None:
    one, other = routers
    rid = serve(one)
    other.peers["one"] = "http://127.0.0.1:9"  # nothing listens there
    answer = ask(other, rid)
    assert answer.status_code == 502
    assert answer.json()["error"]["message"] == "the router that served it gives no answer"
    del other.peers["one"]
    assert ask(other, rid).status_code == 404


def test_a_peer_that_is_silent_is_a_502(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many ask: those who wait for a connection wait no longer."""
    monkeypatch.setattr(router_peers, "ANSWER_SECONDS_MAX", 0.2)
    with (
        RunningRouter(model_folder, uid="other") as other,
        socket.create_server(("127.0.0.1", 0)) as silent,
        ThreadPoolExecutor(2 * CONNECTIONS_MAX) as askers,
    ):
        other.peers["one"] = f"http://127.0.0.1:{silent.getsockname()[1]}"
        rid = router_peers._prefix("one") + "0" * 16
        answers = list(askers.map(lambda _: ask(other, rid), range(2 * CONNECTIONS_MAX)))
        assert [answer.status_code for answer in answers] == [502] * len(answers)
