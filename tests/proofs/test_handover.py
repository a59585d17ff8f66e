"""Hand-overs, some: pulled pages are right in the worlds in which pushed ones are not."""

from __future__ import annotations

import pytest

from tests.proofs.handover import prove

LATE = ("fetch abandoned", "fetch failed unproven", "bytes landed after the end of interest")


@pytest.mark.long
def test_pulled_pages_are_right_where_pushed_ones_are_not() -> None:
    result = prove(fetches=300, push_worlds=10, first=40, processes=1)
    assert [name for name in LATE if not result.seen[name]] == []
    assert result.broken == []
