"""The smoke test passes only for a whole stream and KV that moved; against a router of a few lines."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from shared.local.smoke_test import smoke_test
from shared.primitives.errors import SmokeTestError


def chunk(text: str, finish_reason: str | None = None) -> str:
    return json.dumps({"choices": [{"delta": {"content": text}, "finish_reason": finish_reason}]})


WHOLE = [chunk("Rayleigh"), chunk(" scattering", "stop"), "[DONE]"]
BROKEN = [chunk("Rayleigh"), json.dumps({"error": {"message": "the worker is lost"}})]


def record(roles: tuple[str, ...], fetched_bytes: int, link_bytes_per_second: int) -> dict[str, object]:
    """What a router tells of a request that went to a worker of each role."""
    return {
        "fetched_bytes": fetched_bytes if "prefill" in roles else 0,
        "fetch_milliseconds": 2.0,
        "transport": "tcp/eth0",
        "link_bytes_per_second": link_bytes_per_second,
        "workers": [{"role": role, "worker": role[0]} for role in roles],
    }


@contextlib.contextmanager
def router(
    events: list[str],
    fetched_bytes: int,
    link_bytes_per_second: int = 2_500_000_000,
    clients: set[object] | None = None,
    api_key: str = "",
    roles: tuple[str, ...] = ("prefill", "decode"),
) -> Iterator[str]:
    """The URL of a router with these streams; it writes the addresses of its clients into `clients`. With `api_key` it
    asks for that, but not where it tells of requests. Prompts go to prefill workers only where a header asks for it.
    """
    answers = {
        "/v1/models": {"data": [{"id": "tiny"}]},
        "/debug/requests/r1": record(roles, fetched_bytes, link_bytes_per_second),
    }

    class ScriptedHandler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self.path in answers:
                self.answer(json.dumps(answers[self.path]))
            else:
                self.answer("not here", 404)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            if "prefill" in roles and self.headers["X-Segue-Local-Prefill"] != "never":
                answers["/debug/requests/r1"] = record(("decode",), 0, 0)
            self.answer("".join(f"data: {event}\n\n" for event in events))

        def answer(self, body: str, status: int = 200) -> None:
            wanted = f"Bearer {api_key}" if api_key and "/debug/" not in self.path else None
            if self.headers["Authorization"] != wanted:
                body, status = "no such key", 401
            if clients is not None:
                clients.add(self.client_address)
            self.send_response(status)
            self.send_header("x-segue-request-id", "r1")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
            """Nothing: pytest would show it."""

    with ThreadingHTTPServer(("127.0.0.1", 0), ScriptedHandler) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            serving.join()


def test_a_whole_stream_whose_kv_moved_passes() -> None:
    with router(WHOLE, 4_000_000) as url:
        assert smoke_test(url, url) == [
            "tiny streamed 2 pieces of text and ended properly",
            "request r1 went to prefill p, then decode d",
            "4000000 bytes of KV moved for it in 2.0 ms: the link gave 2000 MB/s",
            "by its last fetches it carries 2500 MB/s over tcp/eth0",
        ]


def test_without_prefill_workers_a_request_that_decode_served_alone_passes() -> None:
    with router(WHOLE, 0, roles=("decode",)) as url:
        assert smoke_test(url, url, aggregated=True)[1:] == [
            "request r1 went to decode d, which computed its prompt, too"
        ]
        said = "no KV moved for request r1: it went to decode d, which computed its prompt, too"
        with pytest.raises(SmokeTestError, match=said):
            smoke_test(url, url)
    with router(WHOLE, 0, roles=()) as url, pytest.raises(SmokeTestError, match="it went to no worker"):
        smoke_test(url, url, aggregated=True)


def test_a_link_that_is_not_measured_yet_passes() -> None:
    with router(WHOLE, 4_000_000, link_bytes_per_second=0) as url:
        assert smoke_test(url, url)[-1] == "the link has not been measured yet"


@pytest.mark.parametrize(
    ("events", "fetched_bytes", "message"),
    [
        (WHOLE, 0, "no KV moved for request r1: it went to prefill p, decode d"),
        (WHOLE[:-1], 4096, "not \\[DONE\\]"),
        ([chunk("Rayleigh"), "[DONE]"], 4096, "1 pieces ended with \\[\\]"),
        (["[DONE]"], 4096, "a stream of 0 pieces"),
        (BROKEN, 4096, "broke off.*the worker is lost"),
    ],
)
def test_less_than_that_fails(events: list[str], fetched_bytes: int, message: str) -> None:
    with router(events, fetched_bytes) as url, pytest.raises(SmokeTestError, match=message):
        smoke_test(url, url)


def test_an_error_status_is_one_sentence_with_the_answer() -> None:
    with (
        router(WHOLE, 4096) as url,
        pytest.raises(SmokeTestError, match=r"/v1/models answered 404: not here"),
    ):
        smoke_test(f"{url}/elsewhere", url)


def test_all_requests_use_one_connection() -> None:
    clients: set[object] = set()
    with router(WHOLE, 4096, clients=clients) as url:
        smoke_test(url, url)
    assert len(clients) == 1


def test_nobody_there_is_one_sentence() -> None:
    with router(WHOLE, 1) as url:
        pass
    with pytest.raises(SmokeTestError, match="gave no answer"):
        smoke_test(url, url)


def test_the_key_is_sent_to_the_front_door_and_not_to_the_admin_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-segue-test")
    with router(WHOLE, 4096, api_key="sk-segue-test") as url:
        assert smoke_test(url, url)
    with (
        router(WHOLE, 4096, api_key="another") as url,
        pytest.raises(SmokeTestError, match="OPENAI_API_KEY was refused"),
    ):
        smoke_test(url, url)
    monkeypatch.delenv("OPENAI_API_KEY")
    with (
        router(WHOLE, 4096, api_key="another") as url,
        pytest.raises(SmokeTestError, match="OPENAI_API_KEY is not set"),
    ):
        smoke_test(url, url)
