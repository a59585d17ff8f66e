"""What admission sums over the requests that are here, kept from one admission to the next.

Many requests may come between two steps. Then a sum over all that are here, for each of them, would make a burst cost
the square of its size. So a sum is kept, and only those that came in since are added to it. It is made anew when a
step was launched, or when the requests that it counts are not the first of those that are here any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from shared.req import Req

Sum = TypeVar("Sum")


@dataclass(slots=True)
class KeptSum(Generic[Sum]):
    """One sum; `start` makes an empty one, `add` returns a sum with some more requests."""

    start: Callable[[], Sum]
    add: Callable[[Sum, Sequence[Req]], Sum]
    _counted: list[Req] = field(default_factory=list)
    _at_step: int = -1
    _sum: Sum | None = None

    def of(self, reqs: list[Req], launched_step: int) -> Sum:
        """The sum over `reqs`, in their order; `launched_step` is the last one."""
        counted = len(self._counted)
        if self._sum is None or launched_step != self._at_step or reqs[:counted] != self._counted:
            self._sum, counted = self.start(), 0
        self._sum = self.add(self._sum, reqs[counted:])
        self._counted, self._at_step = list(reqs), launched_step
        return self._sum
