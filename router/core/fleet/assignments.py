"""What requests mean to the worker that they are assigned to, and sums of that.

Placement reads the sums for every worker and request, so they are kept up to date and not made each time. Knows no
workers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Assignment:
    """What one request means to a worker: tokens to compute (prefill) or to hold (decode)."""

    tokens: int
    pages: int
    load_number: int  # how many loads the worker had reported by then
    hit_tokens: int = 0  # … of its prompt that were expected in the worker's cache
    tenant: str = ""
    sent_at: float = 0.0  # seconds
    own: bool = False  # this is the own worker of its prefix, and was to have more of it than is known


@dataclass(slots=True)
class AssignedTotals:
    """Sums over some assignments, kept up to date because placement reads them for every worker and request."""

    requests: int = 0
    tokens: int = 0
    pages: int = 0

    def add(self, tokens: int, pages: int) -> None:
        """Count an assignment in."""
        self.requests += 1
        self.tokens += tokens
        self.pages += pages

    def subtract(self, assignment: Assignment) -> None:
        """Count it out."""
        self.requests -= 1
        self.tokens -= assignment.tokens
        self.pages -= assignment.pages


def totals_of(assignments: Iterable[Assignment]) -> AssignedTotals:
    """The sums, made anew."""
    totals = AssignedTotals()
    for each in assignments:
        totals.add(each.tokens, each.pages)
    return totals
