"""In whose name a request comes: today its client's address.

The address is that of the connection, or the one that a trusted proxy has named (`trusted_proxies`; uvicorn reads
X-Forwarded-For and writes it into the scope). Behind any other proxy all clients are one tenant.
"""

from __future__ import annotations

import ipaddress

from starlette.types import Scope

IPV6_PREFIX_BITS = 64  # what one subscriber usually gets: the addresses within it are one client


def tenant_of(scope: Scope) -> str:
    """The tenant's name; empty where the connection has no address, as on a Unix socket."""
    client = scope.get("client")
    return _network(client[0]) if client else ""


def _network(host: str) -> str:
    """The address, or the network of an IPv6 address; what is no address stands for itself."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host[:64]  # a proxy's own name for a client
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((int(address), IPV6_PREFIX_BITS), strict=False))
