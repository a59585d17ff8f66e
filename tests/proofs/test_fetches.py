"""Real fetches, some: whatever happens to them, what lands is right."""

from __future__ import annotations

import pytest

from tests.proofs.fetches import prove


@pytest.mark.parametrize(("way", "fetches"), [("memory", 3_000), ("tls", 600)])
def test_what_lands_is_right_under_faults_aborts_and_reuse(way: str, fetches: int) -> None:
    result = prove([way], fetches, kills=1, seed=0)
    assert result.broken == []
    for happened in ("landed", "given up", "ended late", "stale", "holders killed", "reused pages looked at"):
        assert result.seen[f"{way}: {happened}"], happened
    # Fetches over which the lease word did not hold, and which have other bytes than the baton promised: a reader that
    # did not read the word would have taken them.
    assert result.seen[f"{way}: stale, with another's bytes"]
