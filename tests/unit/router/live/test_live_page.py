"""The live page as it is served: to whom, with which rights, how large; and who may kill a worker."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path

import httpx2
import pytest

from router.replies import SERVED_PATHS
from shared.process.api_keys import key_line
from tests.unit.router.live.watching import watching
from tests.unit.router.scripted_workers import RunningRouter

PAGE_BYTES_MAX = 60_000
TOKEN = "a-token-of-32-characters-0123456"
BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


@pytest.fixture
def kills() -> Iterator[tuple[int, int]]:
    """A pipe: the end that `segue up` reads, and the one that a router writes."""
    reading, writing = os.pipe2(os.O_NONBLOCK)
    yield reading, writing
    os.close(reading)
    os.close(writing)


@pytest.fixture
def shown(model_folder: Path, kills: tuple[int, int], tmp_path: Path) -> Iterator[RunningRouter]:
    file = tmp_path / "token"
    file.write_text(TOKEN, encoding="utf-8")
    with RunningRouter(
        model_folder, live_page=True, kill_worker_fd=kills[1], kill_token_file=str(file)
    ) as running:
        yield running


def config_of(page: str) -> dict[str, object]:
    found = re.search(r'name="segue" content="([^"]*)"', page)
    assert found
    told: dict[str, object] = json.loads(unescape(found[1]))
    return told


def test_a_browser_gets_the_page_and_a_program_what_it_got_before(shown: RunningRouter) -> None:
    page = shown.http.get("/", headers=BROWSER)
    assert page.headers["content-type"].startswith("text/html")
    assert len(page.content) <= PAGE_BYTES_MAX
    assert config_of(page.text)["api"] is True
    assert shown.http.head("/", headers=BROWSER).headers["content-length"] == str(len(page.content))
    for headers in ({}, {"accept": "application/json"}, {"accept": "*/*"}):
        assert shown.http.get("/", headers=headers).json() == {"name": "segue", "paths": SERVED_PATHS}
    admin = httpx2.get(f"{shown.admin_url}/")
    assert admin.headers["content-type"].startswith("text/html")
    told = config_of(admin.text)
    assert (told["api"], told["kill"]) == (False, False), "on the admin port it only shows"


def test_only_the_pages_own_script_and_style_run_and_it_speaks_with_its_server_alone(
    shown: RunningRouter,
) -> None:
    for page in (shown.http.get("/", headers=BROWSER), httpx2.get(f"{shown.admin_url}/")):
        policy = page.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; ")
        assert "unsafe" not in policy
        for kind in ("script", "style"):
            (content,) = re.findall(rf"<{kind}>(.*?)</{kind}>", page.text, re.DOTALL)
            digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
            assert f"{kind}-src 'sha256-{digest}'" in policy
        assert not re.findall(r"https?://", page.text), "nothing is loaded from elsewhere"
        assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\son\w+=", page.text)


def test_without_the_setting_the_port_of_the_api_has_no_live_page(router: RunningRouter) -> None:
    assert router.http.get("/", headers=BROWSER).headers["content-type"] == "application/json"
    for path in ("/live/events", "/live/requests/x", "/live/kill", "/live/picture"):
        answer = router.http.get(path)
        assert answer.status_code == 404
        assert "admin port" in answer.json()["error"]["message"]


FOREIGN = [
    {"origin": "http://localhost:3000"},
    {"origin": "https://elsewhere.example"},
    {"origin": "null"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
]


@pytest.mark.parametrize("headers", FOREIGN, ids=str)
def test_a_page_of_another_origin_gets_nothing(shown: RunningRouter, headers: dict[str, str]) -> None:
    for url in (shown.url, shown.admin_url):
        with watching(url, **headers) as events:
            assert events.status == 403
        assert httpx2.get(f"{url}/live/requests/x", headers=headers).status_code == 403
    if "origin" in headers:
        assert "<html" not in shown.http.get("/", headers=BROWSER | headers).text
    killed = shown.http.post(
        "/live/kill", json={"worker": "decode-0"}, headers={**headers, "x-segue-live-token": TOKEN}
    )
    assert killed.status_code == 403


HOSTS = [("evil.example", 403), ("192.168.0.5:8000", 404), ("[fd00::5]", 404), ("gpu-box", 404)]


@pytest.mark.parametrize(("host", "status"), HOSTS)
def test_without_keys_no_page_reads_by_a_name_that_was_pointed_here(
    model_folder: Path, host: str, status: int
) -> None:
    """By DNS rebinding such a page counts as this server's own, and names no origin where it reads."""
    with RunningRouter(model_folder, live_page=True, host="0.0.0.0") as running:
        headers = {"host": host, "sec-fetch-site": "same-origin"}
        assert running.http.get("/live/requests/x", headers=headers).status_code == status
        with watching(running.url, **headers) as events:
            assert events.status == (403 if status == 403 else 200)


