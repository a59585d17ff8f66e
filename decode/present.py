"""What admission sums over the requests that are here, kept from one admission to the next.

Many requests may come between two steps. Then a sum over all that are here, for each of them, would make a burst cost
the square of its size. So a sum is kept, and only those that came in since are added to it. It serves one step, and is
made anew when a request that it counts has left. Or it serves some steps, and those that have left stay counted until
then: that is for sums that may be too large for a while.
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
    steps_kept: int = 1  # more: requests that have left may be counted
    _counted: dict[Req, None] = field(default_factory=dict)
    _at_step: int = -1
    _sum: Sum | None = None

    def of(self, reqs: list[Req], launched_step: int) -> Sum:
        """The sum over `reqs`, in their order; `launched_step` is the last one."""
        came = [req for req in reqs if req not in self._counted]
        some_left = len(self._counted) + len(came) > len(reqs)
        too_old = launched_step >= self._at_step + self.steps_kept
        if self._sum is None or too_old or (some_left and self.steps_kept == 1):
            self._sum, self._at_step, self._counted, came = self.start(), launched_step, {}, reqs
        self._sum = self.add(self._sum, came)
        self._counted.update(dict.fromkeys(came))
        return self._sum

    def forget(self) -> None:
        """Make the next sum anew."""
        self._sum = None
