"""Clients with API keys: who is let in, before a byte of the body, and what each one's use is counted as."""

from __future__ import annotations

import json
import logging
import random
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx2
import openai
import pytest

from router.access.key_ring import KeyRing
from shared.primitives.errors import ConfigError
from shared.process.api_keys import KEYS_FILE_BYTES_MAX, key_line
from tests.metric_pages import samples_of
from tests.unit.router.raw_http import connect
from tests.unit.router.scripted_workers import MODEL, RunningRouter, Script
from tests.waiting import comes_true, soon, until

SHOP, BATCH, OTHER, LIMITED, NARROW = (f"sk-segue-{name}-0000000000" for name in "sbofn")
REVOKED_WITHIN_SECONDS = 5.0
BODY = {"model": MODEL, "prompt": "abc", "max_tokens": 4}


@dataclass
class KeysFile:
    """The file of a deployment, replaced as Kubernetes and careful people do."""

    path: Path

    def write(self, *lines: str) -> None:
        new = self.path.with_suffix(".new")
        new.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        new.replace(self.path)


ALL = (
    key_line("shop", SHOP),
    key_line("batch", BATCH, "priority=-7"),
    key_line("other", OTHER, "models=another"),
    key_line("limited", LIMITED, "rpm=3 tpm=600"),
    key_line("narrow", NARROW, "concurrent=1"),
)


@pytest.fixture
def keys_file(tmp_path: Path) -> KeysFile:
    file = KeysFile(tmp_path / "keys")
    file.write(*ALL)
    return file


@pytest.fixture
def keyed(model_folder: Path, keys_file: KeysFile) -> Iterator[RunningRouter]:
    with RunningRouter(model_folder, api_keys_file=str(keys_file.path)) as running:
        yield running


def ask(router: RunningRouter, key: str | None, path: str = "/v1/completions") -> httpx2.Response:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return router.http.post(path, json=BODY, headers=headers, timeout=30)


def counted(router: RunningRouter, name: str) -> dict[str, float]:
    """The samples of a metric, by their labels."""
    samples = samples_of(router.http.get(f"{router.admin_url}/metrics").text)
    return {key.removeprefix(name): value for key, value in samples.items() if key.startswith(f"{name}{{")}


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        f"Basic {SHOP}",
        SHOP,
        f"Bearer {SHOP}x",
        f"Bearer {SHOP[:-1]}",
        "Bearer \xe9",
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize", "/v1/nothing", "/livez", "/tokenize/"])
def test_without_a_valid_key_every_path_answers_401(
    keyed: RunningRouter, header: str | None, path: str
) -> None:
    headers = [] if header is None else [(b"authorization", header.encode("latin-1"))]
    answer = keyed.http.post(path, json=BODY, headers=headers)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert SHOP not in answer.text


def test_a_valid_key_beside_a_second_header_is_no_key(keyed: RunningRouter) -> None:
    headers = [("authorization", f"Bearer {SHOP}"), ("authorization", "Bearer other")]
    assert keyed.http.get("/v1/models", headers=headers).status_code == 401


def test_a_key_comes_in_either_header(keyed: RunningRouter) -> None:
    def status(**headers: str) -> int:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return keyed.http.post("/v1/completions", json=BODY, headers=named).status_code

    assert status(x_api_key=SHOP) == 200
    assert status(x_api_key=SHOP, authorization=f"Bearer {SHOP}") == 200
    assert status(x_api_key=f"{SHOP}x") == 401
    assert status(x_api_key=SHOP, authorization=f"Bearer {BATCH}") == 401, "which of the two is meant?"
    assert status(x_api_key=SHOP, authorization="Bearer nobodys") == 401
    assert status(x_api_key=SHOP, authorization="Basic eA==") == 401


