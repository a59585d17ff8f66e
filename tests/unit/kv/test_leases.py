"""Leases: what they promise to the holder of a baton, and when they end."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from shared.batch.effects import Send, WorkerEffect
from shared.batch.req import Req
from shared.kv.kv_memory import KvMemory
from shared.kv.leases import LeaseCounters, LeaseEnd, LeaseTable
from shared.kv.page_pool import PageState
from shared.primitives.errors import InvariantError
from shared.wire.baton import Baton, Holder, agent_name
from shared.wire.messages import Refused, Release, Renew
from tests.unit.scheduling.worker_bench import PlainWords, params

LEASE_SECONDS = 10.0
PAGE = 4


class Book:
    """A lease table over real pages, and what it said."""

    def __init__(self, words: int = 4, epoch: int = 5):
        self.memory = KvMemory(pages=32, page_size=PAGE)
        self.words = PlainWords([0] * words)
        self.effects: list[WorkerEffect] = []
        holder = Holder("decode-0", epoch, agent_name("decode-0", epoch), b"", 0, 64, 0)
        self.ended: list[tuple[str, LeaseEnd]] = []
        self.table = LeaseTable(
            self.memory,
            holder,
            self.words,
            "format",
            LEASE_SECONDS,
            LeaseCounters(),
            self.effects,
            on_end=lambda req, end: self.ended.append((req.rid, end)),
        )

    def request(self, rid: str, attempt: int = 1, router: str = "router") -> Req:
        """A request that owns two pages of KV."""
        req = Req(rid, attempt, router, 1, [ord(rid[0])] * 2 * PAGE, 2 * PAGE, params(4), kv_len=2 * PAGE)
        self.memory.allocate(req, 2)
        return req

    def grant(self, rid: str, attempt: int = 1, router: str = "router") -> Baton:
        return self.table.grant(self.request(rid, attempt, router), now=0.0)

    def leased(self) -> list[str]:
        return [req.rid for req in self.table.reqs]


def test_the_word_holds_the_nonce_as_long_as_the_lease_lives() -> None:
    book = Book()
    baton = book.grant("a")
    assert book.words.values[baton.lease] == baton.nonce != 0
    book.table.on_command(Release("a", 1), now=1.0)
    assert book.words.values[baton.lease] == 0


def test_the_word_is_clear_before_the_pages_are_unlocked() -> None:
    seen: list[int] = []

    class WatchedWords(PlainWords):
        def clear(self, lease: int) -> None:
            super().clear(lease)
            seen.append(book.memory.pool.count(PageState.OWNED))

    book = Book()
    book.table._words = WatchedWords([0] * 4)
    book.grant("a")
    book.table.cancel("a", 1)
    assert seen == [2]  # still the request's when its word was cleared
    assert book.memory.pool.count(PageState.OWNED) == 0


def test_a_baton_names_the_pages_and_the_layout_of_what_is_leased() -> None:
    book = Book()
    req = book.request("a")
    baton = book.table.grant(req, now=0.0)
    assert (baton.pages, baton.kv_len, baton.prompt_len) == (tuple(req.pages), 2 * PAGE, 2 * PAGE)
    assert (baton.rid, baton.attempt, baton.kv_format, baton.holder.epoch) == ("a", 1, "format", 5)


def test_a_lease_opens_the_pages_that_its_baton_names_and_no_page_behind_the_kv() -> None:
    opened: list[tuple[int, tuple[int, ...]]] = []

    class NotedWords(PlainWords):
        def open(self, lease: int, pages: Sequence[int]) -> int:
            opened.append((lease, tuple(pages)))
            return super().open(lease, pages)

    book = Book()
    book.table._words = NotedWords([0] * 4)
    req = book.request("a")
    book.memory.allocate(req, 1)
    baton = book.table.grant(req, now=0.0)
    assert opened == [(baton.lease, baton.pages)]
    assert len(baton.pages) == 2


def test_there_are_as_many_leases_as_words() -> None:
    book = Book(words=2)
    book.grant("a")
    book.grant("b")
    assert book.table.free == 0
    book.table.cancel("b", 1)
    assert book.table.free == 1


def test_a_request_has_one_lease_at_most() -> None:
    book = Book()
    book.grant("a")
    with pytest.raises(InvariantError, match="request a already has a lease"):
        book.grant("a", attempt=2)


def test_a_lease_ends_this_long_after_its_last_renewal_and_its_router_hears_of_it() -> None:
    book = Book()
    book.grant("a")
    book.table.on_command(Renew("a", 1), now=6.0)
    assert book.table.next_expiry() == 16.0
    book.table.expire(15.9)
    assert book.leased() == ["a"]
    book.table.expire(16.0)
    assert book.leased() == []
    assert book.effects == [Send("router", Refused("a", 1, "stale", "the lease was not renewed"))]


@pytest.mark.parametrize(("rid", "attempt"), [("unknown", 1), ("a", 2)])
@pytest.mark.parametrize("command", [Renew, Release])
def test_a_command_about_anything_else_changes_nothing(
    command: type[Renew] | type[Release], rid: str, attempt: int
) -> None:
    book = Book()
    book.grant("a")
    book.table.on_command(command(rid, attempt), now=6.0)
    assert (book.leased(), book.table.next_expiry()) == (["a"], LEASE_SECONDS)


def test_a_cancel_ends_the_lease_of_its_attempt_and_of_older_ones() -> None:
    book = Book()
    book.grant("a", attempt=2)
    assert not book.table.cancel("a", 1)
    assert book.table.cancel("a", 3)
    assert not book.table.cancel("a", 3)


def test_leases_expire_oldest_first() -> None:
    book = Book()
    for rid in ("c", "a", "b"):
        book.grant(rid)
    book.table.expire(LEASE_SECONDS)
    assert [effect.message.rid for effect in book.effects if isinstance(effect, Send)] == ["c", "a", "b"]  # type: ignore[attr-defined]


def test_the_leases_of_a_router_end_with_it() -> None:
    book = Book()
    book.grant("a", router="one")
    book.grant("b", router="two")
    book.table.forget_router("two")
    assert book.leased() == ["a"]


def test_a_page_under_several_leases_counts_once() -> None:
    book = Book()
    first, second = book.request("a"), book.request("b")
    book.memory.pool.retire([second.owned.pop()], PageState.OWNED, after_step=0)
    second.pages = [first.pages[0], second.pages[0]]  # as when both match the same block
    book.table.grant(first, 0.0)
    book.table.grant(second, 0.0)
    assert book.table.pages == 3
    book.table.cancel("a", 1)
    assert book.table.pages == 2
    book.table.cancel("b", 1)
    assert book.table.pages == 0
