"""All client connections of a router: how many there may be, what they may hold together, and when each is overdue.

    bound                          default       above it
    connections_max                8192          503 and close; no answer where many are refused at once
    connections_per_address_max    4096          the same
    DESCRIPTOR_RESERVE             256           close: the links to workers and discovery need descriptors, too
    HELD_BYTES_MAX                 64 MiB        503 for the connection whose bytes come next
    UNREAD_BYTES_MAX               64 MiB        the connections with the most unread bytes are cut
                                                 (see client_output)

`check` looks at every deadline four times a second: a request then moves a number and arms no timer.
"""

from __future__ import annotations

import asyncio
import resource
from collections import Counter
from dataclasses import dataclass

import structlog

from router.config import RouterConfig
from router.http.client_address import client_of
from router.http.client_connection import ClientConnection
from router.http.request_parser import Refusal
from shared.metric_fields import CounterMetric, all_declared, counted_by
from shared.tally import is_worth_a_line

CHECK_SECONDS = 0.25  # between two looks at the deadlines
DESCRIPTOR_RESERVE = 256  # of RLIMIT_NOFILE: three for each dial of a worker, and some for discovery
HELD_BYTES_MAX = (
    64 << 20
)  # heads that are incomplete, and what was sent ahead; 2,000 connections with 32 KiB each
UNREAD_BYTES_MAX = (
    64 << 20
)  # of answers, in this process and in the kernel, and of streams' backlogs; see `_check`
UNREAD_BYTES_STEP = UNREAD_BYTES_MAX // 4  # written since the last look: then they are measured at once
REFUSED_OPEN_MAX = 128  # refused connections that are kept for a moment, so that their answer arrives

log = structlog.get_logger(__name__)


@all_declared
@dataclass(slots=True)
class ClientCounters:
    """What ended client connections before their time, and what was refused; totals since the start."""

    ended: Counter[str] = counted_by(
        CounterMetric(
            "segue_http_connections_ended_total",
            "Client connections that the router ended, by the bound that was exceeded or the rule that was broken.",
            ("cause",),
        ),
        "connections",
        "address",
        "descriptors",
        "unread_bytes",
    )
    refusals: Counter[str] = counted_by(
        CounterMetric(
            "segue_http_refusals_total",
            "HTTP requests that were refused before they became requests to the workers, by status.",
            ("status",),
        ),
        *("400", "403", "404", "405", "408", "413", "414", "415", "429", "431", "503", "505"),
    )


class ClientConnections:
    """Knows every connection. Belongs to the event loop's thread."""

    def __init__(self, settings: RouterConfig):
        self.settings = settings
        self.counters = ClientCounters()
        self._origins: dict[ClientConnection, str] = {}  # of those that were admitted
        self._by_origin: Counter[str] = Counter()
        self._refused: set[ClientConnection] = set()
        self._held_bytes = 0
        self._written_bytes = 0  # since unread bytes were last measured
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        """Connections that were admitted and are open."""
        return len(self._origins)

    def start(self) -> None:
        """Look at the deadlines from now on."""
        self._timer = asyncio.get_running_loop().call_later(CHECK_SECONDS, self._check)

    def stop(self) -> None:
        """Look no more."""
        if self._timer:
            self._timer.cancel()

    def admit(self, connection: ClientConnection) -> None:
        """Take a new connection in, or refuse it."""
        origin = client_of(connection.transport.get_extra_info("peername"))
        if _beyond_reserve(connection.transport):
            self._refuse(connection, "descriptors")
        elif len(self._origins) >= self.settings.connections_max:
            self._refuse(connection, "connections")
        elif self._by_origin[origin] >= self.settings.connections_per_address_max:
            self._refuse(connection, "address")
        else:
            self._origins[connection] = origin
            self._by_origin[origin] += 1

    def remove(self, connection: ClientConnection) -> None:
        """The connection is closed."""
        self._refused.discard(connection)
        origin = self._origins.pop(connection, None)
        if origin is None:
            return
        self._by_origin[origin] -= 1
        if not self._by_origin[origin]:
            del self._by_origin[origin]

    def hold(self, connection: ClientConnection, held_bytes: int) -> bool:
        """Note how much a connection holds now; False if all together hold too much."""
        grown = held_bytes - connection.held_bytes
        connection.held_bytes = held_bytes
        self._held_bytes += grown
        return grown <= 0 or self._held_bytes <= HELD_BYTES_MAX

    def written(self, new_bytes: int) -> None:
        """Note that a connection has written; much at once is not left to the next look."""
        self._written_bytes += new_bytes
        if self._written_bytes > UNREAD_BYTES_STEP:
            self._bound_unread()

    def count(self, cause: str) -> None:
        """A connection is ended early."""
        self.counters.ended[cause] += 1

    def count_refusal(self, status: int) -> None:
        """A request is refused with `status`, by its connection or by the application around the core."""
        self.counters.refusals[str(status)] += 1

    def _refuse(self, connection: ClientConnection, cause: str) -> None:
        if cause == "descriptors" or len(self._refused) >= REFUSED_OPEN_MAX:
            self.count(cause)
            connection.transport.abort()
        else:
            self._refused.add(connection)
            connection.refuse(Refusal(503, cause, "too many connections are open: try again later"))
        times = self.counters.ended[cause]
        if is_worth_a_line(times):
            log.warning("http.connections_refused", cause=cause, times=times, open=len(self))

    def _check(self) -> None:
        self.start()  # first, so that no failure below ends the looking
        loop = asyncio.get_running_loop()
        now = loop.time()
        for connection in [*self._origins, *self._refused]:
            try:
                connection.check(now)
            except Exception as error:
                connection.transport.abort()
                loop.call_exception_handler({"message": "a connection's check failed", "exception": error})
        self._bound_unread()

    def _bound_unread(self) -> None:
        """End the connections with the most unread bytes until the others are within the total."""
        self._written_bytes = 0
        unread = {connection: connection.output.unread_bytes() for connection in self._origins}
        excess = sum(unread.values()) - UNREAD_BYTES_MAX
        for connection in sorted(unread, key=unread.__getitem__, reverse=True) if excess > 0 else ():
            self.count("unread_bytes")
            connection.output.reset()
            excess -= unread[connection]
            if excess <= 0:
                break


def _beyond_reserve(transport: asyncio.Transport) -> bool:
    """Whether this connection uses the reserve: a new descriptor is the lowest free one, so all below are taken."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    accepted = transport.get_extra_info("socket")
    if most == resource.RLIM_INFINITY or accepted is None:
        return False
    return int(accepted.fileno()) >= most - min(DESCRIPTOR_RESERVE, most // 4)