def test_anthropics_clients_are_told_in_their_form_why_they_are_not_let_in(keyed: RunningRouter) -> None:
    def refusal(key: str | None, path: str = "/v1/messages") -> tuple[int, str]:
        headers = {"anthropic-version": "2023-06-01"} | ({"x-api-key": key} if key else {})
        asked = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
        answer = keyed.http.post(path, json=asked, headers=headers, timeout=30)
        told = answer.json()
        assert (told["type"], told["request_id"]) == ("error", answer.headers["request-id"])
        return answer.status_code, told["error"]["type"]

    assert refusal(None) == (401, "authentication_error")
    assert refusal("wrong", "/v1/messages/count_tokens") == (401, "authentication_error")
    assert refusal(OTHER) == (403, "permission_error")
    refusals = {refusal(LIMITED, "/v1/nothing") for _ in range(4)}
    assert refusals == {(404, "not_found_error"), (429, "rate_limit_error")}


def test_load_balancers_need_no_key(keyed: RunningRouter) -> None:
    assert keyed.http.get("/health").status_code == 200
    assert keyed.http.get(f"{keyed.admin_url}/readyz").status_code == 200


def test_openais_client_is_served_with_its_key_and_told_why_not_without(keyed: RunningRouter) -> None:
    def chat(key: str) -> object:
        client = keyed.openai.with_options(api_key=key)
        return client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}])

    assert chat(SHOP)
    with pytest.raises(openai.AuthenticationError, match="is not valid here"):
        chat("sk-segue-wrong")
    with pytest.raises(openai.PermissionDeniedError, match=f"not for the model {MODEL}"):
        chat(OTHER)


def test_a_stranger_is_refused_before_its_body_is_read(keyed: RunningRouter) -> None:
    with connect(keyed) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nexpect: 100-continue\r\n"
            b"authorization: Bearer wrong\r\ncontent-length: 4000000\r\n\r\n"
        )
        assert connection.recv(1000).startswith(b"HTTP/1.1 401")
    assert keyed.serving.bodies.budget.held_bytes == 0


def test_a_revoked_key_is_refused_and_a_new_one_served_within_seconds(
    keyed: RunningRouter, keys_file: KeysFile
) -> None:
    new = "sk-segue-new-00000000000"
    assert (ask(keyed, SHOP).status_code, ask(keyed, new).status_code) == (200, 401)
    keys_file.write(key_line("batch", BATCH), key_line("shop", new))
    seconds = soon(REVOKED_WITHIN_SECONDS)
    assert comes_true(lambda: ask(keyed, SHOP).status_code == 401, seconds)
    assert ask(keyed, new).status_code == 200
    assert ask(keyed, BATCH).status_code == 200
    keys_file.write()
    assert comes_true(lambda: ask(keyed, BATCH).status_code == 401, seconds)


def test_a_file_that_is_wrong_or_gone_locks_nobody_out_and_is_counted(
    keyed: RunningRouter, keys_file: KeysFile
) -> None:
    def unread() -> float:
        return samples_of(keyed.http.get(f"{keyed.admin_url}/metrics").text)["segue_api_keys_unread_total"]

    keys_file.write(*ALL[:1], "and a slip of the pen")
    until(lambda: unread() > 0, 20, "a look at the wrong file")
    assert ask(keyed, BATCH).status_code == 200
    keys_file.path.unlink()
    seen = unread()
    until(lambda: unread() > seen, 20, "a look for the missing file")
    assert ask(keyed, BATCH).status_code == 200
    keys_file.write(*ALL[:1])
    until(lambda: ask(keyed, BATCH).status_code == 401, 20, "the revocation in the right file")


def test_a_file_that_is_wrong_at_the_start_is_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        KeyRing(str(file))
    file.write_text(f"shop {SHOP}", encoding="utf-8")
    with pytest.raises(ConfigError, match="is wrong in line 1") as refused:
        KeyRing(str(file))
    assert SHOP not in str(refused.value)
    file.write_bytes(b"#" * (KEYS_FILE_BYTES_MAX + 2))
    with pytest.raises(ConfigError, match=f"more than {KEYS_FILE_BYTES_MAX}"):
        KeyRing(str(file))


