"""What a request and a token cost the router in CPU time: the real core and shell, workers that a script plays.

    python -m tests.benchmarks.router [--requests 4096] [--prefill 2] [--decode 2] [--keys] [--watched]

No HTTP, tokenizer or sockets: it is the part of a request that grows with the fleet and with the log. Log lines go to
/dev/null, once for each level. With --keys each request is one of an API key that has a limit of tokens, and is
accounted; the look at its header is left out. With --watched a
live page is open. The time is that of the whole process, so a thread that writes lines counts.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import uvloop

from router.access.key_ring import KeyCounters
from router.access.keyed_clients import UsageAccount, UsageAccounts
from router.access.quotas import Quotas
from router.config import RouterConfig
from router.core.dispatch import RouterCore
from router.core.effects import ClientRequest, Outcome
from router.discovery.router_peers import RouterPeers
from router.live.feed import LiveFeed
from router.live.router_pictures import RouterPictures
from router.shell import RouterShell
from shared.kv.page_pool import pages_for_tokens
from shared.links.events import LinkEvent, PeerUp, Received
from shared.process import logs
from shared.process.api_keys import ApiKey
from shared.process.metrics import Metrics
from shared.wire.baton import Baton, Holder, agent_name
from shared.wire.messages import Finished, Generated, Hello, Joined, Limits, Message, Prefilled, Role, Row
from shared.wire.sampled import Logprobs
from shared.wire.sampling_params import SamplingParams

TOGETHER = 64  # requests at a time: as many messages come in one turn of the loop
SHORT, LONG = 2, 52  # tokens of a request: two lengths tell its own cost from that of its tokens
PROMPT = tuple(range(256))
LIMITS = Limits(context_len=4096, page_size=16, pages=100_000, slots=256, vocab_size=1000)
KEY = ApiKey("bench", b"", rpm=10**9, tpm=10**11, concurrent=10**6)


def holder_of(uid: str) -> Holder:
    """Where a worker of this script would have its pages."""
    return Holder(uid, 1, agent_name(uid, 1), b"", 0, 64, 0)


class ScriptedLinks:
    """Links whose other ends are this script: what the router sends is remembered by request, and no more."""

    def __init__(self) -> None:
        self.peers: dict[str, str] = {}  # by rid: who was given the request last
        self.waiting: list[LinkEvent] = []

    def receive(self, timeout_seconds: float) -> list[LinkEvent]:
        """All that waits."""
        del timeout_seconds
        events, self.waiting = self.waiting, []
        return events

    def send(self, peer: str, message: Message) -> None:
        """Note which worker was sent a request; other messages are ignored."""
        if hasattr(message, "token_ids"):
            self.peers[message.rid] = peer  # type: ignore[attr-defined]

    def end_session(self, peer: str, reason: str) -> None:
        """These workers are never dropped."""
        raise AssertionError(f"{peer}: {reason}")


class SilentSink:
    """A client that reads everything at once."""

    def tokens(self, token_ids: tuple[int, ...], logprobs: Logprobs) -> None:
        """Tokens have come."""

    def scored(self, logprobs: Logprobs) -> None:
        """Of its prompt."""

    def ended(self, outcome: Outcome) -> None:
        """The request is over."""


class Bench:
    """A router and its workers. `run` may be called again: a request of the bench has its own number."""

    def __init__(self, prefill: int, decode: int, keys: bool):
        self.links = ScriptedLinks()
        settings = RouterConfig(served_model_name="m", ready_max=1024)
        self.core = RouterCore(settings, asyncio.get_running_loop().time())
        self.shell = RouterShell(self.core, self.links)
        self._metrics = Metrics("router")
        self._served = 0
        self._accounts: UsageAccounts | None = None
        if keys:
            now = asyncio.get_running_loop().time
            self._accounts = UsageAccounts(KeyCounters(), now, logged=False)
            self._quotas = Quotas(lambda: 2, lambda: {KEY.name})
        for role, count in (("prefill", prefill), ("decode", decode)):
            for number in range(count):
                hello = _hello(role, f"{role}-{number}")  # type: ignore[arg-type]
                self.links.waiting.append(PeerUp(hello.uid, hello))

    async def run(self, requests: int, tokens: int) -> float:
        """Serve `requests`, `TOGETHER` at a time, each with `tokens` tokens; returns CPU seconds a request."""
        await self._turn()
        began = time.process_time()
        for _ in range(requests // TOGETHER):
            rids = [f"request{number}" for number in range(self._served, self._served + TOGETHER)]
            self._served += TOGETHER
            accounts = [] if self._accounts is None else [self._open(rid) for rid in rids]
            await self._begin(rids, accounts)
            for index in range(1, tokens):
                await self._step(rids, index)
            await self._say({rid: Finished(rid, 1, tokens, "length") for rid in rids})
            for account in accounts:
                self._close(account)
            self._metrics.publish(self.core.counters)  # which counts each measurement in its histogram
        for handler in logging.getLogger().handlers:
            handler.flush()
        spent = time.process_time() - began
        assert self.core.counters.requests["length"] == self._served
        return spent / (requests // TOGETHER * TOGETHER)

    def _open(self, rid: str) -> UsageAccount:
        """What the guard does before a request, but for its header."""
        assert self._accounts is not None
        now = self._accounts.now()
        quota = self._quotas.of(KEY, now)
        assert quota.enter(now) is None
        quota.headers(now)
        return self._accounts.open(rid, KEY, quota)

    def _close(self, account: UsageAccount) -> None:
        assert self._accounts is not None
        account.quota.leave()
        self._accounts.close(account)

    async def _begin(self, rids: list[str], accounts: list[UsageAccount]) -> None:
        for number, rid in enumerate(rids):
            params = SamplingParams(max_new_tokens=1000, seed=0)
            request, sink = ClientRequest(rid=rid, model="m", token_ids=PROMPT, params=params), SilentSink()
            self.shell.submit(*accounts[number].metered(request, sink) if accounts else (request, sink))
        pages = tuple(range(pages_for_tokens(len(PROMPT), LIMITS.page_size)))
        holders = {rid: holder_of(self.links.peers[rid]) for rid in rids}
        batons = {
            rid: Baton(rid, 1, holders[rid], "kv", 0, 1, len(PROMPT), len(PROMPT), pages) for rid in rids
        }
        await self._say({rid: Prefilled(rid, 1, 0, (1,), baton) for rid, baton in batons.items()})
        await self._say({rid: Joined(rid, 1, 64, 0, 0.001) for rid in rids})

    async def _step(self, rids: list[str], index: int) -> None:
        rows: dict[str, list[Row]] = {}
        for rid in rids:
            rows.setdefault(self.links.peers[rid], []).append(Row(rid, 1, index, (index,)))
        for peer, those in rows.items():
            self.links.waiting.append(Received(peer, Generated(tuple(those))))
        await self._turn()

    async def _say(self, messages: Mapping[str, Message]) -> None:
        for rid, message in messages.items():
            self.links.waiting.append(Received(self.links.peers[rid], message))
        await self._turn()

    async def _turn(self) -> None:
        self.shell.links_ready()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not self.links.waiting


def _hello(role: Role, uid: str) -> Hello:
    return Hello(
        session=1, role=role, uid=uid, epoch=1, model_name="m", model="w", kv_format="kv", limits=LIMITS
    )


@contextmanager
def _stderr_to_nowhere() -> Iterator[None]:
    """Log lines are written for real, to a device that takes them at once."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(nowhere)


