"""The pages of a router's admin port: those of every process, fresh metrics, `/debug/requests/{id}`, the live page.

The port has a thread of its own, the core belongs to the event loop. So what needs the core is asked of the loop, for a
bounded time: while the loop hangs, `/metrics` shows what was published last, `/debug` says so, and the probes do not
need it at all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import msgspec

from router.discovery.router_peers import RouterPeers
from router.live.endpoint import LiveAdminPages
from router.replies import error_body
from router.shell import RouterShell
from shared.process.admin_port import AdminPage, AnswerPath

PUBLISH_SECONDS_MAX = 1.0  # for the loop to publish its figures before a scrape
DEBUG_SECONDS_MAX = 5.0  # another router may have to be asked, within `router_peers.ANSWER_SECONDS_MAX`
DEBUG = "/debug/requests/"

Result = TypeVar("Result")


class RouterPages:
    """Answers paths on the admin port's thread; made on the event loop that owns `shell`."""

    def __init__(
        self,
        pages: AnswerPath,
        publish: Callable[[], None],
        shell: RouterShell,
        peers: RouterPeers,
        prompts_max: int,
        live: LiveAdminPages,
    ):
        self._pages = pages
        self._publish = publish
        self._shell = shell
        self._peers = peers
        self._prompts_max = prompts_max
        self._live = live
        self._loop = asyncio.get_running_loop()

    async def answer(self, path: str, accept: str) -> AdminPage:
        """The page at this path, for a client that accepts this."""
        if path.startswith(DEBUG) or self._live.takes(path):
            page = (
                self._debug(path.removeprefix(DEBUG)) if path.startswith(DEBUG) else self._live.answer(path)
            )
            try:
                return await self._on_loop(page, DEBUG_SECONDS_MAX)
            except TimeoutError:
                return _json(503, error_body(503, "the router's loop does not answer"))
        if path == "/metrics":
            await self._publish_now()
        return await self._pages(path, accept)

    async def _publish_now(self) -> None:
        async def publish() -> None:
            self._publish()

        try:
            await self._on_loop(publish(), PUBLISH_SECONDS_MAX)
        except TimeoutError:
            return  # older figures are better than none

    async def _on_loop(self, work: Coroutine[Any, Any, Result], seconds_max: float) -> Result:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        return await asyncio.wait_for(asyncio.wrap_future(future), seconds_max)

    # ---- on the event loop -------------------------------------------------------------------------------------

    async def _debug(self, request_id: str) -> AdminPage:
        rid = (
            request_id.removeprefix("chatcmpl-")
            .removeprefix("cmpl-")
            .removeprefix("resp_")
            .removeprefix("msg_")
        )
        found = self._own(rid)
        if found is not None:
            return _json(200, found)
        url = self._peers.owner_url(rid) if rid.replace("-", "").isalnum() else None
        if url is None:
            return _json(404, error_body(404, "no request of this id is known any more"))
        answer = await self._peers.get(url, f"{DEBUG}{rid}")
        if answer is None:
            return _json(502, error_body(502, "the router that served it gives no answer"))
        status, body = answer
        return AdminPage(status, "application/json", body)

    def _own(self, rid: str) -> dict[str, Any] | None:
        found = self._shell.debug(rid)
        if found is not None:
            return found
        choices = [self._shell.debug(f"{rid}-{index}") for index in range(self._prompts_max)]
        return {"id": rid, "choices": [choice for choice in choices if choice]} if choices[0] else None


def _json(status: int, body: dict[str, Any]) -> AdminPage:
    return AdminPage(status, "application/json", msgspec.json.encode(body))
