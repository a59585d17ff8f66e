"""All client connections of a router: how many there may be, what they may hold together, and when each is overdue.

    bound                          default       above it
    connections_max                8192          a connection without a request goes (`Places`); if there is
                                                 none, 503 and close, or no answer where many are refused at once
    SECURED_BYTES_MAX              384 MiB       the same, with TLS: 3072 connections of CONNECTION_BYTES
    connections_per_address_max    4096          the same, among those of the address
    DESCRIPTOR_RESERVE             256           the same: the links to workers and discovery need descriptors, too
    HELD_BYTES_MAX                 64 MiB        503 for the connection whose bytes come next
    UNREAD_BYTES_MAX               64 MiB        the connections with the most unread bytes are cut
                                                 (see `output`)

`check` looks at every deadline four times a second: a request then moves a number and arms no timer. When most places
are taken, a client that has said nothing yet has SILENT_SECONDS_MAX.
"""

from __future__ import annotations

import asyncio
import math
import resource
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

import structlog

from router.config import RouterConfig
from router.listener.output import ClientOutput
from router.listener.request_parser import Refusal
from router.listener.tls_input import CONNECTION_BYTES
from router.request_context import client_of
from shared.primitives.holders import Holders
from shared.primitives.metric_fields import REJECTIONS, CounterMetric, all_declared, counted_by
from shared.primitives.tally import is_worth_a_line

CHECK_SECONDS = 0.25  # between two looks at the deadlines
DESCRIPTOR_RESERVE = 256  # of RLIMIT_NOFILE: three for each dial of a worker, and some for discovery
# heads that are incomplete, and what was sent ahead; 2,000 connections with 32 KiB each
HELD_BYTES_MAX = 64 << 20
# of answers, in this process and in the kernel, and of streams' backlogs; see `_check`
UNREAD_BYTES_MAX = 64 << 20
UNREAD_BYTES_STEP = UNREAD_BYTES_MAX // 4  # written since the last look: then they are measured at once
SECURED_BYTES_MAX = 384 << 20  # of what all TLS connections keep, CONNECTION_BYTES each
REFUSED_OPEN_MAX = 128  # refused connections that are kept for a moment, so that their answer arrives
CROWDED_SHARE = 3 / 4  # of connections_max: from there on silent ones have less time
SILENT_SECONDS_MAX = 2.0  # without a byte, when crowded

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
        "silent",
        "handshake",
    )
    refusals: Counter[str] = counted_by(
        CounterMetric(
            "segue_http_refusals_total",
            "HTTP requests that were refused before they became requests to the workers, by status; 500: those, at any "
            "time, that the router itself failed.",
            ("status",),
        ),
        *map(str, (400, 401, 403, 404, 405, 408, 413, 414, 415, 429, 431, 500, 501, 503, 505)),
    )
    rejections: Counter[str] = counted_by(
        REJECTIONS,
        *("key_rpm", "key_tpm", "key_concurrent", "tokenizer_queue", "request_bytes", "answer_bytes"),
    )


class BoundedConnection(Protocol):
    """One client connection, as far as its bounds need it."""

    transport: asyncio.Transport
    output: ClientOutput
    held_bytes: int

    def check(self, now: float, silent_since: float) -> None:
        """End the connection if it is over a budget of seconds, or has been silent since it was opened before then."""

    def leave(self) -> bool:
        """End the connection for a newer one; False if an answer must leave before."""

    def refuse(self, refusal: Refusal) -> None:
        """Answer an error and end the connection."""


