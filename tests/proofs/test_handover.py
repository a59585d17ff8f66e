"""Hand-overs, some: pulled pages are right in the worlds in which pushed ones are not."""

from __future__ import annotations

from tests.proofs.handover import FAULTS, prove

FIRST = 40  # of the seeds; in two of twenty pushed pages are another's already


def test_pulled_pages_are_right_where_pushed_ones_are_not() -> None:
    result = prove(fetches=500, push_worlds=20, first=FIRST, processes=1)
    assert [name for name in FAULTS if not result.seen[name]] == []
    assert result.seen["pushed: worlds that failed otherwise"] == 0
    assert result.broken == []
