"""The one line of a request in the log, and the counts of HTTP answers."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from router.openai.request_log import HttpCounters
from shared.process import logs
from shared.process.api_keys import key_line
from tests.unit.router.scripted_workers import MODEL, RunningRouter, Script
from tests.waiting import until

BODY = {"model": MODEL, "prompt": "fox", "max_tokens": 8}
SHOP = "sk-segue-shop-0000000000"
CONTENT = "a-secret-of-the-client"


class LogReader:
    """What this process has written to its log as JSON lines."""

    def __init__(self, stream: io.StringIO):
        self._stream = stream

    @property
    def text(self) -> str:
        logs.flush()
        return self._stream.getvalue()

    def lines(self, event: str) -> list[dict[str, Any]]:
        return [line for each in self.text.splitlines() if (line := json.loads(each))["event"] == event]

    def line(self, event: str = "request.answered") -> dict[str, Any]:
        """The one line of this event, once it is there."""
        until(lambda: self.lines(event), 10, f"a line {event}")
        (line,) = self.lines(event)
        return line


@pytest.fixture
def log(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[LogReader]:
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    logs.configure(getattr(request, "param", "info"), "json", role="router", uid="r")
    yield LogReader(stream)
    root.handlers, root.level = handlers, level


def test_an_answer_is_one_line_with_all_its_ids_and_where_its_time_went(
    router: RunningRouter, log: LogReader
) -> None:
    headers = {"x-request-id": "trace-1:a.b_c"}
    answer = router.http.post("/v1/completions", json=BODY | {"prompt": CONTENT}, headers=headers)
    line, usage = log.line(), answer.json()["usage"]
    assert (line["rid"], line["client_id"]) == (answer.headers["x-segue-request-id"], "trace-1:a.b_c")
    assert (line["path"], line["status"], line["outcome"]) == ("/v1/completions", 200, "length")
    assert (line["prompt_tokens"], line["completion_tokens"]) == (
        usage["prompt_tokens"],
        usage["completion_tokens"],
    )
    assert ([name[0] for name in line["workers"]], line["attempts"], line["migrations"]) == (["p", "d"], 1, 0)
    stages = line["stage_milliseconds"]
    assert {"body", "tokenizing", "waiting", "prefilling", "ready", "decoding"} <= stages.keys()
    assert sum(stages.values()) <= line["milliseconds"] + 1.0
    assert 0 <= line["first_token_milliseconds"] <= line["milliseconds"] + 1.0
    assert CONTENT not in log.text
    assert log.lines("request.state") == []


def test_choices_of_one_request_are_one_line(router: RunningRouter, log: LogReader) -> None:
    answer = router.http.post("/v1/completions", json=BODY | {"n": 3})
    line, usage = log.line(), answer.json()["usage"]
    assert (line["choices"], line["completion_tokens"]) == (3, usage["completion_tokens"])
    assert line["prompt_tokens"] == usage["prompt_tokens"]


@pytest.mark.parametrize("given", ["x" * 129, "two words", 'quoted"'])
def test_an_id_that_is_no_plain_word_is_not_repeated(
    router: RunningRouter, log: LogReader, given: str
) -> None:
    router.http.post("/v1/completions", json=BODY, headers={"x-request-id": given})
    assert "client_id" not in log.line()


def test_what_is_refused_has_a_line_with_its_code(router: RunningRouter, log: LogReader) -> None:
    router.http.post("/v1/completions", json=BODY | {"model": "another"})
    line = log.line()
    assert (line["status"], line["code"]) == (404, "model_not_found")
    assert "workers" not in line


def test_a_client_that_hangs_up_has_a_line(router: RunningRouter, log: LogReader) -> None:
    router.workers.script = Script(endless=True, on_demand=True)
    with router.http.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as stream:
        next(stream.iter_lines())
    line = log.line()
    assert (line["status"], line["outcome"], line["completion_tokens"]) == (200, "aborted", 1)


def test_a_line_names_the_key_and_a_stranger_has_none(
    model_folder: Path, tmp_path: Path, log: LogReader
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{key_line('shop', SHOP)}\n")
    with RunningRouter(model_folder, api_keys_file=str(keys)) as running:
        for key, status in ((f"{SHOP}x", 401), (SHOP, 200)):
            headers = {"authorization": f"Bearer {key}"}
            assert running.http.post("/v1/completions", json=BODY, headers=headers).status_code == status
        line = log.line()
    assert (line["key_name"], line["status"]) == ("shop", 200)
    assert SHOP not in log.text


def test_strangers_write_no_line_whichever_layer_answers_them(
    model_folder: Path, tmp_path: Path, log: LogReader
) -> None:
    page, stranger = "https://page.example", {"x-request-id": "written-by-a-stranger"}
    asks = stranger | {"origin": page, "access-control-request-method": "POST"}
    keys = tmp_path / "keys"
    keys.write_text(f"{key_line('shop', SHOP)}\n")
    with RunningRouter(model_folder, api_keys_file=str(keys), allowed_origins=[page]) as running:
        for method, headers, status in (
            ("POST", stranger, 401),
            ("POST", stranger | {"origin": "https://another.example"}, 403),
            ("POST", stranger | {"content-type": "text/plain"}, 415),
            ("OPTIONS", asks, 200),
        ):
            answer = running.http.request(method, "/v1/completions", json=BODY, headers=headers)
            assert answer.status_code == status
        running.http.post("/v1/completions", json=BODY, headers={"authorization": f"Bearer {SHOP}"})
        assert log.line()["key_name"] == "shop"
    assert "stranger" not in log.text


@pytest.mark.parametrize(
    ("setting", "status", "code"),
    [
        ("rpm=1", 429, "key_rpm"),
        ("tpm=40", 429, "key_tpm"),
        ("models=another", 403, "model_not_allowed"),
    ],
)
def test_what_a_key_is_refused_has_a_line_with_its_name_and_the_limit(
    setting: str, status: int, code: str, model_folder: Path, tmp_path: Path, log: LogReader
) -> None:
    """A limit has the word that it has in segue_rejections_total; the answer says the same of all."""
    keys = tmp_path / "keys"
    keys.write_text(f"{key_line('shop', SHOP, setting)}\n")
    with RunningRouter(model_folder, api_keys_file=str(keys)) as running:
        for _ in range(2):
            body = BODY | {"max_tokens": 30}
            running.http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {SHOP}"})
        until(lambda: len(log.lines("request.answered")) == 2, 10, "both lines")
        last = log.lines("request.answered")[-1]
    assert (last["status"], last["key_name"], last["code"]) == (status, "shop", code)


@pytest.mark.parametrize("given", [SHOP, f"trace:{SHOP}"])
def test_an_id_that_may_be_a_key_is_left_out(router: RunningRouter, log: LogReader, given: str) -> None:
    router.http.post("/v1/completions", json=BODY, headers={"x-request-id": given})
    assert "client_id" not in log.line()
    assert SHOP not in log.text


@pytest.mark.parametrize("log", ["debug"], indirect=True)
def test_each_step_of_a_request_is_a_line_at_debug(router: RunningRouter, log: LogReader) -> None:
    answer = router.http.post("/v1/completions", json=BODY)
    rid = answer.headers["x-segue-request-id"]
    log.line()
    steps = [line["to"] for line in log.lines("request.state") if line["rid"] == rid]
    assert steps == ["prefilling", "ready", "decoding", "finished"]


def test_http_answers_are_counted_by_path_and_status_and_unknown_paths_together(
    router: RunningRouter,
) -> None:
    def shown() -> str:
        return router.http.get(f"{router.admin_url}/metrics").text

    router.http.post("/v1/completions", json=BODY)
    router.http.get("/a/path/of/the/client")
    router.http.get("/another")
    until(lambda: 'path="other"' in shown(), 10, "the count")
    text = shown()
    assert "/a/path" not in text
    assert 'segue_http_responses_total{path="/v1/completions",role="router",status="200"}' in text


def test_the_series_of_http_answers_are_bounded() -> None:
    counters = HttpCounters()
    for number in range(1000):
        counters.answered(f"/{number}", 404)
    assert counters.responses["other", "404"] == 1000
    assert len(counters.responses) == len(HttpCounters().responses) + 1