def test_a_name_that_is_allowed_reads_the_live_page(model_folder: Path) -> None:
    allowed, headers = ("llm.example",), {"host": "llm.example", "sec-fetch-site": "same-origin"}
    with RunningRouter(model_folder, live_page=True, host="0.0.0.0", allowed_hosts=allowed) as running:
        assert running.http.get("/live/requests/x", headers=headers).status_code == 404


@pytest.mark.parametrize("path", ["/live/events", "/live/picture", "/metrics"])
def test_a_link_of_another_site_leads_to_the_page_alone(shown: RunningRouter, path: str) -> None:
    """A stream in a hidden frame would hold a place of those who may watch."""
    link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert httpx2.get(f"{shown.admin_url}/", headers=link).status_code == 200
    assert httpx2.get(f"{shown.admin_url}{path}", headers=link).status_code == 403
    with watching(shown.url, **link) as events:
        assert events.status == 403


def test_no_answer_has_the_token(shown: RunningRouter) -> None:
    """Whoever is on this machine may ask for all of them; the token is in the address that `segue up` prints."""
    page = shown.http.get("/", headers=BROWSER)
    assert config_of(page.text)["kill"] is True
    answers = [page, *(httpx2.get(f"{shown.admin_url}{path}") for path in ("/", "/live/picture", "/metrics"))]
    for answer in answers:
        assert answer.status_code == 200
        assert TOKEN not in f"{answer.headers}{answer.text}"


def test_the_page_itself_may_ask_and_kills_a_worker_by_its_token(
    shown: RunningRouter, kills: tuple[int, int]
) -> None:
    def kill(body: object, sent: str = TOKEN) -> int:
        headers = {"x-segue-live-token": sent, "origin": shown.url, "sec-fetch-site": "same-origin"}
        return shown.http.post("/live/kill", json=body, headers=headers).status_code

    assert kill({"worker": "decode-0"}, "") == 403
    assert kill({"worker": "decode-0"}, TOKEN[:-1] + "~") == 403
    bodies: list[object] = [{}, [], {"worker": "decode-0\nrouter"}, {"worker": 1}, {"worker": "x" * 2000}]
    for body in bodies:
        assert kill(body) == 400
    with pytest.raises(BlockingIOError):
        os.read(kills[0], 64)
    assert kill({"worker": "decode-0"}) == 202
    assert os.read(kills[0], 64) == b"decode-0\n"


@pytest.mark.parametrize("parent", [False, True], ids=["no parent listens", "nobody has a token"])
def test_nothing_can_be_killed_where(model_folder: Path, kills: tuple[int, int], parent: bool) -> None:
    with RunningRouter(model_folder, live_page=True, kill_worker_fd=kills[1] if parent else -1) as running:
        page = running.http.get("/", headers=BROWSER).text
        assert config_of(page)["kill"] is parent
        headers = {"x-segue-live-token": ""}
        assert (
            running.http.post("/live/kill", json={"worker": "decode-0"}, headers=headers).status_code == 403
        )


def test_where_there_are_keys_the_page_asks_for_one(model_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(key_line("team", "sk-of-a-test-0123456789") + "\n", encoding="utf-8")
    with RunningRouter(model_folder, live_page=True, api_keys_file=str(file)) as running:
        assert config_of(running.http.get("/", headers=BROWSER).text)["keys"] is True
        with watching(running.url) as events:
            assert events.status == 401
        with watching(running.url, authorization="Bearer sk-of-a-test-0123456789") as events:
            events.until("fleet")
            assert "team" not in events.text
        assert running.http.get("/live/requests/x").status_code == 401
