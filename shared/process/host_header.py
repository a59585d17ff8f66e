"""Which names in a Host header a server that listens on loopback answers.

A web page's author may point a name of theirs at 127.0.0.1 (DNS rebinding); the browser then takes the page and the
server for one origin, but its Host header still says that name. So a server on loopback answers addresses and names
that public DNS cannot have, and nothing else. Knows nothing of settings and of HTTP beyond this header.
"""

from __future__ import annotations

import socket

# Names that public DNS cannot have (RFC 6761, RFC 6762, ICANN's .internal); Ollama lets in the same.
PRIVATE_SUFFIXES = (".localhost", ".local", ".internal")
# And those of home and cluster networks: names of routers' own DNS, and of Services on Kubernetes.
NETWORK_SUFFIXES = (".lan", ".home", ".home.arpa", ".localdomain", ".svc")


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
