"""In whose name a connection is open and a request comes: the name of its API key, or else its client's address.

The address is that of the connection, or the one that a trusted proxy has named (`trusted_proxies`; uvicorn reads
X-Forwarded-For and writes it into the scope). Behind any other proxy all clients are one tenant.
"""

from __future__ import annotations

import ipaddress
from functools import lru_cache

from starlette.types import Scope

from router.request_context import context_of

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