class SilentWatcher:
    """A live page that reads everything at once."""

    def deliver(self, data: bytes) -> None:
        """Events have come."""

    def end(self) -> None:
        """The router ends."""


async def _measure(
    prefill: int, decode: int, requests: int, keys: bool, watched: bool
) -> tuple[float, float]:
    """CPU seconds of a request without its tokens, and of a token."""
    bench = Bench(prefill, decode, keys)
    if watched:
        alone = RouterPictures(RouterPeers("router", dict), "router", dict)
        LiveFeed(bench.core, bench.shell, "router", alone).watch(SilentWatcher())
    await bench.run(requests // 4, SHORT)  # warm
    short = await bench.run(requests, SHORT)
    long = await bench.run(requests, LONG)
    token = (long - short) / (LONG - SHORT)
    return short - SHORT * token, token


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.router", description="CPU time of a request"
    )
    parser.add_argument("--requests", type=int, default=4096)
    parser.add_argument("--prefill", type=int, default=2, help="prefill workers")
    parser.add_argument("--decode", type=int, default=2, help="decode workers")
    parser.add_argument("--keys", action="store_true", help="with API keys")
    parser.add_argument("--watched", action="store_true", help="with a live page")
    options = parser.parse_args()
    for level in ("warning", "info"):
        with _stderr_to_nowhere(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            logs.configure(level, "json", role="router", uid="router-0")
            request, token = runner.run(
                _measure(options.prefill, options.decode, options.requests, options.keys, options.watched)
            )
        sys.stdout.write(f"{level:8} {request * 1e6:7.1f} µs a request {token * 1e6:7.2f} µs a token\n")


if __name__ == "__main__":
    main()
