"""The live page over HTTP: on the port of the API where the settings say so, and on the admin port always.

    GET  /                    the page, for a browser (Accept: text/html); on the API's port programs get its paths
    GET  /live/events         what happens, as server-sent events
    GET  /live/requests/ID    what is known of one request, by the id in the events
    GET  /live/picture        what another router asks for; admin port alone
    POST /live/kill           end a worker; under `segue up` alone

A page of another origin gets none of it, whatever the API allows to it: an Origin other than this server's is refused,
as is what a browser says comes from another site. The token for `/live/kill` is in no answer: `segue up` draws it, and
prints the page's address with it behind a #, which browsers keep to themselves. So who may kill is who sees that
terminal, not everybody on the machine. Where the API listens to others without keys, a page may have had its own name
pointed here (DNS rebinding), so only names are served that public DNS cannot have, and those in `allowed_hosts`. What
carries the events drops a watcher that leaves more than UNREAD_BYTES_MAX unread.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import html
import os
import re
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import structlog
from starlette.types import Receive, Scope, Send

from router.config import RouterConfig
from router.core.dispatch import RouterCore
from router.discovery.router_peers import RouterPeers
from router.live.feed import LiveFeed, Watcher
from router.live.router_pictures import PICTURE_PATH, REQUEST_PATH, RouterPictures
from router.replies import error_body, send_json, send_start
from router.request_context import context_of, tenant_of
from router.shell import RouterShell
from shared.process.admin_port import AdminPage
from shared.process.listening import is_loopback, is_private_in_a_network, name_in

EVENTS_PATH = "/live/events"
KILL_PATH = "/live/kill"
TOKEN_HEADER = b"x-segue-live-token"
UNREAD_BYTES_MAX = 512 << 10
BODY_BYTES_MAX = 1024
TOO_MANY = error_body(
    503, "as many watch this router as may, or as may of one client: close another live page"
)
ELSEWHERE = error_body(403, "only the page of this server may read this: open / in a browser")
OTHER_HOST = error_body(
    403, "any site may have this name: open the live page by an address, or add the name to allowed_hosts"
)
NO_TOKEN = error_body(
    403, "only who has the address that `segue up` prints kills workers: open it whole, with what follows #"
)
NOTHING = error_body(404, "there is nothing at this path; the live page is at /")
UNKNOWN = error_body(404, "no request of this id is known any more")
_BLOCKS = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)

log = structlog.get_logger(__name__)

Headers = Mapping[bytes, bytes]


@cache
def template() -> str:
    """The page as it lies in the package; `{{config}}` stands for what a server says of itself."""
    return Path(__file__).with_name("page.html").read_text(encoding="utf-8")


@cache
def security_headers() -> tuple[tuple[bytes, bytes], ...]:
    """Let the page run its own script and style, known by their hashes, and speak with its own server alone."""
    hashes: dict[str, str] = {}
    for kind, content in _BLOCKS.findall(template()):
        hashes[kind] = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{hashes['script']}'; style-src 'sha256-{hashes['style']}'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return (
        (b"content-security-policy", policy.encode()),
        (b"x-content-type-options", b"nosniff"),
        (b"x-frame-options", b"DENY"),
        (b"referrer-policy", b"no-referrer"),
        (b"cross-origin-resource-policy", b"same-origin"),
        (b"cache-control", b"no-store"),
    )


def page(config: Mapping[str, object]) -> bytes:
    """The page for a server that has this `config`: what it may do beside showing."""
    told = html.escape(msgspec.json.encode(config).decode(), quote=True)
    return template().replace("{{config}}", told, 1).encode()


def is_foreign(headers: Headers) -> bool:
    """Whether a browser sends this for a page of another origin."""
    if headers.get(b"sec-fetch-site", b"none") not in (b"same-origin", b"none"):
        return True
    origin, host = headers.get(b"origin"), headers.get(b"host", b"")
    return origin is not None and origin.lower() not in (
        b"http://" + host.lower(),
        b"https://" + host.lower(),
    )


class LiveViews:
    """What a router's process makes of the live page: its feed, and the page on both ports."""

    def __init__(
        self,
        core: RouterCore,
        shell: RouterShell,
        peers: RouterPeers,
        name: str,
        routers: Callable[[], Mapping[str, str]],
        settings: RouterConfig,
    ):
        """`routers`: URLs of the admin ports of all routers, by name, as `RouterPeers` has them."""
        pictures = RouterPictures(peers, name, routers)
        self.feed = LiveFeed(core, shell, name, pictures)
        self.on_admin = LiveAdminPages(self.feed, pictures, settings.model_name)
        self.on_api = LiveEndpoint(self.feed, pictures, settings) if settings.live_page else None


