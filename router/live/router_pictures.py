"""The pictures of the other routers of a release: asked while this one is watched, and joined with its own.

Each router knows its own requests only, so the one that is watched asks the others each second, on their admin ports,
as it does for `/debug`. A picture that does not come, or is none (`Picture`), stays out; one that is older than
OLD_SECONDS is not shown.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import msgspec
import structlog

from router.discovery.router_peers import RouterPeers
from router.live.picture import REQUESTS_MAX

PICTURE_PATH = "/live/picture"
REQUEST_PATH = "/live/requests/"
ROUTERS_SHOWN = 8  # that are shown, this one among them
OLD_SECONDS = 3.0
NAME_CHARACTERS_MAX = 1024
ENTRIES_MAX = 4096  # pods, flows and states in a picture

log = structlog.get_logger(__name__)

Json = dict[str, Any]
Text = Annotated[str, msgspec.Meta(max_length=NAME_CHARACTERS_MAX)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]  # what a page's script can count
Milliseconds = Annotated[float, msgspec.Meta(ge=0)]


# ---- what another router has to send, `picture.FleetPicture.take` and the flow; what else it sends is left out -------


class PodPicture(msgspec.Struct):
    """A worker, as a router knows it."""

    name: Text
    role: Text
    state: Text
    group: Count
    slots: tuple[int, int]
    pages: tuple[int, int, int]
    queued_tokens: Count
    requests: Count
    step_ms: Milliseconds
    tokens_per_second: Count


class PictureTotals(msgspec.Struct):
    """The sums of a router's requests."""

    tokens_per_second: Count
    states: Annotated[dict[Text, Count], msgspec.Meta(max_length=ENTRIES_MAX)]
    ttft_ms: Milliseconds | None
    token_ms: Milliseconds | None
    ended: Count
    rejected: Count
    errors: Count
    migrated: Count
    continued: Count


class Picture(msgspec.Struct):
    """A router's fleet and requests."""

    router: Text
    pods: Annotated[list[PodPicture], msgspec.Meta(max_length=ENTRIES_MAX)]
    totals: PictureTotals
    requests: Annotated[
        list[tuple[Text, Text, Text, Count, Count, float]], msgspec.Meta(max_length=REQUESTS_MAX)
    ]
    unlisted: Count
    flow: Annotated[list[tuple[Text, Text, Text, Count]], msgspec.Meta(max_length=ENTRIES_MAX)]


# ---- asking ----------------------------------------------------------------------------------------------------------


class RouterPictures:
    """What the other routers show; on the event loop."""

    def __init__(self, peers: RouterPeers, name: str, routers: Callable[[], Mapping[str, str]]):
        self._peers = peers
        self._name = name
        self._routers = routers
        self._pictures: dict[str, tuple[float, Json]] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._loop = asyncio.get_running_loop()

    def ask(self) -> None:
        """Ask each of the others that is not being asked already; answers are there for the next picture."""
        urls = [(name, url) for name, url in self._routers().items() if name != self._name]
        for name, url in urls[: ROUTERS_SHOWN - 1]:
            if name not in self._asking:
                self._asking[name] = asyncio.create_task(self._ask(name, url))

    async def _ask(self, name: str, url: str) -> None:
        try:
            answer = await self._peers.get(url, PICTURE_PATH)
            if answer is not None and answer[0] == 200:
                picture: Json = msgspec.to_builtins(msgspec.json.decode(answer[1], type=Picture))
                self._pictures[name] = (self._loop.time(), picture)
        except msgspec.MsgspecError as error:
            log.warning("live.unsound_picture", url=url, error=str(error))
        finally:
            del self._asking[name]

    def with_own(self, own: Json, flow: list[list[object]]) -> tuple[Json, Json, list[list[object]]]:
        """What is shown as `fleet`, `requests` and `flow`: of this router and of all that have answered."""
        earliest = self._loop.time() - OLD_SECONDS
        self._pictures = {name: each for name, each in self._pictures.items() if each[0] >= earliest}
        pictures = [own, *(picture for _, picture in self._pictures.values())]
        fleet = {
            "router": own["router"],
            "routers": [_router(picture) for picture in pictures],
            "pods": _pods(pictures),
            "totals": _totals([picture["totals"] for picture in pictures]),
        }
        listed = [request for picture in pictures for request in picture["requests"]]
        requests = {"list": listed, "unlisted": sum(picture["unlisted"] for picture in pictures)}
        flows = Counter({tuple(each[:3]): each[3] for each in flow})
        for picture in pictures[1:]:
            flows.update({tuple(each[:3]): each[3] for each in picture["flow"]})
        return fleet, requests, [[*pair, size] for pair, size in flows.items()]

    async def find(self, shown_id: str) -> bytes | None:
        """What another router knows of the request that it has shown under this id; None: none knows it."""
        for name, (_, picture) in self._pictures.items():
            url = self._routers().get(name)
            if url is not None and any(request[0] == shown_id for request in picture["requests"]):
                answer = await self._peers.get(url, f"{REQUEST_PATH}{shown_id}")
                return answer[1] if answer is not None and answer[0] == 200 else None
        return None


def _router(picture: Json) -> Json:
    totals = picture["totals"]
    return {
        "name": picture["router"],
        "requests": sum(totals["states"].values()),
        "tokens_per_second": totals["tokens_per_second"],
    }


def _pods(pictures: list[Json]) -> list[Json]:
    """Each pod once. What it has told is as new everywhere; streams through each router are added up."""
    pods: dict[str, Json] = {}
    for picture in pictures:
        for pod in picture["pods"]:
            known = pods.setdefault(pod["name"], {**pod, "requests": 0, "tokens_per_second": 0})
            known["requests"] += pod["requests"]
            known["tokens_per_second"] += pod["tokens_per_second"]
    return list(pods.values())


def _totals(totals: list[Json]) -> Json:
    """Counts are added up; of a time that 95 % keep to, the longest is shown."""
    states: Counter[str] = Counter()
    for each in totals:
        states.update(each["states"])
    times = {
        name: [each[name] for each in totals if each[name] is not None] for name in ("ttft_ms", "token_ms")
    }
    sums = ("tokens_per_second", "ended", "rejected", "errors", "migrated", "continued")
    return {
        **{name: sum(each[name] for each in totals) for name in sums},
        **{name: max(values, default=None) for name, values in times.items()},
        "states": states,
    }
