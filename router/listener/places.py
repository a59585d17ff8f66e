"""Which client connections have a place, and which one goes when a newer one needs it. No sockets, no clock.

A connection counts for a *holder*: the address that it comes from, or, once a valid API key has come on it, that key.
Those of keys have places of their own, up to KEYED_SHARE of all. A connection waits while no whole request of it is
under way, and only one that waits is displaced: the one that has waited longest, of the holder with the most of these.
Where keys are asked for, one on which no valid key has come waits whatever is under way: refusals and open pages, asked
for one behind the other, would else keep all places.
So a holder that opens more and more displaces its own, and others keep what they have. (Max-min fairness; a fixed
share for each would keep out a proxy that may well have all of them.)

Every operation takes the same time whatever is open (`shared.primitives.holders`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Generic, Literal, TypeVar

from shared.primitives.holders import Holders

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