class KillPipe:
    """The way to `segue up`, which ends its child of this name, for who has its token.

    The descriptor is that of a pipe's writing end.
    """

    def __init__(self, descriptor: int, token_file: str):
        os.set_blocking(descriptor, False)
        self._token = Path(token_file).read_bytes().strip() if token_file else b""
        self._descriptor = descriptor

    def admits(self, token: bytes) -> bool:
        """Whether this is the token; without one nobody has it."""
        return bool(self._token) and secrets.compare_digest(token, self._token)

    def kill(self, pod: str) -> bool:
        """Ask for it; False: nobody reads."""
        try:
            os.write(self._descriptor, f"{pod}\n".encode())
        except OSError:
            return False
        return True


# ---- on the port of the API ------------------------------------------------------------------------------------------


class LiveEndpoint:
    """ASGI of the live page."""

    def __init__(self, feed: LiveFeed, others: RouterPictures, settings: RouterConfig):
        self._feed = feed
        self._others = others
        kills = settings.kill_worker_fd >= 0
        self._kill_pipe = KillPipe(settings.kill_worker_fd, settings.kill_token_file) if kills else None
        keys = bool(settings.api_keys_file)
        open_to_all = not (is_loopback(settings.host) or settings.api_keys_file)
        self._may_be_rebound = open_to_all and not settings.allowed_hosts  # which `BrowserGuard` holds
        self._page = page({"api": True, "keys": keys, "model": settings.model_name, "kill": kills})

    def takes(self, scope: Scope) -> bool:
        """Whether a request is for the live page. One that names an origin gets no page, as it may be read there."""
        path: str = scope["path"]
        if path != "/":
            return path.startswith("/live/")
        headers = dict(scope["headers"])
        return (
            scope["method"] in ("GET", "HEAD")
            and b"text/html" in headers.get(b"accept", b"")
            and b"origin" not in headers
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request that `takes` has chosen."""
        path, headers = scope["path"], dict(scope["headers"])
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if self._may_be_rebound and not is_private_in_a_network(name_in(host)):
            await send_json(send, 403, OTHER_HOST)
        elif path == "/":
            vary = [(b"vary", b"accept, origin")]
            await send_start(send, 200, b"text/html; charset=utf-8", [*security_headers(), *vary])
            await send({"type": "http.response.body", "body": self._page})
        elif is_foreign(headers):
            await send_json(send, 403, ELSEWHERE)
        elif path == KILL_PATH and scope["method"] == "POST":
            await self._kill(headers, receive, send)
        elif path == EVENTS_PATH and scope["method"] == "GET":
            await self._events(scope, receive, send)
        elif path.startswith(REQUEST_PATH) and scope["method"] == "GET":
            found = await find(self._feed, self._others, path.removeprefix(REQUEST_PATH))
            await send_json(send, 200 if found else 404, msgspec.Raw(found) if found else UNKNOWN)
        else:
            await send_json(send, 404, NOTHING)

    async def _events(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = QueuedWatcher(context_of(scope).connection.abort)
        if not self._feed.watch(watcher, tenant_of(scope)):
            await send_json(send, 503, TOO_MANY)
            return
        gone = asyncio.create_task(_disconnected(receive, watcher))
        try:
            await send_start(send, 200, b"text/event-stream", [(b"cache-control", b"no-store")])
            while data := await watcher.take():
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            self._feed.unwatch(watcher)
            gone.cancel()

    async def _kill(self, headers: Headers, receive: Receive, send: Send) -> None:
        pipe = self._kill_pipe
        if pipe is None or not pipe.admits(headers.get(TOKEN_HEADER, b"")):
            await send_json(send, 403, NO_TOKEN)
            return
        pod = _pod_in(await _body(receive))
        if not pod:
            await send_json(send, 400, error_body(400, 'the body must be {"worker": name} of a worker'))
        elif not pipe.kill(pod):
            await send_json(send, 503, error_body(503, "`segue up` does not answer"))
        else:
            log.info("live.kill", worker=pod)
            await send_json(send, 202, {"worker": pod})


class QueuedWatcher:
    """Keeps what a client has not read yet; drops the client where that is too much."""

    def __init__(self, drop: Callable[[], None]):
        self._unread = bytearray()
        self._changed = asyncio.Event()
        self._ended = False
        self._drop = drop

    def deliver(self, data: bytes) -> None:
        """Keep it until it is taken."""
        if self._ended:
            return
        if len(self._unread) + len(data) > UNREAD_BYTES_MAX:
            self.end()
            self._drop()
            return
        self._unread += data
        self._changed.set()

    def end(self) -> None:
        """Let `take` give nothing any more."""
        self._ended = True
        self._unread.clear()
        self._changed.set()

    async def take(self) -> bytes:
        """All that has come, once there is something; empty at the end."""
        await self._changed.wait()
        self._changed.clear()
        data = bytes(self._unread)
        self._unread.clear()
        return data


async def _disconnected(receive: Receive, watcher: QueuedWatcher) -> None:
    """End the watcher when its client goes."""
    while (await receive())["type"] != "http.disconnect":
        pass
    watcher.end()


async def _body(receive: Receive) -> bytes:
    """The body, as far as it may be long."""
    body, more = b"", True
    while more and len(body) <= BODY_BYTES_MAX:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


def _pod_in(body: bytes) -> str:
    """The name in `{"worker": name}`; empty where there is none."""
    with suppress(msgspec.MsgspecError):
        if len(body) <= BODY_BYTES_MAX:
            name = msgspec.json.decode(body, type=dict[str, str]).get("worker", "")
            return name if re.fullmatch(r"[a-z]+-\d{1,3}", name) else ""
    return ""


async def find(feed: LiveFeed, others: RouterPictures, shown_id: str) -> bytes | None:
    """What this router or another one knows of a request, as JSON."""
    found = feed.find(shown_id)
    return msgspec.json.encode(found) if found is not None else await others.find(shown_id)


# ---- on the admin port -----------------------------------------------------------------------------------------------


class LiveAdminPages:
    """The live page on a router's admin port, without the API. `answer` is called on the loop that owns the feed."""

    def __init__(self, feed: LiveFeed, others: RouterPictures, model: str):
        self._feed = feed
        self._others = others
        config: dict[str, Any] = {"api": False, "keys": False, "model": model, "kill": False}
        self._page = AdminPage(200, "text/html; charset=utf-8", page(config), security_headers())
        self._loop = asyncio.get_running_loop()

    def takes(self, path: str) -> bool:
        """Whether a path is of the live page."""
        return path == "/" or path.startswith("/live/")

    async def answer(self, path: str) -> AdminPage:
        """The page at this path."""
        if path == "/":
            return self._page
        if path == PICTURE_PATH:
            return AdminPage(200, "application/json", self._feed.own_picture())
        if path.startswith(REQUEST_PATH):
            found = await find(self._feed, self._others, path.removeprefix(REQUEST_PATH))
            return AdminPage(200 if found else 404, "application/json", found or msgspec.json.encode(UNKNOWN))
        if path != EVENTS_PATH:
            return AdminPage(404, "application/json", msgspec.json.encode(NOTHING))
        if not self._feed.has_room(None):
            return AdminPage(503, "application/json", msgspec.json.encode(TOO_MANY))
        stream = AdminWatcher(self._feed, self._loop)
        return AdminPage(200, "text/event-stream", b"", ((b"cache-control", b"no-store"),), stream)


class AdminWatcher:
    """Carries events from the router's loop to a connection of the admin port, which has a thread of its own."""

    def __init__(self, feed: LiveFeed, loop: asyncio.AbstractEventLoop):
        self._feed = feed
        self._loop = loop
        self._push: Callable[[bytes], None] = lambda _data: None
        self._end: Callable[[], None] = lambda: None

    def start(self, push: Callable[[bytes], None], end: Callable[[], None]) -> None:
        """Begin; both may be called on any thread."""
        self._push, self._end = push, end
        with suppress(RuntimeError):  # the loop was closed
            self._loop.call_soon_threadsafe(self._watch)

    def stop(self) -> None:
        """Deliver no more: the connection is gone."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._feed.unwatch, self)

    def _watch(self) -> None:
        watcher: Watcher = self
        if not self._feed.watch(watcher):
            self._end()

    def deliver(self, data: bytes) -> None:
        """Hand it to the connection's thread."""
        self._push(data)

    def end(self) -> None:
        """End the connection."""
        self._end()
