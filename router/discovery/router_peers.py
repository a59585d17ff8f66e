"""The routers of one release: which of them owns a request, and a GET to it.

A request's id begins with the prefix of the router that drew it. A client asks the router that its connection came
to; a router that has not served the request asks the owner. A router never asks for ids with its own prefix, so no
question is passed on twice.

Another router may be in other hands: its answer is read as it is sent, and no further than ANSWER_BYTES_MAX.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Callable, Mapping

import httpx2
import structlog

PREFIX_BYTES = 4
DRAWN_BYTES = 8
ANSWER_SECONDS_MAX = 3.0
ANSWER_BYTES_MAX = 4 << 20  # a picture of 4,096 pods takes 1.5 MiB
CONNECTIONS_MAX = 4  # further questions wait for one, up to ANSWER_SECONDS_MAX

log = structlog.get_logger(__name__)


class RouterPeers:
    """Knows this router's own prefix, and the URLs of the routers with other prefixes."""

    def __init__(self, name: str, routers: Callable[[], Mapping[str, str]]):
        """`routers` gives the URL of each router there is now, by its name; this one may be among them."""
        self._prefix = _prefix(name)
        self._routers = routers
        self._client = httpx2.AsyncClient(
            timeout=ANSWER_SECONDS_MAX,
            limits=httpx2.Limits(max_connections=CONNECTIONS_MAX),
            headers={"accept-encoding": "identity"},
            trust_env=False,  # pods are not behind proxies
            verify=False,  # it never speaks TLS, and reading the certificates takes 50 ms
        )

    def draw_rid(self) -> str:
        """A new request's id: 24 hexadecimal digits."""
        return self._prefix + secrets.token_hex(DRAWN_BYTES)

    def owner_url(self, rid: str) -> str | None:
        """The URL of the other router that drew this id; None if this one did, or no router that is there."""
        prefix = rid[: 2 * PREFIX_BYTES]
        if prefix == self._prefix:
            return None
        return next((url for name, url in self._routers().items() if _prefix(name) == prefix), None)

    async def get(self, url: str, path: str) -> tuple[int, bytes] | None:
        """Status and JSON of another router's answer; None where none comes within its bounds of time and bytes."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS_MAX), self._client.stream("GET", url + path) as answer:
                return answer.status_code, await _content_of(answer)
        except (httpx2.HTTPError, TimeoutError, ValueError) as error:
            log.warning("router_peers.unreachable", url=url, error=f"{type(error).__name__}: {error}")
            return None

    async def close(self) -> None:
        """End the connections."""
        await self._client.aclose()


async def _content_of(answer: httpx2.Response) -> bytes:
    """The body as it was sent, not unpacked; raises ValueError where it is larger than an answer may be."""
    content = bytearray()
    async for part in answer.aiter_raw():
        content += part
        if len(content) > ANSWER_BYTES_MAX:
            raise ValueError(f"more than {ANSWER_BYTES_MAX} bytes, and no router's answer has so many")
    return bytes(content)


def _prefix(name: str) -> str:
    return hashlib.blake2b(name.encode(), digest_size=PREFIX_BYTES).hexdigest()
