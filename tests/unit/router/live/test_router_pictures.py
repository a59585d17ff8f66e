"""What another router sends is a picture, or nothing of it is shown."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from router.discovery.router_peers import RouterPeers
from router.live.feed import LiveFeed
from router.live.picture import REQUESTS_MAX
from router.live.router_pictures import ENTRIES_MAX, NAME_CHARACTERS_MAX, RouterPictures
from router.shell import RouterShell
from tests.doubles.memory_links import MemoryLinks
from tests.unit.router.deployment import ScriptedDeployment, hello

Json = dict[str, Any]
Shown = tuple[Json, Json, list[list[object]]]  # the fleet, the requests, the flow
FLOW = ["p", "d", "tcp", 1]
REQUEST = ["x", "decoding", "d", 1, 1, 0.5]


def own_picture() -> Json:
    async def take() -> Json:
        world = ScriptedDeployment()
        shell = RouterShell(world.core, MemoryLinks(hello("router", "r")))
        feed = LiveFeed(world.core, shell, "one", RouterPictures(None, "one", dict))  # type: ignore[arg-type]
        try:
            picture: Json = json.loads(feed.own_picture())
            return picture
        finally:
            feed.close()

    return asyncio.run(take())


def picture_of_another() -> Json:
    return own_picture() | {"router": "other", "flow": [FLOW], "requests": [REQUEST] * REQUESTS_MAX}


def shown_with(answer: bytes) -> Shown:
    """What a router shows when another one sends this."""

    class Answers(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Nothing."""

        def do_GET(self) -> None:
            """Send it, whatever the path is."""
            self.send_response(200)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

    async def show(url: str, own: Json) -> Shown:
        peers = RouterPeers("one", dict)
        pictures = RouterPictures(peers, "one", lambda: {"other": url})
        pictures.ask()
        await asyncio.gather(*pictures._asking.values())
        await peers.close()
        return pictures.with_own(own, [])

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            return asyncio.run(show(f"http://127.0.0.1:{server.server_address[1]}", own_picture()))
        finally:
            server.shutdown()


def test_a_picture_of_another_router_is_shown_without_what_is_unknown_here() -> None:
    sound = picture_of_another()
    sound["pods"][0]["newer"] = 1
    fleet, requests, flow = shown_with(json.dumps(sound | {"newer": 1}).encode())
    assert [router["name"] for router in fleet["routers"]] == ["one", "other"]
    assert len(fleet["pods"]) == len(sound["pods"])
    assert not [pod for pod in fleet["pods"] if "newer" in pod]
    assert len(requests["list"]) == REQUESTS_MAX
    assert flow == [FLOW]


SPOILT: dict[str, Callable[[Json], object]] = {
    "no totals": lambda picture: picture.pop("totals"),
    "a total less": lambda picture: picture["totals"].pop("states"),
    "a time that is none": lambda picture: picture["totals"].update(ttft_ms="1"),
    "a pod without a name": lambda picture: picture["pods"][0].pop("name"),
    "a long name": lambda picture: picture["pods"][0].update(name="x" * (NAME_CHARACTERS_MAX + 1)),
    "many pods": lambda picture: picture.update(pods=picture["pods"] * ENTRIES_MAX),
    "many requests": lambda picture: picture.update(requests=[REQUEST] * (REQUESTS_MAX + 1)),
    "a flow of text": lambda picture: picture.update(flow=[["p", "d", "tcp", "x"]]),
    "many flows": lambda picture: picture.update(flow=[FLOW] * (ENTRIES_MAX + 1)),
}


@pytest.mark.parametrize("what", ["no JSON", "no object", *SPOILT])
def test_of_what_is_no_picture_nothing_is_shown(what: str) -> None:
    spoilt = picture_of_another()
    if what in SPOILT:
        SPOILT[what](spoilt)
    others = {"no JSON": b"{", "no object": b"[]"}
    fleet, requests, flow = shown_with(others.get(what, json.dumps(spoilt).encode()))
    assert [router["name"] for router in fleet["routers"]] == ["one"]
    assert requests["list"] == flow == []
