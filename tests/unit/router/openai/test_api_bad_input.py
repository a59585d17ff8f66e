"""What a client may send wrongly, and that each gets a clear error in OpenAI's shape and no worker hears of it."""

from __future__ import annotations

import gzip
import http.client
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.unit.router.scripted_workers import MODEL, RunningRouter
from tests.unit.router.tiny_model import CONTEXT_LEN

MARKER = "marker-7f3a"
USER = [{"role": "user", "content": "hi"}]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def completion(**fields: Any) -> tuple[str, bytes]:
    return COMPLETIONS, json.dumps({"model": MODEL, "prompt": "fox"} | fields).encode()


def chat(**fields: Any) -> tuple[str, bytes]:
    return CHAT, json.dumps({"model": MODEL, "messages": USER} | fields).encode()


def message(content: Any, role: Any = "user", **fields: Any) -> tuple[str, bytes]:
    return chat(messages=[{"role": role, "content": content} | fields])


BAD: dict[str, tuple[tuple[str, bytes], int, str | None]] = {
    "no body": ((CHAT, b""), 400, None),
    "not JSON": ((CHAT, b"{model: tiny}"), 400, None),
    "half a JSON object": ((CHAT, b'{"model": "ti'), 400, None),
    "a JSON list": ((CHAT, b"[1]"), 400, None),
    "not UTF-8": ((COMPLETIONS, b'{"model": "tiny", "prompt": "\xff"}'), 400, None),
    "nested 5,000 deep": ((CHAT, b'{"a":' + b"[" * 5000 + b"]" * 5000 + b"}"), 400, None),
    "nested 500 deep in messages": (chat(messages=[json.loads("[" * 500 + "]" * 500)]), 400, "messages[0]"),
    "an unpaired surrogate": ((COMPLETIONS, b'{"model": "tiny", "prompt": "\\ud800"}'), 400, None),
    "a surrogate pair the wrong way round": (
        (COMPLETIONS, b'{"model": "tiny", "prompt": "\\udc00\\ud800"}'),
        400,
        None,
    ),
    "NaN": ((COMPLETIONS, b'{"model": "tiny", "prompt": "a", "temperature": NaN}'), 400, None),
    "Infinity": ((COMPLETIONS, b'{"model": "tiny", "prompt": "a", "top_p": Infinity}'), 400, None),
    "a number beyond all floats": (
        (COMPLETIONS, b'{"model": "tiny", "prompt": "a", "top_p": 1e999}'),
        400,
        "top_p",
    ),
    "an unknown model": (chat(model=MARKER), 404, "model"),
    "a model that is a number": (chat(model=3), 400, "model"),
    "no prompt": ((COMPLETIONS, b'{"model": "tiny"}'), 400, "prompt"),
    "an empty prompt": (completion(prompt=""), 400, "prompt"),
    "an empty list of prompts": (completion(prompt=[]), 400, "prompt"),
    "an empty list of token ids in a list": (completion(prompt=[[]]), 400, "prompt"),
    "one empty prompt of two": (completion(prompt=["a", ""]), 400, "prompt"),
    "a prompt that is null": (completion(prompt=None), 400, "prompt"),
    "a prompt that is an object": (completion(prompt={"a": 1}), 400, "prompt"),
    "text and token ids mixed": (completion(prompt=["a", 1]), 400, "prompt"),
    "token ids and text mixed": (completion(prompt=[1, "a"]), 400, "prompt"),
    "token ids nested too deep": (completion(prompt=[[[1]]]), 400, "prompt"),
    "a negative token id": (completion(prompt=[-1]), 400, "prompt"),
    "a token id beyond the vocabulary": (completion(prompt=[1_000_000]), 400, "prompt"),
    "a token id beyond 64 bits": (completion(prompt=[2**70]), 400, "prompt"),
    "a token id that is true": (completion(prompt=[True]), 400, "prompt"),
    "a token id that is a fraction": (completion(prompt=[1.5]), 400, "prompt"),
    "too many prompts": (completion(prompt=["a"] * 129), 400, "prompt"),
    "a prompt longer than the context": (completion(prompt="🙂x" * CONTEXT_LEN), 400, "prompt"),
    "a prompt far longer than the context": (completion(prompt="x" * 1_000_000), 400, "prompt"),
    "token ids that fill the context": (completion(prompt=[5] * CONTEXT_LEN), 400, "prompt"),
    "a chat longer than the context": (message("🙂x" * CONTEXT_LEN), 400, "messages"),
    "no messages": ((CHAT, b'{"model": "tiny"}'), 400, "messages"),
    "empty messages": (chat(messages=[]), 400, "messages"),
    "messages that are text": (chat(messages="hi"), 400, "messages"),
    "a message that is text": (chat(messages=["hi"]), 400, "messages[0]"),
    "an unknown role": (message("hi", role=MARKER), 400, "messages[0].role"),
    "a role that is a list": (message("hi", role=[]), 400, "messages[0].role"),
    "no content": (message(None), 400, "messages[0].content"),
    "content that is a number": (message(5), 400, "messages[0].content"),
    "an image": (message([{"type": "image_url", "image_url": {"url": "x"}}]), 400, "messages[0].content[0]"),
    "a text part without text": (message([{"type": "text"}]), 400, "messages[0].content[0].text"),
    "a tool call in a message": (
        message("", tool_calls=[{"id": "1"}]),
        400,
        "messages[0].tool_calls[0].function",
    ),
    "messages that the template refuses": (message(MARKER, role="tool"), 400, "messages"),
    "max_tokens 0": (chat(max_tokens=0), 400, "max_tokens"),
    "max_tokens -1": (completion(max_tokens=-1), 400, "max_tokens"),
    "max_completion_tokens 0": (chat(max_completion_tokens=0), 400, "max_completion_tokens"),
    "max_tokens that is text": (chat(max_tokens="5"), 400, "max_tokens"),
    "max_tokens that is a fraction": (chat(max_tokens=1.5), 400, "max_tokens"),
    "max_tokens beyond 64 bits": (chat(max_tokens=2**70), 400, "max_tokens"),
    "max_tokens beyond the context": (chat(max_tokens=CONTEXT_LEN), 400, "max_tokens"),
    "min_tokens above max_tokens": (completion(max_tokens=4, min_tokens=5), 400, "min_tokens"),
    "min_tokens -1": (completion(min_tokens=-1), 400, "min_tokens"),
    "temperature -1": (chat(temperature=-1), 400, "temperature"),
    "temperature 1001": (chat(temperature=1001), 400, "temperature"),
    "temperature that is a list": (chat(temperature=[1]), 400, "temperature"),
    "top_p -1": (chat(top_p=-1), 400, "top_p"),
    "top_p 2": (chat(top_p=2), 400, "top_p"),
    "top_k -2": (chat(top_k=-2), 400, "top_k"),
    "min_p 2": (chat(min_p=2), 400, "min_p"),
    "seed beyond 64 bits": (chat(seed=2**64), 400, "seed"),
    "repetition_penalty 0": (chat(repetition_penalty=0), 400, "repetition_penalty"),
    "frequency_penalty 3": (chat(frequency_penalty=3), 400, "frequency_penalty"),
    "presence_penalty -3": (chat(presence_penalty=-3), 400, "presence_penalty"),
    "logit_bias of a word": (chat(logit_bias={MARKER: 1}), 400, "logit_bias"),
    "logit_bias of an unknown token": (chat(logit_bias={"100000": 1}), 400, "logit_bias"),
    "logit_bias 101": (chat(logit_bias={"5": 101}), 400, "logit_bias"),
    "logit_bias that is a list": (chat(logit_bias=[1]), 400, "logit_bias"),
    "1,000 stop strings": (chat(stop=["x"] * 1000), 400, "stop"),
    "an empty stop string": (chat(stop=""), 400, "stop"),
    "a stop string of 10,000 characters": (chat(stop="x" * 10_000), 400, "stop"),
    "a stop string that is a number": (chat(stop=[1]), 400, "stop[0]"),
    "1,000 stop token ids": (chat(stop_token_ids=[1] * 1000), 400, "stop_token_ids"),
    "a stop token id that does not exist": (chat(stop_token_ids=[100_000]), 400, "stop_token_ids"),
    "stream that is text": (chat(stream="yes"), 400, "stream"),
    "stream_options without stream": (chat(stream_options={"include_usage": True}), 400, "stream_options"),
    "stream_options that is text": (chat(stream=True, stream_options="x"), 400, "stream_options"),
    "n 0": (chat(n=0), 400, "n"),
    "n beyond what one request may have": (chat(n=129), 400, "n"),
    "n that is text": (chat(n="2"), 400, "n"),
    "n times prompts beyond it": (completion(prompt=["a"] * 43, n=3), 400, "prompt"),
    "n times lists of ids beyond it": (completion(prompt=[[5]] * 65, n=2), 400, "prompt"),
    "n of 4,000 digits": (chat(n=10**4000), 400, "n"),
    "logprobs 21 of a completion": (completion(logprobs=21), 400, "logprobs"),
    "logprobs -1 of a completion": (completion(logprobs=-1), 400, "logprobs"),
    "top_logprobs without logprobs": (chat(top_logprobs=3), 400, "top_logprobs"),
    "top_logprobs 21": (chat(logprobs=True, top_logprobs=21), 400, "top_logprobs"),
    "tools": (chat(tools=[{"type": "function"}]), 400, "tools[0].name"),
    "tool_choice": (chat(tool_choice="required"), 400, "tool_choice"),
    "functions": (chat(functions=[{"name": "f"}]), 400, "tools"),
    "a grammar that no worker here serves": (chat(response_format={"type": "json_object"}), 400, None),
    "audio": (chat(audio={"voice": "x"}), 400, "audio"),
    "best_of above n": (completion(best_of=2), 400, "best_of"),
    "best_of below n": (completion(n=3, best_of=2), 400, "best_of"),
    "beam search": (completion(n=2, use_beam_search=True), 400, "use_beam_search"),
    "echo in a chat": (chat(echo=True), 400, "echo"),
    "suffix": (completion(suffix="x"), 400, "suffix"),
    "a number of 4,000 digits": (chat(max_tokens=10**4000), 400, "max_tokens"),
    "a seed of 4,000 digits": (chat(seed=10**4000), 400, "seed"),
    "a float of 4,000 digits": (chat(top_p=10**4000), 400, "top_p"),
    "a stop token id of 4,000 digits": (chat(stop_token_ids=[10**4000]), 400, "stop_token_ids"),
    "a token id of 4,000 digits": (completion(prompt=[10**4000]), 400, "prompt"),
    "a deadline before now": (chat(deadline_seconds=-1), 400, "deadline_seconds"),
    "a deadline of nothing": (completion(deadline_seconds=0), 400, "deadline_seconds"),
    "a deadline in a thousand years": (chat(deadline_seconds=3e10), 400, "deadline_seconds"),
    "a megabyte of small fields": (chat(cache_salt="x" * (1 << 20)), 400, None),
    "nothing to tokenize": (("/tokenize", b"{}"), 400, "prompt"),
    "more to tokenize than the context": (
        ("/tokenize", b'{"prompt": "%s"}' % (b"7 " * CONTEXT_LEN)),
        400,
        "prompt",
    ),
    "a chat to tokenize above the context": (
        ("/tokenize", json.dumps({"messages": [{"role": "user", "content": "7 " * CONTEXT_LEN}]}).encode()),
        400,
        "messages",
    ),
    "more tokens than the context": (
        ("/detokenize", json.dumps({"tokens": [5] * (CONTEXT_LEN + 1)}).encode()),
        400,
        "tokens",
    ),
    "tokens that are text": (("/detokenize", b'{"tokens": "1"}'), 400, "tokens"),
    "tokens beyond the vocabulary": (("/detokenize", b'{"tokens": [100000]}'), 400, "tokens"),
    "an unknown path": ((f"/v1/{MARKER}", b"{}"), 404, None),
    "two slashes too many": ((CHAT + "//", b"{}"), 404, None),
}


