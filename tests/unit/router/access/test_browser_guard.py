"""What a web page may send to a router that its reader's browser can reach, and that programs notice nothing."""

from __future__ import annotations

import json
from pathlib import Path

import httpx2
import pytest

from router.access.browser_guard import RATE_HEADERS
from router.config import RouterConfig
from shared.primitives.errors import ConfigError
from shared.process.settings import load
from tests.unit.router.raw_http import answered
from tests.unit.router.scripted_workers import MODEL, RunningRouter

BODY = json.dumps({"model": MODEL, "prompt": "fox"})


@pytest.fixture
def client(router: RunningRouter) -> httpx2.Client:
    return router.http


def ask(client: httpx2.Client, **headers: str) -> httpx2.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return client.post("/v1/completions", content=BODY, headers=named)


def refused(response: httpx2.Response, status: int) -> bool:
    assert (
        set(response.json()["error"]) == {"message", "type", "param", "code"} or response.status_code == 200
    )
    assert response.headers["x-request-id"]
    return response.status_code == status


FOREIGN = [
    "text/plain",
    "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=x",
    "text/json",
    "",
]
JSON = ["application/json", "application/json; charset=utf-8", "Application/JSON", "application/vnd.api+json"]


@pytest.mark.parametrize("content_type", FOREIGN)
def test_a_body_that_a_page_may_post_without_asking_is_a_415(
    client: httpx2.Client, router: RunningRouter, content_type: str
) -> None:
    heard = len(router.workers.prefills)
    assert refused(ask(client, content_type=content_type), 415)
    assert len(router.workers.prefills) == heard


def test_a_page_without_an_origin_of_its_own_is_a_403_where_no_host_is_named(router: RunningRouter) -> None:
    lines = ["POST /v1/completions HTTP/1.0", "origin: null", f"content-length: {len(BODY)}", "", BODY]
    (answer,) = answered(router, "\r\n".join(lines).encode())
    assert answer.status == 403


@pytest.mark.parametrize("content_type", JSON)
def test_json_is_served_however_it_is_written(client: httpx2.Client, content_type: str) -> None:
    assert ask(client, content_type=content_type).status_code == 200


def test_programs_are_served_without_any_setting(client: httpx2.Client, router: RunningRouter) -> None:
    assert "content-type" not in client.build_request("POST", "/", content=BODY).headers
    assert ask(client).status_code == 200
    assert router.openai.completions.create(model=MODEL, prompt="fox").choices


@pytest.mark.parametrize(
    "origin",
    ["https://evil.example", "null", "http://localhost.evil", "app.evil://x", "file://", "x", "http://[", ""],
)
def test_a_page_of_another_origin_is_a_403(client: httpx2.Client, router: RunningRouter, origin: str) -> None:
    heard = len(router.workers.prefills)
    assert refused(ask(client, origin=origin), 403)
    assert refused(ask(client, origin=origin, content_type="application/json"), 403)
    assert len(router.workers.prefills) == heard


def test_a_page_of_the_routers_own_origin_is_served(client: httpx2.Client, router: RunningRouter) -> None:
    assert ask(client, origin=router.url).status_code == 200
    assert ask(client, origin="https://localhost", host="localhost").status_code == 200
    assert ask(client, origin="http://localhost", host="localhost:80").status_code == 200


@pytest.mark.parametrize(
    "origin",
    [
        "http://localhost:3000",
        "http://127.0.0.1:1",
        "https://[::1]:8443",
        "http://tauri.localhost",
        "app://obsidian.md",
        "tauri://localhost",
        "vscode-webview://1abc",
    ],
)
def test_on_loopback_pages_and_apps_of_the_same_machine_are_served_and_can_read(
    client: httpx2.Client, origin: str
) -> None:
    answer = ask(client, origin=origin, content_type="application/json")
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == origin
    asks = {"origin": origin, "access-control-request-method": "POST"}
    assert client.options("/v1/completions", headers=asks).status_code == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("evil.example:8000", 403),
        ("api.example.com", 403),
        ("192.168.1.5:8000", 200),
        ("[fd00::5]:8000", 200),
        ("gpu-box:8000", 200),
        ("gpu.local:8000", 200),
        ("gpu.lan", 200),
        ("segue.prod.svc", 200),
    ],
)
def test_without_keys_a_page_whose_name_may_have_been_pointed_here_is_refused(
    model_folder: Path, host: str, status: int
) -> None:
    with RunningRouter(model_folder, host="0.0.0.0") as router:
        client = router.http
        assert ask(client, host=host, origin=f"http://{host}").status_code == status
        assert ask(client, host=host).status_code == 200, "programs may use any name"
        assert ask(client, host=host, origin=f"https://{host}").status_code == 200, (
            "no page can have its certificate"
        )
        assert ask(client, host=host, origin="http://localhost:3000").status_code == 403


