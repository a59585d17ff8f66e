"""What some holders have, each holder's in the order in which it came; and who has most.

For bounds that all holders share: whoever has most gives up its oldest, so each keeps what it has until all others have
less (max-min fairness). A count moves by one at a time, so every operation takes the same time however many there are.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

T = TypeVar("T")


class Holders(Generic[T]):
    """Items by holder. An item is had by one holder at a time."""

    def __init__(self) -> None:
        self._items: dict[str, OrderedDict[T, None]] = {}
        self._holders: dict[int, OrderedDict[str, None]] = {}  # by how many items they have
        self._most = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, holder: str, item: T) -> None:
        """The holder has this item, if it had not, and it is the newest."""
        items = self._items.get(holder)
        if items is None:
            items = self._items[holder] = OrderedDict()
        if item not in items:
            items[item] = None
            self._count += 1
            self._moved(holder, len(items) - 1, len(items))

    def discard(self, holder: str, item: T) -> None:
        """The holder has this item no more, if it had."""
        items = self._items.get(holder)
        if items is None or item not in items:
            return
        del items[item]
        self._count -= 1
        self._moved(holder, len(items) + 1, len(items))
        if not items:
            del self._items[holder]

    def has(self, holder: str, item: T) -> bool:
        """Whether the holder has it."""
        return item in self._items.get(holder, ())

    def oldest(self, holder: str) -> T | None:
        """The oldest item of a holder."""
        items = self._items.get(holder)
        return next(iter(items)) if items else None

    def oldest_of_most(self) -> T | None:
        """The oldest item of the holder that has most."""
        return self.oldest(next(iter(self._holders[self._most]))) if self._most else None

    def _moved(self, holder: str, before: int, after: int) -> None:
        if before:
            del self._holders[before][holder]
            if not self._holders[before]:
                del self._holders[before]
        if after:
            self._holders.setdefault(after, OrderedDict())[holder] = None
        if after > self._most or self._most not in self._holders:
            self._most = after
