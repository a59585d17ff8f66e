"""Where a process listens, and which names it answers to there.

`*` is every address of the machine: IPv6 and IPv4 through one socket, and IPv4 alone where the kernel has no IPv6. So
one setting serves pods of every cluster. ZMQ does the same by itself (`shared.links`).

A web page's author may point a name of theirs at 127.0.0.1 (DNS rebinding); the browser then takes the page and the
server for one origin, but its Host header still says that name. So a server on loopback answers addresses and names
that public DNS cannot have, and nothing else. Knows nothing of settings and of HTTP beyond this header.
"""

from __future__ import annotations

import socket

EVERYWHERE = "*"
# Names that public DNS cannot have (RFC 6761, RFC 6762, ICANN's .internal); Ollama lets in the same.
PRIVATE_SUFFIXES = (".localhost", ".local", ".internal")
# And those of home and cluster networks: names of routers' own DNS, and of Services on Kubernetes.
NETWORK_SUFFIXES = (".lan", ".home", ".home.arpa", ".localdomain", ".svc")


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


def is_loopback(host: str) -> bool:
    """Whether a server with this setting `host` listens on loopback only."""
    return host in ("localhost", "::1") or host.startswith("127.")


def name_in(header: str) -> str:
    """The name or address in a Host header: `localhost:8000` → `localhost`, `[::1]:8000` → `::1`."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0].rstrip(".")


def is_unambiguous(name: str) -> bool:
    """Whether nobody can point this name elsewhere: localhost or an address."""
    return name == "localhost" or _is_address(name)


def is_private(name: str) -> bool:
    """Whether public DNS cannot have this name: those of `is_unambiguous`, this machine's and private ones."""
    return is_unambiguous(name) or name == socket.gethostname().lower() or name.endswith(PRIVATE_SUFFIXES)


def is_private_in_a_network(name: str) -> bool:
    """Whether nobody outside of a network can have this name: one of `is_private`, without a dot, or of the network."""
    return is_private(name) or "." not in name or name.endswith(NETWORK_SUFFIXES)


def _is_address(name: str) -> bool:
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, name)
        except (OSError, ValueError):
            continue
        return True
    return False