class ClientConnections:
    """Knows every connection. Belongs to the event loop's thread."""

    def __init__(self, settings: RouterConfig):
        self.settings = settings
        self.counters = ClientCounters()
        self.places_max = places_max(settings)
        self._places: Places[BoundedConnection] = Places(
            self.places_max,
            settings.connections_per_address_max,
            keys_asked=bool(settings.api_keys_file),
        )
        self._refused: set[BoundedConnection] = set()
        self._displaced: set[BoundedConnection] = set()  # and an answer has not left yet
        self._descriptor_places = math.inf  # how many there were when the reserve of descriptors was met
        self._held_bytes = 0
        self._written_bytes = 0  # since unread bytes were last measured
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        """Connections that were admitted and are open."""
        return len(self._places)

    def start(self) -> None:
        """Look at the deadlines from now on."""
        self._timer = asyncio.get_running_loop().call_later(CHECK_SECONDS, self._check)

    def stop(self) -> None:
        """Look no more."""
        if self._timer:
            self._timer.cancel()

    def admit(self, connection: BoundedConnection) -> None:
        """Take a new connection in, or refuse it."""
        address = client_of(connection.transport.get_extra_info("peername"))
        bound = self._bound_met(connection, address)
        if bound is not None:
            oldest = self._places.to_displace(address if bound == "address" else None)
            if oldest is None:
                self._refuse(connection, bound)
                return
            self._displace(oldest, bound)
        self._places.take(connection, address)

    def remove(self, connection: BoundedConnection) -> None:
        """The connection is closed."""
        self._refused.discard(connection)
        self._displaced.discard(connection)
        self._places.give_back(connection)

    def request_under_way(self, connection: BoundedConnection) -> None:
        """A request has come whole."""
        self._places.request_under_way(connection)

    def request_ended(self, connection: BoundedConnection) -> None:
        """What was under way on the connection has ended."""
        self._places.request_ended(connection)

    def show_key(self, connection: BoundedConnection, key: str) -> None:
        """A valid API key, of this name, has come on the connection."""
        displaced = self._places.show_key(connection, key)
        if displaced is not None:
            self._displace(displaced, "connections")

    def hold(self, connection: BoundedConnection, held_bytes: int) -> bool:
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

    def count_refusal(self, status: int, full: str = "") -> None:
        """A request is refused with `status`, by its connection or by the application around the core.

        With 429 because of what `full` says.
        """
        self.counters.refusals[str(status)] += 1
        if status == 429:
            self.counters.rejections[full] += 1

    def _bound_met(self, connection: BoundedConnection, address: str) -> str | None:
        """Why a new connection has no free place.

        One beyond the reserve tells how many there may be. A number alone does not tell it again: the next connection
        gets that of a displaced one, which is low.
        """
        if _beyond_reserve(connection.transport):
            self._descriptor_places = max(1, len(self))
        if len(self) >= self._descriptor_places:
            return "descriptors"
        return self._places.bound_met(address)

    def _displace(self, connection: BoundedConnection, bound: str) -> None:
        """End a connection without a request: the bound was met by a newer one."""
        self._places.give_back(connection)
        self.count(bound)
        if not connection.leave():
            self._displaced.add(connection)
        times = self.counters.ended[bound]
        if is_worth_a_line(times):
            log.warning("http.connections_displaced", cause=bound, times=times, open=len(self))

    def _refuse(self, connection: BoundedConnection, cause: str) -> None:
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
        if len(self) < self._descriptor_places * CROWDED_SHARE:
            self._descriptor_places = math.inf  # others may have given descriptors back
        crowded = len(self) >= self.places_max * CROWDED_SHARE
        silent_since = now - SILENT_SECONDS_MAX if crowded else -math.inf
        for connection in [*self._places, *self._refused, *self._displaced]:
            try:
                connection.check(now, silent_since)
            except Exception as error:
                connection.transport.abort()
                loop.call_exception_handler({"message": "a connection's check failed", "exception": error})
        self._bound_unread()

    def _bound_unread(self) -> None:
        """End the connections with the most unread bytes until the others are within the total."""
        self._written_bytes = 0
        unread = {connection: connection.output.unread_bytes() for connection in self._places}
        excess = sum(unread.values()) - UNREAD_BYTES_MAX
        for connection in sorted(unread, key=unread.__getitem__, reverse=True) if excess > 0 else ():
            self.count("unread_bytes")
            connection.output.reset()
            excess -= unread[connection]
            if excess <= 0:
                break


def places_max(settings: RouterConfig) -> int:
    """How many connections there may be: with TLS no more than have memory."""
    secured_max = SECURED_BYTES_MAX // CONNECTION_BYTES
    return min(settings.connections_max, secured_max) if settings.tls_cert else settings.connections_max


