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

log = structlog.get_logger(__name__)


class Siblings:
    """Knows this router's own mark, and where the routers with other marks are."""

    def __init__(self, uid: str, routers: Callable[[], Mapping[str, str]]):
        """`routers` gives the URL of each router there is now, by its uid; this one may be among them."""
        self._mark = _mark(uid)
        self._routers = routers

    def draw_rid(self) -> str:
        """A new request's id: 24 hexadecimal digits."""
        return self._mark + secrets.token_hex(DRAWN_BYTES)

    def of(self, rid: str) -> str | None:
        """The URL of the other router that drew this id; None if this one did, or no router that is there."""
        mark = rid[: 2 * MARK_BYTES]
        if mark == self._mark:
            return None
        return next((url for uid, url in self._routers().items() if _mark(uid) == mark), None)


async def ask(url: str, path: str) -> tuple[int, bytes] | None:
    """Status and JSON of another router's answer, or None if it gives none in time."""
    try:
        async with httpx2.AsyncClient(timeout=ANSWER_SECONDS_MAX, trust_env=False) as client:
            answer = await client.get(url + path)
    except httpx2.HTTPError as error:
        log.warning("another router gave no answer", url=url, error=f"{type(error).__name__}: {error}")
        return None
    return answer.status_code, answer.content


def _mark(uid: str) -> str:
    return hashlib.blake2b(uid.encode(), digest_size=MARK_BYTES).hexdigest()
