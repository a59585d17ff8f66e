"""What `segue doctor --live` reads, and what it says where that is not there."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import suppress

import pytest

from shared.local.bottleneck import LiveVerdict
from shared.local.cli import run
from shared.local.live_doctor import PAGE_SAMPLES_MAX, _write, addresses_of, live_doctor, samples_of
from shared.primitives.errors import DoctorError
from shared.process import gauges
from shared.process.admin_port import AdminPort
from shared.process.health import Health, probe_pages
from shared.process.metrics import Metrics


def no_sleep(_seconds: float) -> None:
    """The second scrape follows at once."""


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("http://127.0.0.1:9", "/metrics"),
        ("127.0.0.1:9/", "/metrics"),
        ("http://127.0.0.1:9/other", "/other"),
    ],
)
def test_a_url_is_that_of_an_admin_port_unless_it_says_more(url: str, path: str) -> None:
    assert addresses_of(url) == [("127.0.0.1", 9, path)]


def test_a_name_of_several_addresses_is_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    pods = [
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 8001)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.2", 8001)),
        (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fd00::1", 8001, 0, 0)),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_named: pods)
    assert [host for host, _, _ in addresses_of("http://segue-decode:8001")] == ["10.0.0.1", "10.0.0.2"]


@pytest.mark.parametrize("url", ["https://127.0.0.1:8001", "http://", "http://127.0.0.1:port"])
def test_another_url_is_refused_with_an_example(url: str) -> None:
    with pytest.raises(DoctorError, match=r"expected one like http://127\.0\.0\.1:8001"):
        addresses_of(url)


def test_a_port_at_which_nothing_listens_is_one_sentence() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        with pytest.raises(DoctorError, match=r"nothing answers at http://127\.0\.0\.1:"):
            live_doctor([f"http://127.0.0.1:{held.getsockname()[1]}"], sleep=no_sleep)


def test_a_router_without_requests_is_idle(capsys: pytest.CaptureFixture[str]) -> None:
    metrics = Metrics("router")
    metrics.set(gauges.REQUESTS_RUNNING, 0, state="waiting")
    admin = AdminPort("127.0.0.1", 0, probe_pages(Health(60.0), metrics))
    try:
        live_doctor([f"http://127.0.0.1:{admin.port}"], as_json=True, sleep=no_sleep)
    finally:
        admin.close()
    assert json.loads(capsys.readouterr().out)["cause"] == "idle"


@pytest.mark.timeout(60)
def test_a_pod_that_hangs_is_named_and_the_others_are_judged(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shared.local.live_doctor.PAGE_SECONDS_MAX", 1.0)
    metrics = Metrics("router")
    metrics.set(gauges.REQUESTS_RUNNING, 0, state="waiting")
    admin = AdminPort("127.0.0.1", 0, probe_pages(Health(60.0), metrics))
    with socket.create_server(("127.0.0.1", 0)) as hangs:  # the kernel connects, and nobody accepts
        urls = [f"http://127.0.0.1:{port}" for port in (hangs.getsockname()[1], admin.port)]
        try:
            live_doctor(urls, sleep=no_sleep)
        finally:
            admin.close()
    said = capsys.readouterr().out
    assert "reading 1 process for 10 s\nbottleneck: idle\n" in said
    assert f"left out: nothing answers at {urls[0]}/metrics (" in said


def test_workers_alone_are_asked_for_their_router() -> None:
    admin = AdminPort("127.0.0.1", 0, probe_pages(Health(60.0), Metrics("decode")))
    try:
        with pytest.raises(DoctorError, match="give the URL of a router's admin port"):
            live_doctor([f"http://127.0.0.1:{admin.port}"], sleep=no_sleep)
    finally:
        admin.close()


def test_the_flag_leads_here() -> None:
    with pytest.raises(DoctorError, match="no URL of an admin port"):
        run(["doctor", "--live", "ftp://nowhere"])


def test_samples_are_read_with_their_labels() -> None:
    (sample,) = samples_of('# TYPE segue_slots_used gauge\nsegue_slots_used{role="decode"} 3.0\n')
    assert (sample.name, dict(sample.labels), sample.value) == ("segue_slots_used", {"role": "decode"}, 3.0)


@pytest.mark.timeout(60)
def test_a_page_that_comes_a_byte_at_a_time_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.local.live_doctor.PAGE_SECONDS_MAX", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=trickle, args=(server,), daemon=True).start()
        with pytest.raises(DoctorError, match=r"no whole page within 1 seconds"):
            live_doctor([f"http://127.0.0.1:{server.getsockname()[1]}"], sleep=no_sleep)


def trickle(server: socket.socket) -> None:
    """Answer with a page without end."""
    with server.accept()[0] as connection, suppress(OSError):
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            connection.sendall(b"#")
            threading.Event().wait(0.05)


def test_a_page_without_end_is_none() -> None:
    page = "".join(f'segue_slots{{a="{number}"}} 1\n' for number in range(PAGE_SAMPLES_MAX + 1))
    with pytest.raises(ValueError, match="more than 20000 lines"):
        samples_of(page)


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf"])
def test_a_value_that_is_not_finite_counts_nothing(value: str) -> None:
    assert samples_of(f"# TYPE segue_slots gauge\nsegue_slots {value}\n") == []


def test_more_processes_than_are_read_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pods = [
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", (f"10.0.{n // 200}.{n % 200}", 8001)) for n in range(257)
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_named: pods)
    with pytest.raises(DoctorError, match="257 processes are named; expected at most 256"):
        live_doctor(["http://segue-decode:8001"], sleep=no_sleep)


def test_names_of_others_give_the_terminal_no_commands(capsys: pytest.CaptureFixture[str]) -> None:
    _write(LiveVerdict("tenant", ("key \x1b[2Jshop…",), "the line of \x9b2Jshop"))
    assert capsys.readouterr().out.splitlines()[1:] == [
        "      key \\x1b[2Jshop…",
        "turn: the line of \\x9b2Jshop",
    ]
