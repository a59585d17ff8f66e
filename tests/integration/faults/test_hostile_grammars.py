"""Hostile grammars cost nobody but their senders: each is refused or answered within bounds, while others stream on."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from time import monotonic
from typing import Any

import httpx2
import pytest

from shared.engine.sampling.masks import TENANT_SECONDS
from tests.abuse.procfs import PeakMemory
from tests.hostile_grammars import HOSTILE
from tests.integration.deployments.deployment import LocalDeployment
from tests.integration.deployments.streams import client_of, complete
from tests.waiting import soon, until

ANSWER_SECONDS_MAX = 2.0
GROWN_BYTES_MAX = 64 << 20
GAP_SECONDS_MAX = 0.3
MAX_TOKENS = 8
ENDLESS: dict[str, Any] = {"max_tokens": 8000, "extra_body": {"ignore_eos": True}}


class Gaps:
    """The longest time between two pieces of a stream."""

    def __init__(self) -> None:
        self.longest = 0.0
        self._last = 0.0

    def note(self) -> None:
        now = monotonic()
        if self._last:
            self.longest = max(self.longest, now - self._last)
        self._last = now

    def reset(self) -> None:
        self.longest = 0.0


def ask(url: str, fields: dict[str, Any]) -> tuple[int, dict[str, Any], float]:
    """Status, body and seconds of a constrained completion."""
    body = {
        "model": "smollm2",
        "prompt": "It is ",
        "max_tokens": MAX_TOKENS,
        "temperature": 1.0,
        "seed": 3,
    } | fields
    began = monotonic()
    response = httpx2.post(f"{url}/v1/completions", json=body, timeout=60, verify=False)
    return response.status_code, json.loads(response.content), monotonic() - began


async def beside_a_stream(url: str, attack: Callable[[Gaps], None]) -> None:
    """Run `attack` on a thread while a client streams, and note the gaps of its stream."""
    gaps, flowing = Gaps(), asyncio.Event()

    def on_text() -> None:
        gaps.note()
        flowing.set()

    async with client_of(url) as client:
        stream = asyncio.create_task(complete(client, "Once upon a time", on_text, **ENDLESS))
        await flowing.wait()
        try:
            await asyncio.to_thread(attack, gaps)
            assert not stream.done(), "the stream beside it has ended"
        finally:
            stream.cancel()


@pytest.mark.timeout(900)
def test_a_hostile_grammar_is_refused_or_bounded_and_others_stream_on(
    one_each: LocalDeployment, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(HOSTILE) >= 40
    processes = one_each.processes()
    # whatever is loaded for the first one
    assert ask(one_each.url, {"guided_json": {"type": "object"}})[0] == 200
    memory = {process.uid: PeakMemory(process.pid) for process in processes}
    slow: dict[str, float] = {}
    gaps_met: dict[str, float] = {}
    wrong: dict[str, Any] = {}

    def attack(gaps: Gaps) -> None:
        for name, fields in HOSTILE.items():
            gaps.reset()
            status, answer, seconds = ask(one_each.url, fields)
            slow[name], gaps_met[name] = seconds, gaps.longest
            if status == 200:
                assert answer["usage"]["completion_tokens"] <= MAX_TOKENS
            elif status != 400 or len(answer["error"]["message"]) > 1000:
                wrong[name] = status, answer

    asyncio.run(beside_a_stream(one_each.url, attack))
    grown = {uid: peak.growth() for uid, peak in memory.items()}
    slowest, gapped = max(slow, key=lambda name: slow[name]), max(gaps_met, key=lambda name: gaps_met[name])
    with capsys.disabled():
        mib = {uid: size >> 20 for uid, size in grown.items()}
        sys.stdout.write(
            f"\n{len(slow)} grammars: {slowest!r} took {slow[slowest]:.2f} s, {gapped!r} a gap of"
            f" {gaps_met[gapped]:.2f} s, MiB {mib}\n"
        )
    assert wrong == {}
    assert {name: s for name, s in slow.items() if s > soon(ANSWER_SECONDS_MAX)} == {}
    assert {name: s for name, s in gaps_met.items() if s > soon(GAP_SECONDS_MAX)} == {}
    assert {uid: size for uid, size in grown.items() if size > GROWN_BYTES_MAX} == {}
    assert one_each.processes() == processes, "a process was started again"


DEAR = {"ebnf": 'start: s\ns: s s | "a"', "n": 16, "max_tokens": 60}
ALICE, BOB = "127.0.0.2", "127.0.0.3"  # tenants


def from_address(address: str, url: str, **fields: Any) -> httpx2.Response:
    body = {"model": "smollm2", "prompt": "It is", "temperature": 1.0, "seed": 3} | fields
    with httpx2.Client(transport=httpx2.HTTPTransport(local_address=address), timeout=300) as client:
        return client.post(f"{url}/v1/completions", json=body)


@pytest.mark.timeout(600)
def test_the_grammars_of_one_tenant_have_a_budget_in_the_steps_of_others(one_each: LocalDeployment) -> None:
    """In CPU seconds of the thread that computes steps, so that a busy machine does not show."""

    def figures() -> list[float]:
        names = (
            "segue_mask_seconds_total",
            "segue_rows_without_mask_total",
            "segue_steps_total{mode=decode}",
        )
        return [one_each.total("decode", name) for name in names]

    def attack() -> list[int]:
        return [from_address(ALICE, one_each.url, **DEAR).status_code for _ in iter(ended.is_set, True)]

    ended = Event()
    long = {"max_tokens": 150, "ignore_eos": True}
    alone = from_address(BOB, one_each.url, **long)
    with ThreadPoolExecutor(1) as pool:
        attacking = pool.submit(attack)
        until(lambda: figures()[0] > 0.2, 120, "masks that take time")
        before = figures()
        beside = from_address(BOB, one_each.url, **long)
        seconds, rows, steps = (now - was for now, was in zip(figures(), before, strict=True))
        ended.set()
        assert {*attacking.result()} <= {200, 400}
    assert rows > 0
    assert steps >= 140
    assert seconds / steps < 1.5 * TENANT_SECONDS
    assert beside.json()["choices"] == alone.json()["choices"]