@pytest.fixture
def client(router: RunningRouter) -> httpx2.Client:
    return router.http


def error_of(response: httpx2.Response) -> dict[str, Any]:
    """OpenAI's error object, which must be all there is."""
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    return dict(body["error"])


@pytest.mark.parametrize(("request_", "status", "param"), BAD.values(), ids=BAD)
def test_bad_input_gets_a_clear_error_that_names_the_field(
    client: httpx2.Client, router: RunningRouter, request_: tuple[str, bytes], status: int, param: str | None
) -> None:
    heard = len(router.workers.prefills)
    path, body = request_
    response = client.post(path, content=body)
    assert response.status_code == status, response.text
    error = error_of(response)
    assert error["param"] == param
    assert error["message"]
    assert MARKER not in response.text
    assert len(error["message"]) < 400
    assert "Traceback" not in response.text
    assert len(router.workers.prefills) == heard


@pytest.mark.parametrize(("value", "status"), [("never", 200), ("Never", 200), ("short", 400), ("", 400)])
def test_the_header_that_asks_for_a_prefill_worker_has_one_value(
    client: httpx2.Client, value: str, status: int
) -> None:
    path, body = completion()
    response = client.post(path, content=body, headers={"x-segue-local-prefill": value})
    assert response.status_code == status, response.text
    if status == 400:
        assert "X-Segue-Local-Prefill must be never" in error_of(response)["message"]


