"""API keys in a whole deployment: usage as the answers say it, nothing kept of strangers, no key in any record.

Streams go on through the death of their decode worker, and are counted once.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import openai
import pytest

from shared.process.api_keys import digest_of, key_line, new_key
from tests.abuse.procfs import PeakMemory
from tests.integration.conftest import SMALL
from tests.integration.deployments.deployment import LocalDeployment, RoleConfigs, deployment
from tests.waiting import comes_true, soon, until

REQUESTS = 200
STRANGERS = 4000
STRANGERS_BYTES_MAX = 8 << 20
KEYS = {name: new_key() for name in ("shop", "batch", "revoked")}


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "keys"
    write(file, *KEYS)
    return file


@pytest.fixture(scope="module")
def keyed(keys_file: Path) -> Iterator[LocalDeployment]:
    router: dict[str, object] = {"apiKeysFile": str(keys_file), "usageLog": True}
    config: RoleConfigs = {**SMALL, "router": router}
    with deployment("--log-level", "debug", "--log-format", "json", config=config) as running:
        yield running


def write(file: Path, *names: str) -> None:
    file.with_suffix(".new").write_text("".join(f"{key_line(name, KEYS[name])}\n" for name in names))
    file.with_suffix(".new").replace(file)


def client_of(running: LocalDeployment, name: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key=KEYS[name], max_retries=0, timeout=180.0)


def test_usage_is_what_200_answers_say_though_a_worker_dies(keyed: LocalDeployment) -> None:
    said: Counter[str] = Counter()

    def ask(number: int) -> tuple[str, openai.types.CompletionUsage]:
        name = "shop" if number % 3 else "batch"
        prompts = [f"Story {number % 20}. Once upon a time, long ago" + " and far away" * (number % 5)]
        prompts += ["Second"] * (number % 2)
        with client_of(keyed, name) as client:
            if number % 4:
                answer = client.completions.create(model="smollm2", prompt=prompts, max_tokens=number % 9 + 1)
                assert answer.usage is not None
                return name, answer.usage
            chunks = client.completions.create(
                model="smollm2",
                prompt=prompts,
                max_tokens=40,
                stream=True,
                stream_options={"include_usage": True},
            )
            (usage,) = [chunk.usage for chunk in chunks if chunk.usage]
            return name, usage

    with ThreadPoolExecutor(16) as clients:
        answers = [clients.submit(ask, number) for number in range(REQUESTS)]
        (victim,) = keyed.processes("decode")
        until(lambda: keyed.live_requests("decoding") >= 4, 60, "streams in decode")
        os.kill(victim.pid, signal.SIGKILL)
        for answer in answers:
            name, usage = answer.result(180)
            said[f"{{key={name},kind=prompt}}"] += usage.prompt_tokens
            said[f"{{key={name},kind=completion}}"] += usage.completion_tokens
            assert usage.prompt_tokens_details is not None
            said[f"{{key={name},kind=cached}}"] += usage.prompt_tokens_details.cached_tokens or 0
    metrics = keyed.metrics(keyed.processes("router")[0])
    assert metrics["segue_continuations_total{cause=lost_decode}"] > 0
    assert said["{key=batch,kind=completion}"] > 100
    name = "segue_usage_tokens_total"
    assert {key.removeprefix(name): value for key, value in metrics.items() if key.startswith(name)} == said
    asked = sum(value for key, value in metrics.items() if key.startswith("segue_key_requests_total"))
    assert asked == REQUESTS
    until(
        lambda: sum('"event":"usage.request"' in line for line in keyed.command.read_lines()) == REQUESTS,
        10,
        "a line for each request",
    )


def test_thousands_of_strangers_leave_nothing_behind(keyed: LocalDeployment) -> None:
    (router,) = keyed.processes("router")

    def knock(count: int) -> None:
        with httpx2.Client(base_url=keyed.url) as client:
            for _ in range(count):
                headers = {"authorization": f"Bearer {new_key()}{'x' * 4000}"}
                assert client.post("/v1/completions", json={}, headers=headers).status_code == 401

    knock(100)
    memory = PeakMemory(router.pid)
    with ThreadPoolExecutor(8) as strangers:
        list(strangers.map(knock, [STRANGERS // 8] * 8))
    assert memory.growth() < STRANGERS_BYTES_MAX
    assert keyed.metrics(router)["segue_key_refusals_total{cause=unknown}"] >= STRANGERS


def test_a_key_is_revoked_within_five_seconds_and_its_stream_ends_by_itself(
    keyed: LocalDeployment, keys_file: Path
) -> None:
    with client_of(keyed, "revoked") as client:
        stream = client.completions.create(
            model="smollm2", prompt="On and on", max_tokens=800, stream=True, extra_body={"ignore_eos": True}
        )
        first = next(stream)
        write(keys_file, "shop", "batch")

        def refused() -> bool:
            try:
                client.models.list()
            except openai.AuthenticationError:
                return True
            return False

        assert comes_true(refused, soon(5))
        assert [first, *stream][-1].choices[0].finish_reason == "length"


@pytest.mark.aggregated
def test_no_key_and_no_hash_is_in_any_record(keyed: LocalDeployment) -> None:
    with client_of(keyed, "shop") as client:
        answered = client.completions.create(model="smollm2", prompt="One", max_tokens=2)
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="none", prompt="One")
    rid = answered.id.removeprefix("cmpl-")
    records = [httpx2.get(f"{keyed.admin_url}/debug/requests/{rid}").text]
    records += [httpx2.get(f"http://127.0.0.1:{each.admin_port}/metrics").text for each in keyed.processes()]
    wrong = {"authorization": f"Bearer {KEYS['batch']}x"}
    records.append(httpx2.get(f"{keyed.url}/v1/models", headers=wrong).text)
    log = "\n".join(keyed.command.read_lines())
    assert '"key_name":"shop"' in log
    assert f'"rid":"{rid}"' in log
    for key in KEYS.values():
        for form in (key, key.removeprefix("sk-segue-"), digest_of(key.encode()).hex()):
            assert not [record for record in (*records, log) if form in record]
