"""A client that hangs up before its first token: whatever stage its request is in, everything comes back.

The stage is held by freezing a worker, so nothing here depends on who is faster.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager

import pytest

from tests.integration.deployments.deployment import LocalDeployment, RoleConfigs, deployment
from tests.integration.deployments.streams import client_of, complete
from tests.waiting import soon, until

PATIENT = {"silenceSeconds": 60}  # with the frozen
CHUNK_TOKENS = 32
LONG_PROMPT = [100 + k % 4000 for k in range(4000)]


@pytest.fixture(scope="module")
def narrow() -> Iterator[LocalDeployment]:
    """One request at a time before decode, in small chunks, and KV that only a living holder serves."""
    config: RoleConfigs = {
        "router": {"readyMax": 1, **PATIENT},
        "prefill": {"kvPages": 400, "chunkedPrefillSize": CHUNK_TOKENS, "kvTransport": "tls", **PATIENT},
        "decode": {"kvPages": 400, "kvTransport": "tls", **PATIENT},
    }
    with deployment(config=config) as running:
        yield running


@contextmanager
def frozen(running: LocalDeployment, role: str) -> Iterator[None]:
    """The only worker of this role stands still."""
    (worker,) = running.processes(role)
    os.kill(worker.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(worker.pid, signal.SIGCONT)


@asynccontextmanager
async def request(running: LocalDeployment, prompt: list[int]) -> AsyncIterator[None]:
    """A stream that its client cuts at the end of the block; it must not have ended by itself."""
    async with client_of(running.url) as client:
        stream = asyncio.create_task(complete(client, prompt, max_tokens=50, extra_body={"ignore_eos": True}))
        yield
        assert not stream.done()
        stream.cancel()
        await asyncio.wait([stream])


async def happens(condition: Callable[[], object], what: str, seconds_max: float | None = None) -> None:
    await asyncio.to_thread(until, condition, seconds_max or soon(1), what)


def test_a_request_that_waits_in_the_router_is_forgotten(narrow: LocalDeployment) -> None:
    async def run() -> None:
        with frozen(narrow, "prefill"):
            async with request(narrow, [1, 2, 3]):
                await happens(
                    lambda: narrow.live_requests("prefilling") == 1, "the first one's placement", 10
                )
                async with request(narrow, [4, 5, 6]):
                    await happens(
                        lambda: narrow.live_requests("waiting") == 1, "the second one's waiting", 10
                    )
                await happens(lambda: narrow.live_requests("waiting") == 0, "the second one's end")
                assert narrow.live_requests("prefilling") == 1
            await happens(lambda: narrow.live_requests("prefilling") == 0, "the first one's end")

    before = narrow.total("prefill", "segue_extend_tokens_total")
    asyncio.run(run())
    until(lambda: not narrow.held(), soon(1), "everything given back")
    computed = narrow.total("prefill", "segue_extend_tokens_total") - before
    assert computed in (0, 3), "the first may have been begun as its worker woke up, the second never was"


def test_a_request_in_the_middle_of_its_chunks_is_given_up(narrow: LocalDeployment) -> None:
    def computed() -> float:
        return narrow.total("prefill", "segue_extend_tokens_total") - before

    async def run() -> None:
        async with request(narrow, LONG_PROMPT):
            await happens(lambda: computed() >= 2 * CHUNK_TOKENS, "two chunks", 30)

    before = narrow.total("prefill", "segue_extend_tokens_total")
    asyncio.run(run())
    until(lambda: not narrow.held(), soon(1), "everything given back")
    assert computed() < len(LONG_PROMPT)


def test_a_request_whose_pages_arrive_is_given_up_when_the_read_has_ended(narrow: LocalDeployment) -> None:
    def pages(state: str) -> float:
        return narrow.total("decode", f"segue_pages{{state={state}}}")

    async def run() -> None:
        with ExitStack() as decode, ExitStack() as prefill:
            decode.enter_context(frozen(narrow, "decode"))
            async with request(narrow, [7 + k for k in range(100)]):
                await happens(lambda: narrow.live_requests("decoding") == 1, "its placement on decode", 10)
                prefill.enter_context(frozen(narrow, "prefill"))
                decode.close()
                await happens(lambda: pages("arriving"), "the read", 10)
            await happens(lambda: narrow.live_requests("decoding") == 0, "the end at the router")
            await happens(lambda: pages("quarantined"), "the quarantine of what the read may still write to")

    asyncio.run(run())
    until(lambda: not narrow.held(), 5, "everything given back")
