"""What the parts of the router know of one HTTP request beside what its client has sent.

The connection makes it and puts it into the ASGI scope under one key, because ASGI hands on nothing but the scope.
Those that the request passes write what they find out, each its own fields. `context_of` is the one way to read it.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from starlette.types import Scope

from router.core.effects import ClientRequest
from router.shell import TokenSink
from shared.process.api_keys import ApiKey

KEY = "segue.context"  # in the scope


class Connection(Protocol):
    """The client's connection, as the application sees it."""

    def abort(self) -> None:
        """Drop the connection with its unread data."""

    def watch_backlog(self, backlog_bytes: Callable[[], int]) -> None:
        """Count what an answer keeps until it can be written."""

    def show_key(self, name: str) -> None:
        """Tell that the request has a valid API key, of this name."""

    def count_refusal(self, status: int, full: str = "") -> None:
        """Count a request that never reaches the core, which counts the others; of a 429, what was full."""


class Account(Protocol):
    """Who pays for a request: see `router.access.keyed_clients`."""

    def reserve(self, requests: Sequence[ClientRequest], now: float) -> None: ...

    def metered(self, request: ClientRequest, sink: TokenSink) -> tuple[ClientRequest, TokenSink]: ...


@dataclass(slots=True)
class RequestContext:
    """One HTTP request on its way through the router."""

    connection: Connection
    head_at: float = 0.0  # when its head had come, by the loop's clock
    rid: str = ""  # drawn by `RequestIdMiddleware`, which is the first to see the request
    key: ApiKey | None = None  # by `KeyGuard`, once it has found it; None: not yet, or there are no keys
    account: Account | None = None  # by `KeyGuard`, once it lets the request in
    client_id: str = ""  # by `RequestIdMiddleware`: the id that its client gave it
    core_rids: Sequence[str] = ()  # by `CompletionEndpoint`: the requests to the core that it became
    code: str = (
        ""  # by who refuses: what was full, as `segue_rejections_total` calls it, or the code of the answer
    )


def context_of(scope: Scope) -> RequestContext:
    """The context of a request."""
    context: RequestContext = scope[KEY]
    return context


# ---- in whose name a connection is open and a request comes: the name of its API key, or else its client's address ---
# The address is that of the connection, or the one that a trusted proxy has named (`trusted_proxies`; uvicorn reads
# X-Forwarded-For and writes it into the scope). Behind any other proxy all clients are one tenant.


IPV6_PREFIX_BITS = 64  # what one subscriber usually gets: the addresses within it are one client


def tenant_of(scope: Scope) -> str:
    """The tenant's name: that of the request's API key, or the client of its address."""
    key = context_of(scope).key
    return key.name if key is not None else client_of(scope.get("client"))


def client_of(address: object) -> str:
    """What counts as one client: an IPv4 address, or the network of an IPv6 address.

    `address` is a host and what follows it (a socket's peer name); anything else, as of a Unix socket, gives "". A host
    that is no address stands for itself.
    """
    return _client(str(address[0])) if isinstance(address, tuple | list) else ""


@lru_cache(maxsize=1024)
def _client(host: str) -> str:
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return host[:64]  # a proxy's own name for a client
    if isinstance(ip, ipaddress.IPv4Address):
        return str(ip)
    if ip.ipv4_mapped is not None:
        return str(ip.ipv4_mapped)
    return str(ipaddress.ip_network((int(ip), IPV6_PREFIX_BITS), strict=False))