MISSING = [
    ((CHAT, b"{}"), "messages"),
    ((COMPLETIONS, b'{"model": "tiny"}'), "prompt"),
    ((CHAT, b'{"model": "tiny"}'), "messages"),
    (chat(messages=[{"content": "hi"}]), "messages[0].role"),
    (chat(messages=[*USER, {"role": "user"}]), "messages[1].content"),
    (message([{"type": "text"}]), "messages[0].content[0].text"),
    (("/detokenize", b"{}"), "tokens"),
]


@pytest.mark.parametrize(("request_", "param"), MISSING, ids=[param for _, param in MISSING])
def test_a_missing_field_has_one_sentence_everywhere(
    client: httpx2.Client, request_: tuple[str, bytes], param: str
) -> None:
    path, body = request_
    response = client.post(path, content=body)
    assert response.status_code == 400
    error = error_of(response)
    assert (error["message"], error["param"]) == (f"{param} is required", param)


NEUTRAL = {
    "n": 1,
    "logprobs": False,
    "top_logprobs": 0,
    "tools": [],
    "tool_choice": "auto",
    "response_format": {"type": "text"},
    "echo": False,
    "suffix": None,
    "best_of": 1,
    "user": "someone",
    "metadata": {"a": "b"},
    "not_a_field": {"deep": [1]},
}


