"""`segue doctor --live` beside real deployments, held back by a decode worker, a key, prompts, a link.

Each is read over ten seconds, as a user does, by the URLs of all its admin ports.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import openai
import pytest

from shared.process.api_keys import key_line, new_key
from tests.integration.deployments.deployment import LocalDeployment, RoleConfigs, deployment
from tests.integration.deployments.streams import complete
from tests.integration.deployments.thread_stop import (
    LINK_STOPPED_SECONDS,
    by_turns,
    process_stopped,
    reader_of_pages,
    stopped,
)
from tests.waiting import until

STOPPED_SECONDS = 0.6
WITHOUT_LOCAL = {"localPrefill": "never"}


@contextmanager
def clients(
    running: LocalDeployment, api_key: str, count: int, prompt_words: int, tokens: int
) -> Iterator[None]:
    """`count` streams that begin anew as they end; what is left at the end hangs up."""
    stopping = threading.Event()
    drawn = random.Random(api_key)

    async def one(client: openai.AsyncOpenAI) -> None:
        while True:
            prompt = " ".join(str(drawn.randrange(1000)) for _ in range(prompt_words))
            with contextlib.suppress(openai.APIError):
                await complete(client, prompt, max_tokens=tokens, extra_body={"ignore_eos": True})

    async def all_of_them() -> None:
        url = f"{running.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=api_key, max_retries=0, timeout=300.0) as client:
            streams = [asyncio.create_task(one(client)) for _ in range(count)]
            await asyncio.to_thread(stopping.wait)
            for stream in streams:
                stream.cancel()
            await asyncio.gather(*streams, return_exceptions=True)

    thread = threading.Thread(target=asyncio.run, args=(all_of_them(),))
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()


def doctor(running: LocalDeployment) -> dict[str, str]:
    """What the command says of a deployment, as JSON."""
    urls = [f"http://127.0.0.1:{process.admin_port}" for process in running.processes()]
    program = str(Path(sys.executable).with_name("segue"))
    ended = subprocess.run(
        [program, "doctor", "--live", *urls, "--json"],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    found: dict[str, str] = json.loads(ended.stdout)
    sys.stdout.write(f"{found}\n")
    return found


@pytest.fixture(scope="module")
def keyless() -> Iterator[LocalDeployment]:
    """One worker of each role; a frozen one is waited for."""
    config: RoleConfigs = {
        "decode": {"kvPages": 1200, "silenceSeconds": 10},
        "prefill": {"kvPages": 1200},
        "router": WITHOUT_LOCAL,
    }
    with deployment(config=config) as running:
        yield running


@pytest.mark.timeout(300)
def test_a_decode_worker_that_is_slowed_is_named(keyless: LocalDeployment) -> None:
    with clients(keyless, "none", 6, 30, 400):
        until(
            lambda: keyless.live_requests("decoding") == 6,
            60,
            "streams, none of which reads its prompt's pages any more",
        )
        (decode,) = keyless.processes("decode")
        with by_turns(partial(process_stopped, decode.pid), STOPPED_SECONDS):
            assert doctor(keyless)["cause"] == "decode"
    until(lambda: not keyless.held(), 60, "the end of the streams")


@pytest.mark.timeout(300)
@pytest.mark.long
def test_a_greedy_key_is_named(tmp_path: Path) -> None:
    keys = {name: new_key() for name in ("greedy", "modest")}
    file = tmp_path / "keys"
    file.write_text("".join(f"{key_line(name, key)}\n" for name, key in keys.items()))
    few_slots = {"kvPages": 600, "maxRunningRequests": 4}
    config: RoleConfigs = {
        "decode": few_slots,
        "prefill": {"kvPages": 600},
        "router": WITHOUT_LOCAL | {"apiKeysFile": str(file)},
    }
    with (
        deployment(config=config) as running,
        clients(running, keys["greedy"], 24, 30, 300),
        clients(running, keys["modest"], 1, 30, 20),
    ):
        until(lambda: running.live_requests("waiting") + running.live_requests("ready") > 8, 60, "a line")
        found = doctor(running)
        assert found["cause"] == "tenant"
        assert "greedy" in found["turn"]


@pytest.mark.timeout(300)
def test_long_prompts_at_one_prefill_worker_are_named(keyless: LocalDeployment) -> None:
    def before_decode() -> float:
        return keyless.live_requests("prefilling") + keyless.live_requests("waiting")

    with clients(keyless, "none", 16, 700, 4):
        until(lambda: before_decode() > 8, 60, "a line")
        assert doctor(keyless)["cause"] == "prefill"


@pytest.mark.timeout(300)
@pytest.mark.long
def test_a_throttled_link_is_named() -> None:
    """The decode worker's reader of pages is stopped for most of the time."""
    role = {"kvPages": 1200, "kvTransport": "tls"}
    config: RoleConfigs = {"prefill": role, "decode": role, "router": WITHOUT_LOCAL}
    with deployment(config=config) as running:
        (decode,) = running.processes("decode")
        reader = reader_of_pages(running, decode)
        with by_turns(partial(stopped, reader), LINK_STOPPED_SECONDS), clients(running, "none", 4, 20, 4):
            until(lambda: running.live_requests("decoding") >= 1, 60, "reads")
            assert doctor(running)["cause"] == "kv link"
