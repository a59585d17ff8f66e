"""Fifty streams are cut, half of them because their router is killed, and go on at another router of the deployment.

The texts that clients put together are those of undisturbed answers, to the character. The routers are processes of
their own, beside the one of `segue up`, with its workers and its keys.
"""

from __future__ import annotations

import contextlib
import json
import random
import signal
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.integration.deployments.deployment import LocalDeployment, free_port
from tests.metric_pages import samples_of
from tests.waiting import until

STREAMS, AT_A_TIME = 50, 5
TOKENS = 48
PROMPTS = ("The weather in Paris is", "Once upon a time", "def main():", "日本の首都は", "1, 2, 3,")


@dataclass
class SecondRouter:
    """One more router of a deployment."""

    command: list[str]
    port: int
    admin_port: int
    process: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1/completions"

    def resumed(self) -> float:
        page = httpx2.get(f"http://127.0.0.1:{self.admin_port}/metrics", timeout=10, verify=False).text
        return samples_of(page)["segue_streams_resumed_total"]

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(20)


@contextlib.contextmanager
def another_router(running: LocalDeployment, uid: str, keys: Path) -> Iterator[SecondRouter]:
    """A router with the workers, settings and keys of that of `segue up`, ready."""
    (first,) = running.processes("router")
    command = Path(f"/proc/{first.pid}/cmdline").read_text(encoding="utf-8").split("\0")[:-1]
    port, admin_port = free_port(), free_port()
    for flag, value in {
        "--port": port,
        "--admin-port": admin_port,
        "--uid": uid,
        "--link-keys-file": keys,
    }.items():
        command[command.index(flag) + 1] = str(value)
    token = command.index("--kill-token-file")  # in memory as well, and no page of this router kills
    del command[token : token + 2]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    router = SecondRouter(command, port, admin_port, process)

    def ready() -> bool:
        with contextlib.suppress(httpx2.TransportError):
            answer = httpx2.get(f"http://127.0.0.1:{admin_port}/readyz", timeout=5, verify=False)
            return answer.status_code == 200
        return False

    try:
        until(ready, 60, "readiness of a router")
        yield router
    finally:
        router.kill()


@pytest.fixture
def keys(one_each: LocalDeployment, tmp_path: Path) -> Path:
    """The routers' link keys as a file: `segue up` has them in memory that its children inherit."""
    (first,) = one_each.processes("router")
    words = Path(f"/proc/{first.pid}/cmdline").read_text(encoding="utf-8").split("\0")
    descriptor = words[words.index("--link-keys-file") + 1].rpartition("/")[2]
    path = tmp_path / "router.pem"
    path.touch(0o600)
    path.write_bytes(Path(f"/proc/{one_each.command.process.pid}/fd/{descriptor}").read_bytes())
    return path


@dataclass
class CutStream:
    """What a client has of a stream, over all its connections."""

    number: int
    text: str = ""
    last_id: str = ""
    done: bool = False
    events: int = 0
    heads: set[str] = field(default_factory=set)

    @property
    def body(self) -> dict[str, Any]:
        return {
            "model": "smollm2",
            "prompt": f"{self.number}. {PROMPTS[self.number % len(PROMPTS)]}",
            "seed": self.number,
            "temperature": 1.0,
            "max_tokens": TOKENS,
            "ignore_eos": True,
        }

    def read(self, router: SecondRouter, events_max: int | None) -> None:
        """Read from where it was cut until the end, or hang up after so many events."""
        headers = {"last-event-id": self.last_id} if self.last_id else {"x-segue-resumable": "true"}
        content = json.dumps({**self.body, "stream": True})
        with httpx2.stream(
            "POST", router.url, content=content, headers=headers, timeout=240, verify=False
        ) as response:
            assert response.status_code == 200, response.read()
            event_id, read = "", 0
            for line in response.iter_lines():
                name, _, value = line.partition(": ")
                if name == "id":
                    event_id = value
                elif name == "data" and value == "[DONE]":
                    self.done = True
                elif name == "data":
                    self._take(event_id, json.loads(value))
                    read += 1
                    if read == events_max:
                        return

    def _take(self, event_id: str, chunk: dict[str, Any]) -> None:
        assert event_id, "an event without an id"
        assert "error" not in chunk, chunk
        self.text += chunk["choices"][0]["text"]
        self.last_id = event_id
        self.heads.add(chunk["id"])
        self.events += 1


def undisturbed(router: SecondRouter, stream: CutStream) -> str:
    answer = httpx2.post(router.url, json=stream.body, timeout=240, verify=False)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def read_until_killed(router: SecondRouter, streams: list[CutStream], events: int) -> None:
    """Kill the router when each of the streams has so many events."""

    def read(stream: CutStream) -> None:
        with contextlib.suppress(httpx2.TransportError):
            stream.read(router, None)

    threads = [threading.Thread(target=read, args=(stream,)) for stream in streams]
    for thread in threads:
        thread.start()
    until(lambda: all(stream.events >= events for stream in streams), 240, "the first events")
    router.kill()
    for thread in threads:
        thread.join(60)


@pytest.mark.timeout(1500)
def test_fifty_streams_go_on_at_another_router_as_if_nothing_had_been(
    one_each: LocalDeployment, keys: Path
) -> None:
    rng = random.Random(26)
    streams = [CutStream(number) for number in range(STREAMS)]
    with ExitStack() as stack, ThreadPoolExecutor(AT_A_TIME) as clients:

        def start(uid: str) -> SecondRouter:
            return stack.enter_context(another_router(one_each, uid, keys))

        other = start("router-b")
        expected = list(clients.map(lambda stream: undisturbed(other, stream), streams))
        first = start("router-a")
        cut_by_client, cut_by_kill = streams[: STREAMS // 2], streams[STREAMS // 2 :]
        places = [rng.randint(1, TOKENS // 2) for _ in cut_by_client]
        list(clients.map(lambda stream, place: stream.read(first, place), cut_by_client, places))
        for begin in range(0, len(cut_by_kill), AT_A_TIME):
            doomed = first if begin == 0 else start(f"router-a{begin}")
            read_until_killed(doomed, cut_by_kill[begin : begin + AT_A_TIME], rng.randint(1, TOKENS // 3))
        cut = [stream for stream in streams if not stream.done]
        assert len(cut) >= STREAMS * 9 // 10, "most were cut before their end"
        list(clients.map(lambda stream: stream.read(other, None), cut))
        assert other.resumed() == len(cut)
    assert all(stream.done for stream in streams)
    assert [stream.text for stream in streams] == expected
    assert all(len(stream.heads) == 1 for stream in streams), "each is one answer to its client"