def _beyond_reserve(transport: asyncio.Transport) -> bool:
    """Whether this connection uses the reserve: a new descriptor is the lowest free one, so all below are taken."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    accepted = transport.get_extra_info("socket")
    if most == resource.RLIM_INFINITY or accepted is None:
        return False
    return int(accepted.fileno()) >= most - min(DESCRIPTOR_RESERVE, most // 4)


# ---- which client connections have a place, and which one goes when a newer one needs it. No sockets, no clock -------
# A connection counts for a *holder*: the address that it comes from, or, once a valid API key has come on it, that key.
# Those of keys have places of their own, up to KEYED_SHARE of all. A connection waits while no whole request of it is
# under way, and only one that waits is displaced: the one that has waited longest, of the holder with the most of
# these. Where keys are asked for, one on which no valid key has come waits whatever is under way: refusals and open
# pages, asked for one behind the other, would else keep all places. So a holder that opens more and more displaces its
# own, and others keep what they have. (Max-min fairness; a fixed share for each would keep out a proxy that may well
# have all of them.)
#
# Every operation takes the same time whatever is open (`shared.primitives.holders`).


KEYED_SHARE = 3 / 4  # of all places, that connections with a valid key may have for themselves

C = TypeVar("C")


class _Crowd(Generic[C]):
    """The connections of one kind of holder."""

    def __init__(self) -> None:
        self.waiting: Holders[C] = Holders()  # those that may be displaced
        self.open_of: Counter[str] = Counter()
        self.open = 0

    def add(self, holder: str) -> None:
        self.open_of[holder] += 1
        self.open += 1

    def remove(self, holder: str, connection: C) -> None:
        self.waiting.discard(holder, connection)
        self.open -= 1
        self.open_of[holder] -= 1
        if not self.open_of[holder]:
            del self.open_of[holder]


class Places(Generic[C]):
    """The places of a router: `places_max` in all, `holder_max` for one address or key.

    `keys_asked`: only a request on a connection with a valid key keeps its place.
    """

    def __init__(self, places_max: int, holder_max: int, *, keys_asked: bool = False):
        self._places_max = places_max
        self._keys_asked = keys_asked
        self._under_way: set[C] = set()  # those with a whole request
        self._keyed: set[C] = set()  # those on which a valid key has come
        self._keyed_max = int(places_max * KEYED_SHARE)
        self._holder_max = holder_max
        self._addresses: _Crowd[C] = _Crowd()
        self._keys: _Crowd[C] = _Crowd()
        self._holders: dict[C, tuple[_Crowd[C], str]] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._holders)

    def __iter__(self) -> Iterator[C]:
        return iter(self._holders)

    def bound_met(self, address: str) -> Literal["connections", "address"] | None:
        """Why one more of this address has no free place; None: it has one."""
        if self._addresses.open_of[address] >= self._holder_max:
            return "address"
        return "connections" if len(self) >= self._places_max else None

    def to_displace(self, address: str | None = None) -> C | None:
        """The connection to end for a new one, of this address or of any; None: on each a request is under way.

        Those with a key go last.
        """
        if address is not None:
            return self._addresses.waiting.oldest(address)
        found = self._addresses.waiting.oldest_of_most()
        return found if found is not None else self._keys.waiting.oldest_of_most()

    def take(self, connection: C, address: str) -> None:
        """A new connection has a place, and waits."""
        self._holders[connection] = (self._addresses, address)
        self._addresses.add(address)
        self._addresses.waiting.add(address, connection)

    def give_back(self, connection: C) -> bool:
        """A connection has ended; False if it had no place."""
        place = self._holders.pop(connection, None)
        self._under_way.discard(connection)
        self._keyed.discard(connection)
        if place is None:
            return False
        crowd, holder = place
        crowd.remove(holder, connection)
        return True

    def request_under_way(self, connection: C) -> None:
        """A request has come whole: the connection is not displaced."""
        if connection in self._holders:
            self._under_way.add(connection)
            self._stop_waiting(connection)

    def request_ended(self, connection: C) -> None:
        """Note that the connection's answer has ended: it waits for a request."""
        self._under_way.discard(connection)
        if place := self._holders.get(connection):
            place[0].waiting.add(place[1], connection)

    def show_key(self, connection: C, key: str) -> C | None:
        """A valid key has come: the place is the key's from now on. The connection to end for that, if there is one.

        Without a free place for keys and one that waits to be displaced, the place stays the one that it was.
        """
        place = self._holders.get(connection)
        if place is None:
            return None
        self._keyed.add(connection)
        self._stop_waiting(connection)
        if place == (self._keys, key):
            return None
        crowd, holder = place
        displaced: C | None = None
        if self._keys.open_of[key] >= self._holder_max:
            displaced = self._keys.waiting.oldest(key)
        elif crowd is self._addresses and self._keys.open >= self._keyed_max:
            displaced = self._keys.waiting.oldest_of_most()
        else:
            self._move(connection, crowd, holder, key)
            return None
        if displaced is not None:
            self._move(connection, crowd, holder, key)
        return displaced

    def _stop_waiting(self, connection: C) -> None:
        if connection in self._under_way and (connection in self._keyed or not self._keys_asked):
            crowd, holder = self._holders[connection]
            crowd.waiting.discard(holder, connection)

    def _move(self, connection: C, crowd: _Crowd[C], holder: str, key: str) -> None:
        waits = crowd.waiting.has(holder, connection)
        crowd.remove(holder, connection)
        self._keys.add(key)
        if waits:
            self._keys.waiting.add(key, connection)
        self._holders[connection] = (self._keys, key)
