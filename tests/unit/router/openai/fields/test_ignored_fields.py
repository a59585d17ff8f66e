"""What is passed over stands in a header of the answer, and in one line of the log without the client's own words."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx2
import pytest
import structlog

from router.openai.fields.ignored import CLIENT_NAMES_MAX, OWN_NAMES_MAX, Ignored, in_own_words, own_place
from router.openai.fields.spelling import GUARDED, NAMES_MAX, check_guarded, edits
from router.openai.fields.states import Endpoint
from router.replies import OverloadedError
from shared.primitives.errors import RequestError
from tests.unit.router.scripted_workers import MODEL, RunningRouter

# ---- an error names a field as the path's API does, and leaves as it is what it quotes of the client's ---------------


PLACES: dict[str, tuple[Endpoint, str, str]] = {
    "a format": ("messages", "response_format.json_schema must be", "output_config.format must be"),
    "a keyword of a format": ("responses", "response_format.not", "text.format.not"),
    "a schema": ("messages", "tools[3].function.parameters.x", "tools[3].input_schema.x"),
    "a tool": ("messages", "tools[3].function.name", "tools[3].name"),
    "a message": ("responses", "messages[0].content", "input[0].content"),
    "a longer word": ("messages", "stopwatch is", "stopwatch is"),
    "a name within": ("messages", "tools[0].stop", "tools[0].stop"),
    "a chat": ("chat", "response_format.json_schema", "response_format.json_schema"),
}


@pytest.mark.parametrize(("endpoint", "place", "own"), PLACES.values(), ids=PLACES)
def test_a_place_is_renamed_where_it_begins(endpoint: Endpoint, place: str, own: str) -> None:
    assert own_place(place, endpoint) == own


def test_what_an_error_quotes_is_the_clients() -> None:
    quoted = 'cannot be kept to: "stopwatch.function.response_format" has messages'
    error = in_own_words(RequestError(f"response_format {quoted}", param="response_format"), "messages")
    assert (str(error), error.param) == (f"output_config.format {quoted}", "output_config.format")
    error = in_own_words(RequestError("the key has no stop", param="stop"), "messages")
    assert (error.message, error.param) == ("the key has no stop", "stop_sequences")
    error = in_own_words(RequestError("messages of stop", status=404), "responses")
    assert (error.message, error.status) == ("messages of stop", 404)


def test_an_error_keeps_all_that_it_has() -> None:
    sent = OverloadedError("stop", "bytes", retry_after_seconds=31)
    sent.param = "stop"
    words: dict[Endpoint, str] = {"messages": "stop_sequences", "responses": "stop"}
    for endpoint, word in words.items():
        error = in_own_words(sent, endpoint)
        assert isinstance(error, OverloadedError)
        assert (error.status, error.retry_after_seconds, str(error), error.param) == (429, 31, word, word)
    assert (sent.message, sent.param) == ("stop", "stop"), "the error that is reworded stays as it was"


HEADER = "x-segue-ignored"
MARKER = "marker-51c9"
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
    "/v1/completions": {"prompt": "fox", "max_tokens": 4},
    "/v1/responses": {"input": "fox", "max_output_tokens": 16},
}


def ask(router: RunningRouter, path: str, **fields: Any) -> httpx2.Response:
    body = {"model": MODEL, **BODIES[path], **fields}
    return router.http.post(path, json=body)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", BODIES)
def test_an_answer_names_what_was_passed_over(router: RunningRouter, path: str, stream: bool) -> None:
    answer = ask(
        router, path, stream=stream, typical_p=0.5, plugins=[], provider={"order": ["x"]}, my_trace=1
    )
    assert answer.status_code == 200, answer.text
    assert answer.headers[HEADER] == "typical_p, provider, my_trace"


@pytest.mark.parametrize("path", BODIES)
def test_an_answer_to_a_body_that_is_served_whole_has_no_such_header(
    router: RunningRouter, path: str
) -> None:
    answer = ask(router, path, top_p=0.9, user="someone", typical_p=1, mirostat_tau=5, store=False)
    assert answer.status_code == 200, answer.text
    assert HEADER not in answer.headers


def test_the_log_has_our_names_and_counts_the_clients(model_folder: Path) -> None:
    with structlog.testing.capture_logs() as logged, RunningRouter(model_folder) as router:
        answer = ask(router, "/v1/chat/completions", **{MARKER: MARKER, "mirostat_mode": 2, "naïve": 1})
        ask(router, "/v1/chat/completions")
    assert answer.headers[HEADER] == f"mirostat_mode, {MARKER}, and 1 more"
    lines = [line for line in logged if line["event"] == "request.ignored"]
    said = {"event": "request.ignored", "log_level": "info", "rid": answer.headers["x-request-id"]}
    assert lines == [said | {"names": ["mirostat_mode"], "others": 2}]
    assert MARKER not in str(logged)


def test_a_refusal_has_no_header_of_a_clients_words(router: RunningRouter) -> None:
    answer = ask(router, "/v1/completions", **{MARKER: 1, "typical_p": 0.5, "n": 0})
    assert answer.status_code == 400
    assert HEADER not in answer.headers


def test_no_name_can_end_the_line_or_make_the_head_large(router: RunningRouter) -> None:
    names = ["a\r\nset-cookie: x=1", "", "x" * 65, "é", *(f"{'n' * 60}{at}" for at in range(NAMES_MAX + 9))]
    answer = ask(router, "/v1/completions", **dict.fromkeys(names, 1))
    assert answer.status_code == 200
    assert "set-cookie" not in answer.headers
    said = answer.headers[HEADER].split(", ")
    assert said == [*names[4 : 4 + CLIENT_NAMES_MAX], f"and {len(names) - CLIENT_NAMES_MAX} more"]


def test_the_header_is_bounded_whatever_a_request_asks_for() -> None:
    ignored = Ignored()
    for at in range(1000):
        ignored.own(f"{'o' * 60}{at}")
        ignored.client(f"{'c' * 60}{at}")
        ignored.client(f"{'c' * 60}0")
    ((_, value),) = ignored.headers
    assert len(value) < 66 * (OWN_NAMES_MAX + CLIENT_NAMES_MAX) + 16 < 3000
    assert value.endswith(b"and 1960 more")


def test_comparing_names_is_bounded_whatever_they_are() -> None:
    # Names as near to guarded ones as can be without being a slip: each of them is compared letter by letter.
    hostile = [f"frequency_{at:04}penalty"[:17] for at in range(10_000)]
    began = time.process_time()
    check_guarded(hostile, GUARDED)
    few = time.process_time() - began
    began = time.process_time()
    for name in hostile[:NAMES_MAX]:
        for known in GUARDED:
            edits(name, known)
    all_letters = time.process_time() - began
    assert few < 2 * all_letters, "of 10,000 names no more than 64 are compared"