def test_over_quota_is_429_with_what_is_left_and_when(keyed: RunningRouter) -> None:
    answers = [ask(keyed, LIMITED) for _ in range(4)]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
    remaining = [answer.headers["x-ratelimit-remaining-requests"] for answer in answers]
    assert remaining == ["2", "1", "0", "0"]
    refused = answers[-1]
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert 1 <= int(refused.headers["retry-after"]) <= 20
    assert refused.headers["x-ratelimit-limit-requests"] == "3"
    assert refused.headers["x-ratelimit-limit-tokens"] == "600"
    assert int(refused.headers["x-ratelimit-remaining-tokens"]) < 600
    assert refused.headers["x-ratelimit-reset-tokens"].endswith("s")
    assert "x-ratelimit-limit-requests" not in ask(keyed, SHOP).headers
    outcomes = counted(keyed, "segue_key_requests_total")
    assert outcomes["{key=limited,outcome=served}"] == 3
    assert outcomes["{key=limited,outcome=rpm}"] == 1


def test_tokens_are_paid_as_they_come_and_a_prompt_that_was_not_served_is_given_back(
    model_folder: Path, keys_file: KeysFile
) -> None:
    keys_file.write(key_line("shop", SHOP, "tpm=10"))
    with RunningRouter(
        model_folder, api_keys_file=str(keys_file.path), linked=False, waiting_seconds_max=0.2
    ) as off:
        off.call(lambda: None)
        refused = ask(off, SHOP)
        assert refused.status_code == 503
        assert refused.headers["x-ratelimit-remaining-tokens"] == "10"
    with RunningRouter(model_folder, api_keys_file=str(keys_file.path)) as on:
        on.workers.script = Script(endless=True)
        client = on.openai.with_options(api_key=SHOP)
        assert client.completions.create(model=MODEL, prompt="abc", max_tokens=20).usage
        with pytest.raises(openai.RateLimitError, match="its 10 tokens a minute"):
            client.completions.create(model=MODEL, prompt="abc")


def test_a_key_runs_as_many_requests_as_it_may_and_a_client_that_hangs_up_leaves_room(
    keyed: RunningRouter,
) -> None:
    keyed.workers.script = Script(stalled=True)
    headers = {"authorization": f"Bearer {NARROW}"}
    with keyed.http.stream("POST", "/v1/completions", json={**BODY, "stream": True}, headers=headers):
        assert ask(keyed, NARROW).status_code == 429
        keyed.workers.script = Script()
        assert ask(keyed, SHOP).status_code == 200
    until(lambda: ask(keyed, NARROW).status_code == 200, 10, "room for the next request")
    assert keyed.keyed is not None
    until(lambda: not len(keyed.keyed.accounts), 10, "the end of all accounts")  # type: ignore[union-attr]


def test_a_keys_name_is_the_tenant_and_its_priority_that_of_its_requests(keyed: RunningRouter) -> None:
    for key in (SHOP, BATCH):
        assert ask(keyed, key).status_code == 200
    shop, batch = keyed.workers.prefills[-2:]
    assert (shop.priority, batch.priority) == (0, -7)
    assert shop.tenant != batch.tenant
    assert shop.extra_key != batch.extra_key
    ask(keyed, SHOP)
    assert keyed.last_prefill.tenant == shop.tenant