def test_a_proxy_that_replaces_the_host_keeps_no_page_out(client: httpx2.Client) -> None:
    assert ask(client, origin="https://chat.example.com", sec_fetch_site="same-origin").status_code == 200
    assert refused(ask(client, origin="https://chat.example.com", sec_fetch_site="same-site"), 403)


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "x", "localhost.evil"]
)
def test_on_loopback_a_name_of_public_dns_is_not_served(client: httpx2.Client, host: str) -> None:
    """Otherwise a page whose name is pointed at 127.0.0.1 would be of the router's own origin."""
    assert refused(ask(client, host=host, origin=f"http://{host}"), 403)
    assert refused(client.get("/v1/models", headers={"host": host}), 403)


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LocalHost:8000",
        "127.0.0.1:9",
        "[::1]:8000",
        "10.1.2.3",
        "host.docker.internal",
        "a.localhost",
    ],
)
def test_on_loopback_addresses_and_private_names_are_served(client: httpx2.Client, host: str) -> None:
    assert ask(client, host=host).status_code == 200


def test_allowed_hosts_are_served_and_no_others(model_folder: Path) -> None:
    with RunningRouter(model_folder, allowed_hosts=("api.example.com",)) as router:
        for host, status in {
            "api.example.com": 200,
            "API.example.com:443": 200,
            "a.local": 403,
            "10.0.0.1": 200,
        }.items():
            assert router.http.get("/health", headers={"host": host}).status_code == status


@pytest.mark.parametrize(
    ("flag", "value", "expected"),
    [
        ("--allowed-origins", "https://chat.example.com/", "origins such as https://chat.example.com"),
        ("--allowed-origins", "chat.example.com", "origins such as https://chat.example.com"),
        ("--allowed-origins", "https://Chat.example.com", "in lower case and without a path"),
        ("--allowed-origins", "null", "origins such as https://chat.example.com"),
        ("--allowed-hosts", "api.example.com:443", "names such as api.example.com"),
        ("--allowed-hosts", "https://api.example.com", "without scheme or port"),
        ("--allowed-hosts", "*", "names such as api.example.com"),
    ],
)
def test_what_would_never_match_is_refused_at_the_start(flag: str, value: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(RouterConfig, [f"{flag}={value}"], {})
    assert str(caught.value).startswith(f"{flag} should be ")
    assert expected in str(caught.value)


def test_origins_with_a_port_or_for_all_are_settings() -> None:
    origins = "https://chat.example.com:8443,http://[::1]:3000,chrome-extension://abc,*"
    config = load(RouterConfig, [f"--allowed-origins={origins}", "--allowed-hosts=API.example.com,api"], {})
    assert config.allowed_origins == tuple(origins.split(","))


def test_a_router_that_listens_on_all_addresses_is_served_by_any_name(model_folder: Path) -> None:
    with RunningRouter(model_folder, host="0.0.0.0") as router:
        assert router.http.get("/health", headers={"host": "segue.prod.svc"}).status_code == 200


def test_a_page_of_an_allowed_origin_can_ask_first_and_read_the_answer(model_folder: Path) -> None:
    page = "https://chat.example.com"
    with RunningRouter(model_folder, allowed_origins=(page,)) as router:
        client = router.http
        asks = {
            "origin": page,
            "access-control-request-method": "POST",
            "access-control-request-headers": "content-type",
            "access-control-request-private-network": "true",
        }
        answer = client.options("/v1/completions", headers=asks)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == page
        assert answer.headers["access-control-allow-private-network"] == "true"
        answer = ask(client, origin=page, content_type="application/json")
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == page
        assert set(answer.headers["access-control-expose-headers"].split(", ")) == {
            "x-request-id",
            "x-segue-request-id",
            "x-segue-ignored",
            "retry-after",
            *RATE_HEADERS,
        }
        answer = ask(client, origin=page, content_type="text/plain")
        assert refused(answer, 415)
        assert answer.headers["access-control-allow-origin"] == page
        assert refused(ask(client, origin="https://evil.example"), 403)
        answer = client.options("/v1/completions", headers=asks | {"origin": "https://evil.example"})
        assert refused(answer, 403)
        assert "access-control-allow-origin" not in answer.headers
    with RunningRouter(model_folder, allowed_origins=("*",)) as router:
        assert ask(router.http, origin="https://any.example").headers["access-control-allow-origin"] == "*"
