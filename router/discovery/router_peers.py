"""The routers of one release: whose request an id is, and what that router tells of it.

An id begins with the mark of the router that drew it. A client asks whichever router its connection came to; one that
has not served the request asks the one that has. A router asks nobody about its own mark, so no question goes in a
circle.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Mapping

import httpx2
import structlog

MARK_BYTES = 4
DRAWN_BYTES = 8
ANSWER_SECONDS_MAX = 3.0
QUESTIONS_MAX = 4  # at a time; others wait, and as long

log = structlog.get_logger(__name__)


class RouterPeers:
    """Knows this router's own mark, and where the routers with other marks are."""

    def __init__(self, name: str, routers: Callable[[], Mapping[str, str]]):
        """`routers` gives the URL of each router there is now, by its name; this one may be among them."""
        self._mark = _mark(name)
        self._routers = routers
        self._client = httpx2.AsyncClient(
            timeout=ANSWER_SECONDS_MAX,
            limits=httpx2.Limits(max_connections=QUESTIONS_MAX),
            trust_env=False,  # pods are not behind proxies
            verify=False,  # it never speaks TLS, and reading the certificates takes 50 ms
        )

    def draw_rid(self) -> str:
        """A new request's id: 24 hexadecimal digits."""
        return self._mark + secrets.token_hex(DRAWN_BYTES)

    def of(self, rid: str) -> str | None:
        """The URL of the other router that drew this id; None if this one did, or no router that is there."""
        mark = rid[: 2 * MARK_BYTES]
        if mark == self._mark:
            return None
        return next((url for name, url in self._routers().items() if _mark(name) == mark), None)

    async def ask(self, url: str, path: str) -> tuple[int, bytes] | None:
        """Status and JSON of another router's answer, or None if it gives none in time."""
        try:
            answer = await self._client.get(url + path)
        except httpx2.HTTPError as error:
            log.warning("another router gave no answer", url=url, error=f"{type(error).__name__}: {error}")
            return None
        return answer.status_code, answer.content

    async def close(self) -> None:
        """End the connections."""
        await self._client.aclose()


def _mark(name: str) -> str:
    return hashlib.blake2b(name.encode(), digest_size=MARK_BYTES).hexdigest()