def test_usage_counters_are_the_sums_of_what_200_answers_say(keyed: RunningRouter) -> None:
    keyed.workers.script = Script(
        output=lambda prefill: prefill.token_ids[:1] * (len(prefill.token_ids) % 7 + 1)
    )
    rng = random.Random(9)
    said: Counter[str] = Counter()
    lock = threading.Lock()

    def one(number: int) -> None:
        name, key = rng.choice([("shop", SHOP), ("batch", BATCH)])
        prompts = ["x" * rng.randint(1, 40) for _ in range(rng.randint(1, 3))]
        body = {"model": MODEL, "prompt": prompts, "max_tokens": rng.randint(1, 8)}
        client = keyed.openai.with_options(api_key=key)
        if number % 2:
            usage = client.completions.create(**body).usage  # type: ignore[call-overload]
        else:
            stream = client.completions.create(**body, stream=True, stream_options={"include_usage": True})  # type: ignore[call-overload]
            usage = [chunk.usage for chunk in stream][-1]
        with lock:
            said[f"{{key={name},kind=prompt}}"] += usage.prompt_tokens
            said[f"{{key={name},kind=completion}}"] += usage.completion_tokens
            said[f"{{key={name},kind=cached}}"] += usage.prompt_tokens_details.cached_tokens

    with ThreadPoolExecutor(8) as clients:
        list(clients.map(one, range(200)))
    assert said["{key=shop,kind=prompt}"] > 500
    assert counted(keyed, "segue_usage_tokens_total") == said


def test_what_came_of_an_answer_that_nobody_waited_for_is_counted(keyed: RunningRouter) -> None:
    keyed.workers.script = Script(endless=True, on_demand=True)
    headers = {"authorization": f"Bearer {SHOP}"}
    body = {**BODY, "max_tokens": 50, "stream": True}
    with keyed.http.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data: "))
        next(lines)
        keyed.call(keyed.workers.step)
        next(lines)
    until(lambda: counted(keyed, "segue_usage_tokens_total"), 10, "the account of what came")
    used = counted(keyed, "segue_usage_tokens_total")
    assert used["{key=shop,kind=completion}"] == 2
    assert used["{key=shop,kind=prompt}"] == len(keyed.last_prefill.token_ids)


def test_a_logged_request_is_one_line_with_its_tokens_and_no_key(
    model_folder: Path, keys_file: KeysFile, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    lines: list[dict[str, object]] = []
    with (
        RunningRouter(model_folder, api_keys_file=str(keys_file.path), usage_log=True) as running,
        pytest.MonkeyPatch.context() as patch,
    ):
        write = lambda event, **fields: lines.append({"event": event} | fields)  # noqa: E731
        patch.setattr("router.access.keyed_clients.log.info", write)
        body = {**BODY, "prompt": ["abc", "de"]}
        headers = {"authorization": f"Bearer {SHOP}"}
        answer = running.http.post("/v1/completions", json=body, headers=headers)
        until(lambda: lines, 10, "the line")
        assert ask(running, "sk-segue-wrong").status_code == 401
    (line,) = lines
    usage = answer.json()["usage"]
    assert line["event"] == "usage.request"
    assert (line["key_name"], line["status"], line["rid"]) == ("shop", 200, answer.headers["x-request-id"])
    assert (line["prompt_tokens"], line["completion_tokens"]) == (
        usage["prompt_tokens"],
        usage["completion_tokens"],
    )
    assert "sk-segue" not in json.dumps(lines) + caplog.text


def test_thousands_of_wrong_keys_leave_nothing_behind(keyed: RunningRouter) -> None:
    assert keyed.keyed is not None
    for number in range(3000):
        answer = keyed.http.get("/v1/models", headers={"authorization": f"Bearer sk-segue-{number:040}"})
        assert answer.status_code == 401
    assert len(keyed.keyed.quotas) == len(keyed.keyed.accounts) == 0
    assert counted(keyed, "segue_key_refusals_total") == {"{cause=unknown}": 3000, "{cause=missing}": 0}
    assert set(keyed.keyed.counters.requests) == set()


def test_where_there_is_no_file_nothing_of_keys_is_made(router: RunningRouter) -> None:
    assert ask(router, "anything").status_code == 200
    assert router.keyed is None
    assert "segue_usage" not in router.http.get(f"{router.admin_url}/metrics").text
