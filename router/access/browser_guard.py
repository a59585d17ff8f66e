"""Keeps web pages from using a router that the browser can reach and the page's author cannot.

A browser sends requests for any page to any address, `segue up` on its user's machine included. Three checks, each on
a header that a page cannot forge:

    Host           where the router listens on loopback only: a page's own name may be pointed at 127.0.0.1
                   (DNS rebinding), and then its requests count as same-origin
    Origin         every browser names the page's origin in a cross-origin POST, and in every POST of a plain http page
    Content-Type   what is not JSON can be posted without asking first (CORS preflight)

Where the router listens on loopback, pages of loopback at any port and the pages of desktop apps may use it, as Ollama
lets them: they are programs of the same machine. Where it listens to others and asks for no keys, a page of plain http
whose name is that of the Host header may have had its name pointed here, so such a name must be one that public DNS
cannot have. Programs may use any name there; a page that only reads (GET) names no origin, and learns the model's name.

Programs send no Origin. A missing Content-Type passes, as programs without HTTP libraries leave it out; a page that
leaves it out is stopped by its Origin. vLLM refuses other Content-Types as well, so no client of it loses anything.
"""

from __future__ import annotations

import re
from collections.abc import Coroutine
from typing import Any, cast
from urllib.parse import urlsplit

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from router.config import RouterConfig
from router.replies import SERVED_PATHS, send_request_error
from shared.primitives.errors import RequestError
from shared.process.listening import is_loopback, is_private, is_private_in_a_network, is_unambiguous, name_in

RATE_HEADERS = [
    f"x-ratelimit-{what}-{unit}"
    for unit in ("requests", "tokens")
    for what in ("limit", "remaining", "reset")
]
# Of pages on the same machine: any port of loopback, and the schemes of desktop apps. A file has the origin null.
LOCAL_ORIGIN = re.compile(
    r"https?://(([a-z0-9-]+\.)*localhost|127(\.\d{1,3}){3}|\[::1\])(:\d{1,5})?"
    r"|(app|tauri|vscode-webview|vscode-file)://[^/?#\s]*"
)
DEFAULT_PORTS = {"http": 80, "https": 443}


def guarded(app: ASGIApp, settings: RouterConfig) -> ASGIApp:
    """`app` behind the checks; with CORS for the origins that are allowed, whose pages can read refusals too."""
    guard = BrowserGuard(app, settings)
    local = is_loopback(settings.host)
    if not (settings.allowed_origins or local):
        return guard
    return AllowedOrigins(
        guard,
        settings.allowed_origins,
        allow_origin_regex=LOCAL_ORIGIN.pattern if local else None,
        allow_methods=["*"],
        allow_headers=["*"],
        allow_private_network=True,  # browsers ask for it by a header before a page reaches into a private network
        expose_headers=[
            "x-request-id",
            "x-segue-request-id",
            "x-segue-ignored",
            "retry-after",
            *RATE_HEADERS,
        ],
    )


class AllowedOrigins(CORSMiddleware):
    """CORS for allowed origins; other origins, a preflight of theirs included, are left to the guard."""

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Coroutine[Any, Any, None]:
        """Serve one request. No coroutine of its own: each would be resumed for every piece of a stream."""
        origin = dict(scope["headers"]).get(b"origin")
        if origin is not None and self.is_allowed_origin(origin.decode("latin-1")):
            return super().__call__(scope, receive, send)
        return cast(Coroutine[Any, Any, None], self.app(scope, receive, send))


class BrowserGuard:
    """Answers 403 or 415 for what a web page may not send."""

    def __init__(self, app: ASGIApp, settings: RouterConfig):
        self._app = app
        self._hosts = {name.lower() for name in settings.allowed_hosts}
        self._origins = set(settings.allowed_origins)
        self._local = is_loopback(settings.host)
        self._any_host = not self._hosts and not self._local
        self._may_be_rebound = self._any_host and not settings.api_keys_file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        try:
            self._check(scope["method"], scope["path"], dict(scope["headers"]))
        except RequestError as error:
            await send_request_error(scope, send, error, 0)
            return
        await self._app(scope, receive, send)

    def _check(self, method: str, path: str, headers: dict[bytes, bytes]) -> None:
        """Raise `RequestError` for what is not served."""
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if host and not (self._any_host or self._is_served(name_in(host))):
            raise RequestError(
                "this name is not served here: use localhost or an address, or add it to allowed_hosts",
                status=403,
            )
        origin = headers.get(b"origin")
        if origin is not None and not self._is_allowed(origin.decode("latin-1"), host, headers):
            raise RequestError(
                "web pages of this origin may not use this server: see allowed_origins", status=403
            )
        content_type = headers.get(b"content-type")
        has_reader = path in SERVED_PATHS  # else the answer is 404, which says more
        if method == "POST" and has_reader and content_type is not None and not _is_json(content_type):
            raise RequestError("the body must be JSON: send Content-Type: application/json", status=415)

    def _is_served(self, name: str) -> bool:
        if self._hosts:
            return name in self._hosts or is_unambiguous(name)
        return is_private(name)

    def _is_allowed(self, origin: str, host: str, headers: dict[bytes, bytes]) -> bool:
        if origin in self._origins or "*" in self._origins:
            return True
        if self._local and LOCAL_ORIGIN.fullmatch(origin):
            return True
        if self._may_be_rebound and origin.startswith("http:") and not is_private_in_a_network(name_in(host)):
            return False
        # Behind a proxy that replaces Host only the browser knows that page and API share an origin.
        return headers.get(b"sec-fetch-site") == b"same-origin" or bool(host and _same_place(origin, host))


def _same_place(origin: str, host: str) -> bool:
    """Whether `https://name` and a Host header name the same place; the scheme may end at a proxy."""
    try:
        url = urlsplit(origin)
        port = DEFAULT_PORTS.get(url.scheme)
        with_port = f"{host}:{port}" if port and not _has_port(host) else host
        return url.netloc.lower() == host or f"{url.hostname}:{url.port or port}" == with_port
    except ValueError:
        return False


def _has_port(host: str) -> bool:
    return ":" in host.rpartition("]")[2]


def _is_json(content_type: bytes) -> bool:
    media_type = content_type.partition(b";")[0].strip().lower()
    return media_type == b"application/json" or (
        media_type.startswith(b"application/") and media_type.endswith(b"+json")
    )
