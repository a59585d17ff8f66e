"""Where a process listens: one address, or every address of the machine, in both families of IP.

`*` is every address: IPv6 and IPv4 through one socket, and IPv4 alone where the kernel has no IPv6. So one setting
serves pods of every cluster. ZMQ does the same by itself (`shared.links`).
"""

from __future__ import annotations

import socket

EVERYWHERE = "*"


def listening_socket(host: str) -> tuple[socket.socket, str]:
    """A TCP socket, not yet bound, and the address to bind it to. Raises OSError for a name that is no address."""
    if host == EVERYWHERE:
        family, address = (
            (socket.AF_INET6, "::") if socket.has_dualstack_ipv6() else (socket.AF_INET, "0.0.0.0")
        )
    else:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
        family, address = found[0], str(found[4][0])
    listener = socket.socket(family, socket.SOCK_STREAM)
    if host == EVERYWHERE and family == socket.AF_INET6:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return listener, address
