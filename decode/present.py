"""What admission sums over the requests that are here, kept from one admission to the next.

Many requests may come between two steps. Then a sum over all that are here, for each of them, would make a burst cost
the square of its size. So a sum is kept, and those that come in are added to it, until it is forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from shared.batch.req import Req
from shared.primitives.errors import InvariantError

Sum = TypeVar("Sum")


@dataclass(slots=True)
class KeptSum(Generic[Sum]):
    """One sum; `start` makes an empty one, `add` returns a sum with some more requests."""

    start: Callable[[], Sum]
    add: Callable[[Sum, Sequence[Req]], Sum]
    _sum: Sum | None = None

    def of(self, reqs: Sequence[Req]) -> Sum:
        """The sum over `reqs`, or the one that is kept."""
        if self._sum is None:
            self._sum = self.add(self.start(), reqs)
        return self._sum

    def came(self, req: Req) -> None:
        """One more is here. A sum that is made later finds it among `reqs`."""
        if self._sum is not None:
            self._sum = self.add(self._sum, [req])

    def forget(self) -> None:
        """Make the next sum anew."""
        self._sum = None

    def check(self, reqs: Sequence[Req]) -> None:
        """Prove that a sum that is kept is the one over `reqs`; raises `InvariantError`."""
        if self._sum is not None and self._sum != (fresh := self.add(self.start(), reqs)):
            raise InvariantError(f"a sum over {len(reqs)} requests is kept as {self._sum}, but it is {fresh}")
