"""Limits of API keys hold for requests that come at once, and for all answers of one request."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import httpx2
import pytest

from shared.process.api_keys import key_line
from tests.metric_pages import samples_of
from tests.unit.router.scripted_workers import MODEL, RunningRouter, Script
from tests.waiting import until

SMALL, LIMITED, NARROW, FOUR, LITTLE = (f"sk-segue-{name}-0000000000" for name in "slnfo")
BODY = {"model": MODEL, "prompt": "abc", "max_tokens": 4}


@pytest.fixture
def keyed(model_folder: Path, tmp_path: Path) -> Iterator[RunningRouter]:
    lines = (
        key_line("small", SMALL, "tpm=200"),
        key_line("limited", LIMITED, "tpm=600"),
        key_line("narrow", NARROW, "concurrent=1"),
        key_line("four", FOUR, "concurrent=4"),
        key_line("little", LITTLE, "tpm=300 concurrent=1"),
    )
    file = tmp_path / "keys"
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    with RunningRouter(model_folder, api_keys_file=str(file)) as running:
        yield running


def ask(router: RunningRouter, key: str, **fields: object) -> httpx2.Response:
    headers = {"authorization": f"Bearer {key}"}
    return router.http.post("/v1/completions", json={**BODY, **fields}, headers=headers, timeout=60)


def streamed(router: RunningRouter, key: str, **fields: object) -> AbstractContextManager[httpx2.Response]:
    headers = {"authorization": f"Bearer {key}"}
    body = {**BODY, **fields, "stream": True}
    return router.http.stream("POST", "/v1/completions", json=body, headers=headers, timeout=60)


def test_requests_that_come_at_once_get_no_more_tokens_than_there_are(keyed: RunningRouter) -> None:
    keyed.workers.script = Script(endless=True)
    began_at = time.monotonic()
    with ThreadPoolExecutor(40) as clients:
        answers = list(clients.map(lambda _: ask(keyed, SMALL, max_tokens=60), range(40)))
    flowed = 200 * (time.monotonic() - began_at) / 60
    used = [answer.json()["usage"]["total_tokens"] for answer in answers if answer.status_code == 200]
    assert {answer.status_code for answer in answers} == {200, 429}
    assert used
    assert sum(used) <= 200 + flowed
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert "this request may take" in refused.text or "its 200 tokens a minute" in refused.text
    assert 1 <= int(refused.headers["retry-after"]) <= 60


@pytest.mark.parametrize(
    ("key", "fields", "sentence"),
    [
        (LITTLE, {"n": 64}, "asks for 64 answers at a time, and this key may have 1 here"),
        (NARROW, {"prompt": ["a", "b"]}, "asks for 2 answers at a time, and this key may have 1 here"),
        (LIMITED, {"n": 4, "max_tokens": 200}, "tokens, and this key may have 600 a minute here"),
    ],
    ids=["n", "prompts", "tokens"],
)
def test_what_a_key_may_never_have_is_refused_by_a_sentence(
    keyed: RunningRouter, key: str, fields: dict[str, object], sentence: str
) -> None:
    before = len(keyed.workers.prefills)
    refused = ask(keyed, key, **fields)
    assert refused.status_code == 400
    assert sentence in refused.json()["error"]["message"]
    assert refused.json()["error"]["code"] == "key_limit_exceeded"
    assert "retry-after" not in refused.headers
    assert len(keyed.workers.prefills) == before


def test_each_answer_counts_among_those_that_run(keyed: RunningRouter) -> None:
    keyed.workers.script = Script(stalled=True)
    with streamed(keyed, FOUR, n=3):
        refused = ask(keyed, FOUR, n=2)
        assert refused.status_code == 429
        assert "may have 4 answers at a time here; 3 run" in refused.json()["error"]["message"]
        keyed.workers.script = Script()
        assert ask(keyed, FOUR).status_code == 200
    until(lambda: ask(keyed, FOUR, n=2).status_code == 200, 10, "room for two")
    samples = samples_of(keyed.http.get(f"{keyed.admin_url}/metrics").text)
    assert samples["segue_key_requests_total{key=four,outcome=concurrent}"] >= 1


def test_the_head_of_a_stream_says_what_is_left_beside_what_it_will_take(keyed: RunningRouter) -> None:
    keyed.workers.script = Script(stalled=True)
    with streamed(keyed, LIMITED, max_tokens=100) as answer:
        assert 490 <= int(answer.headers["x-ratelimit-remaining-tokens"]) < 500
