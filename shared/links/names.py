"""Workers that are dialed by name: looked up on threads beside the links.

ZMQ looks a name up on the thread that carries all of a router's links. Where the name server is slow or silent, that
thread stands for many seconds, and the links to all workers count as silent. So ZMQ is given addresses only.

Each dial looks up anew, since a worker that comes back may have another address. IPv4 goes first, as with ZMQ:
`localhost` is most often both, and a worker that listens there most often IPv4 alone.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
from concurrent.futures import Future


class Names:
    """Lookups under way or not asked for yet, one of each name at most. All calls belong to one thread."""

    def __init__(self) -> None:
        self._lookups: dict[str, Future[str]] = {}

    def resolve(self, address: str) -> str | None:
        """`tcp://host:port` with an IP address as its host; None: it is being looked up, ask again.

        Raises OSError, once for each lookup, where the name has no address.
        """
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        if _is_address(host.strip("[]")):
            return address
        if host not in self._lookups:
            lookup = Future[str]()
            threading.Thread(target=_look_up, args=(host, lookup), name="lookup", daemon=True).start()
            self._lookups[host] = lookup  # not where no thread could be started: the next dial tries again
        if not self._lookups[host].done():
            return None
        return f"tcp://{self._lookups.pop(host).result()}:{port}"


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _look_up(host: str, lookup: Future[str]) -> None:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        family, *_, where = min(found, key=lambda each: each[0] != socket.AF_INET)
        lookup.set_result(f"[{where[0]}]" if family == socket.AF_INET6 else str(where[0]))
    except Exception as error:  # also a name that cannot be encoded
        lookup.set_exception(OSError(f"cannot look up {host}: {getattr(error, 'strerror', None) or error}"))
