"""What clients get when things go wrong after a request was accepted, and what the router does for clients that go."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import structlog

from shared.wire.messages import Limits
from tests.unit.router.openai.tools.agents import CITY_TEMPLATE
from tests.unit.router.raw_http import connect, post
from tests.unit.router.scripted_workers import MODEL, RunningRouter, Script
from tests.unit.router.tiny_model import CONTEXT_LEN, write_folder
from tests.waiting import comes_true, soon, until

BODY = {"model": MODEL, "prompt": "fox", "max_tokens": 100}
STREAM = BODY | {"stream": True}


def raw_post(router: RunningRouter, body: dict[str, object], *, receive_bytes: int = 0) -> socket.socket:
    """A connection on which a completion was asked for and nothing was read."""
    connection = connect(router, receive_bytes=receive_bytes)
    connection.sendall(post("/v1/completions", json.dumps(body).encode()))
    return connection


@pytest.mark.parametrize("body", [BODY, STREAM], ids=["whole", "streamed"])
@pytest.mark.parametrize("script", [Script(silent=True), Script(stalled=True)], ids=["prefill", "decode"])
def test_a_client_that_hangs_up_is_cancelled_at_its_worker_at_once(
    model_folder: Path, body: dict[str, object], script: Script
) -> None:
    with RunningRouter(model_folder) as router:
        router.workers.script = script
        connection = raw_post(router, body)
        assert comes_true(lambda: len(router.workers.prefills) == 1)
        assert not router.workers.cancelled
        connection.close()
        assert comes_true(lambda: router.workers.prefills[0].rid in router.workers.cancelled, soon(1))
        assert sum(router.core.requests_by_state.values()) == 0


def test_one_hang_up_cancels_every_prompt_of_the_request(model_folder: Path) -> None:
    with RunningRouter(model_folder) as router:
        router.workers.script = Script(silent=True)
        connection = raw_post(router, BODY | {"prompt": ["a", "b", "c"]})
        assert comes_true(lambda: len(router.workers.prefills) == 3)
        connection.close()
        assert comes_true(lambda: sum(router.core.requests_by_state.values()) == 0, soon(1))


def test_a_silent_stream_gets_comment_lines_and_goes_on(model_folder: Path) -> None:
    with RunningRouter(model_folder, keepalive_seconds=0.05) as router:
        router.workers.script = Script(stalled=True)
        with router.http.stream("POST", "/v1/completions", json=STREAM) as response:
            assert response.status_code == 200
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            assert [next(lines) for _ in range(5)] == ["", ": waiting", "", ": waiting", ""]
            router.call(router.workers.go_on)
            assert "data: [DONE]" in list(lines)


def test_a_stream_that_waits_longer_than_a_keepalive_and_is_refused_gets_the_status_not_an_event(
    model_folder: Path,
) -> None:
    with RunningRouter(model_folder, linked=False, keepalive_seconds=0.05, waiting_seconds_max=0.5) as router:
        response = router.http.post("/v1/completions", json=STREAM)
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["code"] == "no_worker"


@pytest.mark.parametrize(
    ("path", "fields", "opening"),
    [
        ("/v1/chat/completions", {"include_reasoning": False}, 'data: {"id":"chatcmpl-'),
        (
            "/v1/chat/completions",
            {"stop": ["<think>So was"], "separate_reasoning": False},
            'data: {"id":"chatcmpl-',
        ),
        ("/v1/messages", {}, "event: message_start"),
        ("/v1/responses", {"input": "hi", "stop": ["<think>So was"]}, "event: response.created"),
        ("/v1/completions", {"prompt": "hi", "stop": ["<think>So was"]}, ": waiting"),
    ],
    ids=["hidden thoughts", "a stop string", "messages", "responses", "completions"],
)
def test_a_stream_begins_with_its_first_token_though_that_shows_nothing(
    tmp_path: Path, path: str, fields: dict[str, Any], opening: str
) -> None:
    """A proxy that gives up after a minute without a byte would else end an answer with long thoughts."""
    folder = write_folder(tmp_path / "model", chat_template=CITY_TEMPLATE)
    with RunningRouter(folder, keepalive_seconds=0.05) as router:
        router.says("<think>So it is.</think>\n\nYes.", row=100)
        router.workers.script.stalled = True
        body = {"model": MODEL, "max_tokens": 100, "stream": True} | fields
        if "prompt" not in fields and "input" not in fields:
            body |= {"messages": [{"role": "user", "content": "hi"}]}
        with router.http.stream("POST", path, json=body, timeout=soon(5)) as answer:
            assert answer.status_code == 200
            lines = answer.iter_lines()
            assert next(lines).startswith(opening)
            router.call(router.workers.go_on)
            assert "Yes." in "\n".join(lines)


def test_a_failure_in_mid_stream_is_an_error_event_and_no_done(model_folder: Path) -> None:
    with (
        structlog.testing.capture_logs() as logged,
        RunningRouter(model_folder, worker_return_seconds=0.2) as router,
    ):
        router.workers.script = Script(stalled=True)
        with router.http.stream("POST", "/v1/completions", json=STREAM) as response:
            lines = response.iter_lines()
            first = json.loads(next(lines).removeprefix("data: "))
            assert first["choices"][0]["text"]
            router.call(router.workers.lose_decode)
            rest = [line for line in lines if line.startswith("data: ")]
        error = json.loads(rest[-1].removeprefix("data: "))["error"]
        assert error["code"]
        assert error["type"]
        assert "data: [DONE]" not in rest
        (line,) = (line for line in logged if line["event"] == "stream.failed")
        assert (line["log_level"], line["reason"]) == ("warning", error["message"])
        assert line["rid"] == response.headers["x-request-id"]


def test_openais_client_raises_for_an_error_event(model_folder: Path) -> None:
    with RunningRouter(model_folder, worker_return_seconds=0.2) as router:
        router.workers.script = Script(stalled=True)
        stream = router.openai.completions.create(model=MODEL, prompt="fox", stream=True)
        next(iter(stream))
        router.call(router.workers.lose_decode)
        with pytest.raises(openai.APIError):
            list(stream)


@pytest.mark.parametrize("body", [BODY, STREAM], ids=["whole", "streamed"])
def test_without_workers_the_answer_is_503_with_retry_after(
    model_folder: Path, body: dict[str, object]
) -> None:
    with RunningRouter(model_folder, linked=False, waiting_seconds_max=0.2) as router:
        response = router.http.post("/v1/completions", json=body)
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["type"] == "service_unavailable_error"


def test_a_chat_without_a_length_gets_what_the_workers_pools_hold(model_folder: Path) -> None:
    limits = Limits(CONTEXT_LEN, page_size=16, pages=CONTEXT_LEN // 32, slots=4, vocab_size=400)
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "fox"}]}
    with RunningRouter(model_folder, limits=limits) as router:
        assert router.http.post("/v1/chat/completions", json=chat).status_code == 200
        (prefill,) = router.workers.prefills
        assert prefill.prompt_len + prefill.params.max_new_tokens == CONTEXT_LEN // 2


def test_a_time_limit_of_the_request_is_a_504(model_folder: Path) -> None:
    with RunningRouter(model_folder, request_seconds_max=0.2) as router:
        router.workers.script = Script(silent=True)
        response = router.http.post("/v1/completions", json=BODY)
        assert response.status_code == 504
        assert response.json()["error"]["type"] == "timeout_error"


def test_more_than_the_queue_holds_gets_429_and_no_request_hangs(model_folder: Path) -> None:
    with RunningRouter(
        model_folder, max_queued_requests=10, ready_max=1, waiting_seconds_max=0.2, request_seconds_max=2.0
    ) as router:
        router.workers.script = Script(silent=True)
        limits = httpx2.Limits(max_connections=60)
        with httpx2.Client(limits=limits, timeout=20) as client, ThreadPoolExecutor(60) as threads:
            url = f"{router.url}/v1/completions"
            answers = list(threads.map(lambda _: client.post(url, json=BODY), range(60)))
        statuses = [answer.status_code for answer in answers]
        assert set(statuses) == {429, 503, 504}
        assert statuses.count(503) >= 10
        assert all(answer.headers["retry-after"] for answer in answers if answer.status_code != 504)


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def test_a_template_that_does_not_end_costs_its_client_the_answer_and_nobody_else_a_thread(
    tmp_path: Path,
) -> None:
    folder = write_folder(
        tmp_path / MODEL, chat_template="{% if messages|length == 2 %}" + ENDLESS + "{% endif %}fox"
    )
    user = {"role": "user", "content": "fox"}
    with RunningRouter(folder, tokenizer_threads=1, template_seconds_max=0.2) as router:
        url = f"{router.url}/v1/chat/completions"
        for _ in range(2):
            refused = router.http.post(url, json={"model": MODEL, "messages": [user, user]})
            assert refused.status_code == 400
            assert "does not end" in refused.json()["error"]["message"]
        assert router.http.post(url, json={"model": MODEL, "messages": [user]}).status_code == 200


def test_more_prompts_than_may_wait_for_the_tokenizer_get_429(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / MODEL, chat_template=ENDLESS)
    body = {"model": MODEL, "messages": [{"role": "user", "content": "fox"}]}
    with (
        RunningRouter(folder, tokenizer_threads=1, tokenizing_max=1, template_seconds_max=1.0) as router,
        ThreadPoolExecutor(8) as threads,
    ):
        url = f"{router.url}/v1/chat/completions"
        answers = list(threads.map(lambda _: router.http.post(url, json=body), range(8)))
    refused = [answer for answer in answers if answer.status_code == 429]
    assert refused
    assert refused[0].json()["error"]["type"] == "rate_limit_error"
    assert refused[0].headers["retry-after"]
    assert {answer.status_code for answer in answers} == {400, 429}


def test_a_client_that_does_not_read_its_stream_is_cut(model_folder: Path) -> None:
    with RunningRouter(model_folder, stream_backlog_bytes=20_000, send_bytes=4096) as router:
        router.workers.script = Script(endless=True)
        body = STREAM | {"prompt": ["fox"] * 60, "max_tokens": 250}
        with raw_post(router, body, receive_bytes=4096) as connection:
            assert comes_true(lambda: len(router.workers.cancelled) > 0)
            assert comes_true(lambda: sum(router.core.requests_by_state.values()) == 0)
            connection.settimeout(10)
            received = b"".join(iter(lambda: connection.recv(1 << 16), b""))
            assert b"[DONE]" not in received
            assert not received.endswith(b"0\r\n\r\n")  # how a whole chunked answer ends


def test_a_client_that_reads_gets_all_of_a_stream_far_above_the_backlog(model_folder: Path) -> None:
    backlog_bytes = 200_000
    with RunningRouter(model_folder, stream_backlog_bytes=backlog_bytes) as router:
        router.workers.script = Script(endless=True, on_demand=True)
        body = STREAM | {"prompt": ["fox"] * 30, "max_tokens": 250}
        received = bytearray()
        with router.http.stream("POST", "/v1/completions", json=body) as response:
            for part in response.iter_bytes():
                received += part
                router.call(router.workers.step)  # what is written next waits for what was read
        assert len(received) > 5 * backlog_bytes
        assert received.endswith(b"data: [DONE]\n\n")


def test_stopping_the_router_ends_streams_with_an_error_event(model_folder: Path) -> None:
    with structlog.testing.capture_logs() as logged, RunningRouter(model_folder) as router:
        router.workers.script = Script(stalled=True)
        with router.http.stream("POST", "/v1/completions", json=STREAM) as response:
            lines = response.iter_lines()
            next(lines)
            began = time.monotonic()
            router.call(lambda: router._server.stop())
            rest = list(lines)
        assert any("shutting down" in line for line in rest)
        assert "data: [DONE]" not in rest
    assert time.monotonic() - began < soon(2)
    assert [line["log_level"] for line in logged if line["event"] == "stream.failed"] == ["info"]


def test_two_requests_on_one_connection_are_answered_in_turn(model_folder: Path) -> None:
    with RunningRouter(model_folder) as router:
        connection = http.client.HTTPConnection(router.url.removeprefix("http://"), timeout=10)
        for body in (STREAM, BODY, STREAM):
            connection.request("POST", "/v1/completions", json.dumps(body))
            response = connection.getresponse()
            assert response.status == 200
            response.read()
        connection.close()


def errors_in(lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The one error line; it may come after the answer."""
    found: list[Mapping[str, Any]] = []

    def come() -> bool:
        found[:] = [line for line in lines if line["log_level"] == "error"]
        return bool(found)

    assert comes_true(come)
    return found


