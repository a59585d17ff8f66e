"""What `segue doctor` finds on this machine, and on one that lacks something."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from shared.local import doctor_command
from shared.local.cli import run
from shared.local.doctor_command import doctor
from shared.primitives.errors import ConfigError, DoctorError


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_all_findings_of_this_machine_are_one_json_list(capsys: pytest.CaptureFixture[str]) -> None:
    run(["doctor", "smollm2", "--port", "0", "--json"])
    findings = {each["what"]: each for each in json.loads(capsys.readouterr().out)}
    assert findings.keys() == {
        "packages", "compiler", "processor", "GPU", "port", "cache", "KV transfer", "Hub", "memory",
    }  # fmt: skip
    assert not [each for each in findings.values() if each["state"] == "fail"]
    assert findings["KV transfer"]["found"].endswith("GB/s")
    assert "smollm2 with two workers needs" in findings["memory"]["found"]


def test_what_fails_is_said_with_its_remedy_and_in_the_end(
    capsys: pytest.CaptureFixture[str], taken_port: int
) -> None:
    with pytest.raises(DoctorError, match=r"as it is: port, model$"):
        doctor("/nowhere", taken_port)
    said = capsys.readouterr().out
    assert f"fail  port: port {taken_port} is not free" in said
    assert "segue up --port N takes another" in said
    assert "fail  model: there is no model /nowhere" in said


@contextmanager
def answers_once(handler: type[BaseHTTPRequestHandler]) -> Iterator[int]:
    """The port of a server that answers one request."""
    server = HTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.handle_request, daemon=True).start()
    yield server.server_port
    server.server_close()


class RouterOfOurs(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        """Answer as a router does at `/`."""
        self.send_response_only(200)
        self.end_headers()
        self.wfile.write(json.dumps({"name": "segue", "paths": []}).encode())


def test_a_port_at_which_segue_serves_is_not_called_lost() -> None:
    with answers_once(RouterOfOurs) as port:
        finding = doctor_command.free_port(port)
    assert (finding.state, finding.found) == ("warn", f"Segue serves at {port} already")


@pytest.mark.parametrize("port", [-1, 65_536])
def test_a_number_that_is_no_port_is_said_and_the_other_findings_follow(port: int) -> None:
    finding = doctor_command.free_port(port)
    assert (finding.state, finding.found) == ("fail", f"{port} is no port")


@pytest.mark.parametrize("url", ["http://hub:eighty", "http://[hub", "https://hub:99999"])
def test_an_address_of_the_hub_that_is_no_url_is_said(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("HF_ENDPOINT", url)
    finding = doctor_command.hub()
    assert finding.state == "warn"
    assert f"HF_ENDPOINT is {url}, which is no URL" in finding.found


def test_a_machine_without_a_compiler_is_warned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor_command.compiler().state == "warn"


def test_a_cache_that_cannot_be_kept_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    assert doctor_command.cache().state in ("fail", "warn")


class HubOfThePast(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        """Answer as in 2001."""
        self.send_response_only(200)
        self.send_header("Date", "Mon, 01 Jan 2001 00:00:00 GMT")
        self.end_headers()


def test_a_clock_that_differs_from_the_hubs_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    with answers_once(HubOfThePast) as port:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
        found = doctor_command.hub()
    assert (found.state, "apart" in found.found) == ("warn", True)


def test_the_hub_is_asked_by_way_of_the_proxy_that_downloads_take(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with answers_once(HubOfThePast) as port:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("HF_ENDPOINT", "http://hub.invalid")  # nobody but a proxy can find it
        assert "its clock and ours are" in doctor_command.hub().found


@pytest.mark.parametrize("status", [307, 401, 404])
def test_a_hub_that_wants_something_else_is_there(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    class Closed(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            """Answer with the date of today."""
            self.send_response(status)
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
            """Nothing."""

    with answers_once(Closed) as port:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
        assert doctor_command.hub().state == "ok"


def test_a_wrong_flag_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"unknown flag --jsn; did you mean --json\?"):
        run(["doctor", "--jsn"])
