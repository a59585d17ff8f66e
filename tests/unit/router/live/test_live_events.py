"""What is told to those who watch a router, and what watching may cost."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest

from router.live.feed import (
    BATCH_SECONDS,
    EVENTS_A_SECOND_MAX,
    WATCHERS_MAX,
    WATCHERS_OF_TENANT_MAX,
    LiveFeed,
)
from router.live.picture import REQUESTS_MAX, public_id
from router.live.router_pictures import RouterPictures
from router.shell import RouterShell
from tests.doubles.memory_links import MemoryLinks
from tests.unit.router.deployment import ScriptedDeployment, hello, request
from tests.unit.router.live.watching import Events, watching
from tests.unit.router.scripted_workers import MODEL, RunningRouter, Script
from tests.waiting import until

PROMPT = "marker-7f3a"


@pytest.fixture
def shown(model_folder: Path) -> Iterator[RunningRouter]:
    with RunningRouter(model_folder, live_page=True) as running:
        yield running


def ask(router: RunningRouter, prompt: str = PROMPT, tokens: int = 4) -> str:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens}
    rid: str = router.http.post("/v1/completions", json=body).raise_for_status().json()["id"]
    return rid.removeprefix("cmpl-")


@pytest.mark.parametrize("port", ["API", "admin"])
def test_a_request_is_seen_from_pod_to_pod_and_nothing_of_what_it_says(
    shown: RunningRouter, port: str
) -> None:
    with watching(shown.url if port == "API" else shown.admin_url) as events:
        fleet = events.until("fleet")
        assert {pod["name"]: pod["role"] for pod in fleet["pods"]} == {"p": "prefill", "d": "decode"}
        rid = ask(shown)
        shown_id = public_id(rid)
        for state, pod in (("prefilling", "p"), ("ready", "p"), ("decoding", "d"), ("finished", "d")):
            assert events.until("request", id=shown_id)["state"] == state
            assert f'"state":"{state}","pod":"{pod}"' in events.text
        totals = events.until("fleet")["totals"]
        assert totals["ended"] >= 1
        assert totals["ttft_ms"] is not None
        assert rid not in events.text
        assert PROMPT not in events.text
    known = shown.http.get(f"/live/requests/{shown_id}").json()
    assert known["id"] == shown_id
    assert known["state"] == "finished"
    assert shown.http.get(f"/live/requests/{rid}").json() == known, "a page knows the ids of its own requests"
    assert shown.http.get("/live/requests/unknown").status_code == 404


def test_a_stream_that_lost_its_pod_is_told_to_have_gone_on_elsewhere(shown: RunningRouter) -> None:
    shown.workers.script = Script(endless=True, on_demand=True)
    with ThreadPoolExecutor(1) as pool, watching(shown.url) as events:
        answer = pool.submit(ask, shown, "fox", 3)
        events.until("request", state="decoding")

        def lose_and_link() -> None:
            shown.workers.lose_decode()
            shown.workers.router.link(shown.workers.decode)

        shown.call(lose_and_link)
        moved = events.until("moved")
        assert (moved["from"], moved["to"], moved["outcome"]) == ("d", "d", "continued")
        assert moved["cause"] == "lost_decode"
        assert events.text.count('"state":"decoding"') == 2
        shown.workers.script.on_demand = False
        shown.call(shown.workers.wake)
        answer.result(20)


def test_with_nobody_watching_no_note_is_looked_at(shown: RunningRouter) -> None:
    assert shown.shell.watch_notes is None
    with watching(shown.admin_url) as events:
        events.until("fleet")
        assert shown.shell.watch_notes is not None
    until(lambda: shown.shell.watch_notes is None, 10, "the end of watching")


def test_no_more_may_watch_than_the_bound_says(shown: RunningRouter) -> None:
    """At each port, so that who uses the API keeps no operator out; and of one client, which keeps no other one out."""
    watchers: list[Events] = []
    with ExitStack() as stack:

        def watch(url: str, source: str) -> None:
            watchers.append(stack.enter_context(watching(url, source)))
            watchers[-1].until("fleet")

        def assert_refused(url: str, source: str) -> None:
            with watching(url, source) as refused:
                assert refused.status == 503

        for _ in range(WATCHERS_OF_TENANT_MAX):
            watch(shown.url, "127.0.0.1")
        assert_refused(shown.url, "127.0.0.1")
        for _ in range(WATCHERS_MAX - WATCHERS_OF_TENANT_MAX):
            watch(shown.url, "127.0.0.2")
        assert_refused(shown.url, "127.0.0.3")
        for _ in range(WATCHERS_MAX):
            watch(shown.admin_url, "127.0.0.1")
        assert_refused(shown.admin_url, "127.0.0.2")
    until(lambda: not shown.feed._watchers, 10, "places that are free again")


@pytest.mark.parametrize("port", ["API", "admin"])
def test_a_watcher_that_does_not_read_is_dropped(shown: RunningRouter, port: str) -> None:
    url = urlsplit(shown.url if port == "API" else shown.admin_url)
    with socket.create_connection((url.hostname or "", url.port or 0)) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.sendall(b"GET /live/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        until(lambda: bool(shown.feed._watchers), 10, "a watcher")
        data = b"event: sums\ndata: {}\n\n" * 4096

        def flood() -> None:
            for watcher in list(shown.feed._watchers):
                watcher.deliver(data)

        def dropped() -> bool:
            shown.call(flood)
            return not shown.feed._watchers

        until(dropped, 20, "the end of a watcher that does not read")


def test_a_router_that_drains_does_not_wait_for_those_who_watch(shown: RunningRouter) -> None:
    with watching(shown.url) as events, watching(shown.admin_url) as others:
        for each in (events, others):
            each.until("fleet")
        shown.call(shown._server.start_draining)
        events.to_the_end()
        with pytest.raises(httpx2.RemoteProtocolError):
            others.to_the_end()
    assert not shown.feed.has_room(None)
    with watching(shown.url) as refused:
        assert refused.status == 503


def test_a_router_shows_the_pods_and_requests_of_the_others(model_folder: Path) -> None:
    with (
        RunningRouter(model_folder, uid="one", live_page=True) as one,
        RunningRouter(model_folder, uid="other") as other,
        ThreadPoolExecutor(1) as pool,
        watching(one.url) as events,
    ):
        one.peers.update({"one": one.admin_url, "other": other.admin_url})
        other.workers.script = Script(endless=True, on_demand=True)
        answer = pool.submit(ask, other, "fox", 3)
        while not (listed := events.until("requests")["list"]):
            pass
        assert listed[0][1:3] == ["decoding", "d"]
        fleet = events.until("fleet")
        assert [(each["name"], each["requests"]) for each in fleet["routers"]] == [("one", 0), ("other", 1)]
        assert fleet["totals"]["states"]["decoding"] == 1
        assert [pod["name"] for pod in fleet["pods"]] == ["p", "d"], "a pod is one, whoever shows it"
        assert one.http.get(f"/live/requests/{listed[0][0]}").json()["state"] == "decoding"
        other.workers.script.on_demand = False
        other.call(other.workers.wake)
        answer.result(20)


# ---- the bound: watchers and events ----------------------------------------------------------------------------------


class CountingWatcher:
    """Counts what it is given."""

    def __init__(self) -> None:
        self.came = asyncio.Event()
        self.deliveries = 0
        self.data = b""

    def deliver(self, data: bytes) -> None:
        self.came.set()
        self.deliveries += 1
        self.data += data

    def end(self) -> None:
        """Nothing is left to do."""


def test_however_much_happens_watchers_are_told_a_bounded_number_of_events_and_the_sums() -> None:
    """All places are taken, and five times as many requests come and go as are told one by one."""

    async def watch() -> tuple[list[CountingWatcher], int, float]:
        world, loop, sent = ScriptedDeployment(), asyncio.get_running_loop(), 0
        shell = RouterShell(world.core, MemoryLinks(hello("router", "r")))
        feed = LiveFeed(world.core, shell, "r", RouterPictures(None, "r", dict))  # type: ignore[arg-type]
        watchers = [CountingWatcher() for _ in range(2 * WATCHERS_MAX)]
        began_at = loop.time()
        assert all(feed.watch(watcher) for watcher in watchers[:WATCHERS_MAX])
        assert all(feed.watch(watcher, str(at % 2)) for at, watcher in enumerate(watchers[WATCHERS_MAX:]))
        while watchers[0].data.count(b"event: sums") < 3:
            for _ in range(5 * EVENTS_A_SECOND_MAX):
                shell.submit(request(f"r{sent}"), NoSink())
                shell.cancel(f"r{sent}")
                sent += 1
            watchers[0].came.clear()
            await watchers[0].came.wait()
        feed.close()
        return watchers, sent, loop.time() - began_at

    watchers, sent, seconds = asyncio.run(asyncio.wait_for(watch(), 60))
    for watcher in watchers:
        told = watcher.data.count(b"event: request\n")
        assert 0 < told <= (seconds + 1) * EVENTS_A_SECOND_MAX
        assert watcher.deliveries <= (seconds + 1) * (1 / BATCH_SECONDS + 1)
        sums = [
            int(part.split(b"}")[0]) for part in watcher.data.split(b'event: sums\ndata: {"request":')[1:]
        ]
        assert told + sum(sums) >= sent - 5 * EVENTS_A_SECOND_MAX, "what is not told is in the sums"
    assert len({watcher.data for watcher in watchers}) == 1


class NoSink:
    """Takes the output of a request that nobody asked for."""

    def tokens(self, token_ids: tuple[int, ...], logprobs: object) -> None:
        """Not looked at."""

    def scored(self, logprobs: object) -> None:
        """Not looked at."""

    def ended(self, outcome: object) -> None:
        """Not looked at."""


def test_a_picture_lists_a_bounded_number_of_requests_and_counts_the_others() -> None:
    async def picture() -> bytes:
        world = ScriptedDeployment()
        shell = RouterShell(world.core, MemoryLinks(hello("router", "r")))
        for number in range(REQUESTS_MAX + 50):
            shell.submit(request(f"r{number}"), NoSink())
        feed = LiveFeed(world.core, shell, "r", RouterPictures(None, "r", dict))  # type: ignore[arg-type]
        try:
            return feed.own_picture()
        finally:
            feed.close()

    shown = asyncio.run(picture())
    assert b'"unlisted":50' in shown
    assert shown.count(b'"waiting",') + shown.count(b'"prefilling",') == REQUESTS_MAX