@pytest.mark.parametrize("field", NEUTRAL)
def test_neutral_values_and_unknown_fields_are_accepted(client: httpx2.Client, field: str) -> None:
    path, body = chat(**{field: NEUTRAL[field]})
    assert client.post(path, content=body).status_code == 200


def test_a_field_that_is_null_has_its_default(client: httpx2.Client) -> None:
    path, body = chat(temperature=None, max_tokens=None, stop=None, stream=None, logit_bias=None, seed=None)
    assert client.post(path, content=body).status_code == 200


def test_a_prompt_that_is_too_long_has_the_code_that_clients_look_for(client: httpx2.Client) -> None:
    path, body = completion(prompt="x" * 1_000_000)
    assert error_of(client.post(path, content=body))["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("method", "path"), [("GET", CHAT), ("DELETE", COMPLETIONS), ("POST", "/v1/models"), ("PUT", "/health")]
)
def test_a_wrong_method_is_a_405_that_names_the_right_one(
    client: httpx2.Client, method: str, path: str
) -> None:
    response = client.request(method, path)
    assert response.status_code == 405
    assert error_of(response)["code"] == "method_not_allowed"
    assert response.headers["allow"]


@pytest.mark.parametrize(
    ("path", "status"),
    [("/health", 200), ("/v1/models", 200), (f"/v1/models/{MODEL}", 200), ("/nowhere", 404), (CHAT, 405)],
)
def test_head_is_answered_as_get_is_but_without_the_body(
    client: httpx2.Client, path: str, status: int
) -> None:
    got, head = client.get(path), client.head(path)
    assert head.status_code == got.status_code == status
    assert head.headers["content-length"] == got.headers["content-length"]
    assert head.content == b""
    assert client.get("/health").status_code == 200


def test_a_declared_body_of_50_mb_is_refused_and_the_answer_arrives(client: httpx2.Client) -> None:
    response = client.post(CHAT, content=b"x" * 50_000_000)
    assert response.status_code == 413
    assert error_of(response)["code"] == "request_too_large"
    assert response.headers["connection"] == "close"


def test_a_chunked_body_is_cut_off_while_it_is_read(client: httpx2.Client) -> None:
    sent = 0

    def chunks() -> Iterator[bytes]:
        nonlocal sent
        for _ in range(800):
            sent += 1 << 16
            yield b"x" * (1 << 16)

    assert client.post(CHAT, content=chunks()).status_code == 413
    assert sent > 4 << 20


def test_what_is_not_http_gets_openais_error_shape_too(router: RunningRouter) -> None:
    with socket.create_connection(("127.0.0.1", int(router.url.rsplit(":", 1)[1]))) as connection:
        connection.sendall(b"hello?\r\n\r\n")
        response = http.client.HTTPResponse(connection)
        response.begin()
        assert response.status == 400
        assert set(json.loads(response.read())) == {"error"}


def test_a_body_that_never_arrives_is_given_up(model_folder: Path) -> None:
    with RunningRouter(model_folder, body_seconds_max=0.2) as router:
        connection = http.client.HTTPConnection(router.url.removeprefix("http://"), timeout=10)
        connection.putrequest("POST", CHAT)
        connection.putheader("content-length", "100")
        connection.endheaders(b"{")
        response = connection.getresponse()
        assert response.status == 408
        assert "did not arrive" in json.loads(response.read())["error"]["message"]
        connection.close()
        assert router.clients.counters.ended["slow_body"] == router.clients.counters.refusals["408"] == 1


def test_a_body_that_is_compressed_is_a_415_that_says_so(client: httpx2.Client) -> None:
    path, body = completion()
    headers = {"content-encoding": "gzip", "content-type": "application/json"}
    response = client.post(path, content=gzip.compress(body), headers=headers)
    assert response.status_code == 415
    assert error_of(response)["message"] == ("Content-Encoding gzip is not supported: send the body as it is")
    assert client.post(path, content=body, headers=headers | {"content-encoding": "identity"}).is_success