def test_a_fault_of_the_router_is_a_500_in_openais_shape_and_one_line_without_the_clients_text(
    router: RunningRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a FastAPI route: there Starlette would answer in plain text."""

    def fail() -> bytes:
        raise ValueError("cannot report to marker-7f3a")

    monkeypatch.setattr(router.health, "report", fail)
    with structlog.testing.capture_logs() as lines:
        response = router.http.get("/health?marker-7f3a")
        (line,) = errors_in(lines)
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    assert response.headers["x-request-id"]
    assert (line["event"], line["error"]) == ("http.error", "ValueError")
    assert "marker" not in response.text + str(lines)


@pytest.mark.parametrize(
    "fault", [ValueError("marker"), BaseException("marker")], ids=["an error", "a panic"]
)
def test_a_fault_in_a_completion_is_a_500_too(
    router: RunningRouter, monkeypatch: pytest.MonkeyPatch, fault: BaseException
) -> None:
    """A panic of Rust code is a BaseException that is no Exception."""

    def fail(*_: object) -> None:
        raise fault

    before = router.clients.counters.refusals["500"]
    monkeypatch.setattr(router.shell, "submit", fail)
    with structlog.testing.capture_logs() as lines:
        response = router.http.post("/v1/completions", json=BODY)
        (line,) = errors_in(lines)
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    assert line["event"] == "http.error"
    assert router.clients.counters.refusals["500"] == before + 1, "which SegueErrors looks at"
    assert "marker" not in response.text + str(lines)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_cannot_be_written_is_a_500_and_counted(
    router: RunningRouter, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """To the core it is a request that its client has given up."""

    def fail(*_: object) -> None:
        raise ValueError("marker")

    before = router.clients.counters.refusals["500"]
    monkeypatch.setattr("router.openai.answers.response_stream.Choice.tokens", fail)
    response = router.http.post("/v1/completions", json=BODY | {"stream": stream})
    assert response.status_code == 500
    until(lambda: router.clients.counters.refusals["500"] == before + 1, 10, "the count")
