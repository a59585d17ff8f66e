"""Leases: what they promise to whoever holds a baton, and when they end."""

from __future__ import annotations

import pytest

from shared.errors import InvariantError
from shared.kv.leases import Lease, Leases
from shared.req import Req
from shared.transfer.protocol import PagesRead
from tests.unit.scheduling.worker_bench import PlainWords, params

LEASE_SECONDS = 10.0


def request(rid: str, attempt: int = 1, router: str = "router", pages: tuple[int, ...] = (0, 1)) -> Req:
    return Req(rid, attempt, router, 1, [1, 2, 3], 3, params(4), pages=list(pages))


def book(words: int = 4) -> tuple[Leases, PlainWords]:
    table = PlainWords([0] * words)
    return Leases(table, epoch=5, lease_seconds=LEASE_SECONDS), table


def test_the_word_holds_the_nonce_as_long_as_the_lease_lives() -> None:
    leases, words = book()
    lease = leases.grant(request("a"), now=0.0)
    assert words.values[lease.index] == lease.nonce != 0
    leases.end(lease)
    assert words.values[lease.index] == 0


def test_the_word_is_clear_before_anybody_may_unlock() -> None:
    """`end` returns the request: only then can its caller release the pages."""
    leases, words = book()
    lease = leases.grant(request("a"), now=0.0)
    assert leases.end(lease) is lease.req
    assert not any(words.values)


def test_a_nonce_is_never_used_twice() -> None:
    leases, _ = book(words=1)
    nonces = []
    for _ in range(50):
        lease = leases.grant(request("a"), now=0.0)
        nonces.append(lease.nonce)
        leases.end(lease)
    assert len(dict.fromkeys(nonces)) == 50


def test_a_restarted_worker_uses_other_nonces() -> None:
    first, second = (Leases(PlainWords([0]), epoch, LEASE_SECONDS) for epoch in (2**63 + 1, 2**63 + 2))
    assert first.grant(request("a"), 0.0).nonce != second.grant(request("a"), 0.0).nonce


def test_there_are_as_many_leases_as_words() -> None:
    leases, _ = book(words=2)
    leases.grant(request("a"), 0.0)
    lease = leases.grant(request("b"), 0.0)
    assert leases.free == 0
    leases.end(lease)
    assert leases.free == 1


def test_a_request_has_one_lease_at_most() -> None:
    leases, _ = book()
    leases.grant(request("a"), 0.0)
    with pytest.raises(InvariantError, match="request a already has a lease"):
        leases.grant(request("a", attempt=2), 0.0)


def test_a_lease_ends_so_long_after_its_last_renewal() -> None:
    leases, _ = book()
    lease = leases.grant(request("a"), now=0.0)
    leases.renew("a", 1, now=6.0)
    assert leases.next_expiry() == 16.0
    assert leases.expired(15.9) == []
    assert leases.expired(16.0) == [lease]


@pytest.mark.parametrize(("rid", "attempt"), [("unknown", 1), ("a", 2)])
def test_a_renewal_of_anything_else_changes_nothing(rid: str, attempt: int) -> None:
    leases, _ = book()
    leases.grant(request("a"), now=0.0)
    leases.renew(rid, attempt, now=6.0)
    assert leases.next_expiry() == LEASE_SECONDS


def test_leases_expire_oldest_first() -> None:
    leases, _ = book()
    granted = [leases.grant(request(rid), 0.0) for rid in ("c", "a", "b")]
    assert leases.expired(LEASE_SECONDS) == granted


def test_the_leases_of_one_router_are_found() -> None:
    leases, _ = book()
    leases.grant(request("a", router="one"), 0.0)
    lease = leases.grant(request("b", router="two"), 0.0)
    assert leases.of_router("two") == [lease]


def collected(lease: Lease, **changes: int) -> PagesRead:
    fields = {"lease": lease.index, "nonce": lease.nonce, "attempt": 1} | changes
    return PagesRead(fields["lease"], fields["nonce"], lease.req.rid, fields["attempt"])


def test_a_notification_counts_only_for_the_lease_it_names() -> None:
    leases, _ = book()
    lease = leases.grant(request("a"), 0.0)
    assert leases.collect(collected(lease))
    assert not leases.collect(collected(lease, nonce=lease.nonce + 1))
    assert not leases.collect(collected(lease, attempt=2))
    assert lease.collected == 1
    leases.end(lease)
    assert not leases.collect(collected(lease))


def test_a_page_under_several_leases_counts_once() -> None:
    leases, _ = book()
    first = leases.grant(request("a", pages=(0, 1, 2)), 0.0)
    second = leases.grant(request("b", pages=(0, 1, 3)), 0.0)
    assert leases.pages == 4
    leases.end(first)
    assert leases.pages == 3
    leases.end(second)
    assert leases.pages == 0
