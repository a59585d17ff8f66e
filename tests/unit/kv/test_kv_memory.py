"""What requests do to pages: nothing is freed under a launched step, and no block is held twice for long."""

from __future__ import annotations

from shared.batch.req import Req
from shared.kv.kv_memory import KvMemory
from shared.kv.page_pool import PageState
from tests.unit.scheduling.worker_bench import PAGE_SIZE, params, prompt


def request(length: int, family: int = 1, sequence: int = 1) -> Req:
    return Req(f"r{sequence}", 1, "router", sequence, list(prompt(length, family)), length, params(8))


def computed(memory: KvMemory, req: Req, kv_len: int | None = None) -> Req:
    """The request with its pages allocated and this many tokens settled."""
    length = len(req.token_ids) if kv_len is None else kv_len
    memory.match(req, len(req.token_ids) - 1)
    assert memory.allocate(req, memory.pages_missing(req, length)) is not None
    req.kv_len = req.launched_len = length
    return req


def test_pages_given_up_are_free_only_after_the_last_launched_step() -> None:
    memory = KvMemory(8, PAGE_SIZE)
    req = computed(memory, request(6))
    memory.launched_step = 3
    memory.release(req)
    assert memory.pool.count(PageState.RETIRING) == 2
    memory.pool.reclaim(2)
    assert memory.pool.count(PageState.RETIRING) == 2
    memory.pool.reclaim(3)
    assert memory.pool.free == 8


def test_cached_pages_given_up_are_not_evicted_into_use_under_a_launched_step() -> None:
    memory = KvMemory(4, PAGE_SIZE)
    req = computed(memory, request(16))
    memory.commit(req)
    memory.launched_step = 3
    memory.release(req)
    assert memory.allocate(request(16, family=2), 4) is None
    memory.pool.reclaim(3)
    assert memory.allocate(request(16, family=2), 4) is not None


def test_only_whole_settled_pages_are_committed() -> None:
    memory = KvMemory(8, PAGE_SIZE)
    req = computed(memory, request(11), kv_len=7)
    memory.commit(req)
    assert memory.pool.count(PageState.TREE) == 1
    assert req.owned == req.pages[1:]
    memory.release(req)
    memory.check()


def test_a_prompt_of_exactly_k_pages_is_committed_whole() -> None:
    memory = KvMemory(8, PAGE_SIZE)
    req = computed(memory, request(8))
    memory.commit(req)
    assert (memory.pool.count(PageState.TREE), req.owned) == (2, [])


def test_a_prompt_shorter_than_a_page_is_not_cached() -> None:
    memory = KvMemory(8, PAGE_SIZE)
    req = computed(memory, request(3))
    memory.commit(req)
    memory.release(req)
    assert memory.pool.free == 8


def test_what_a_request_holds_in_the_tree_is_not_evicted() -> None:
    memory = KvMemory(4, PAGE_SIZE)
    memory.commit(computed(memory, request(8)))
    assert memory.allocate(request(12, family=2), 3) is None
    memory.check()


def test_pages_that_lack_are_those_that_lack_after_a_match() -> None:
    memory = KvMemory(12, PAGE_SIZE)
    memory.commit(computed(memory, request(8)))  # and stays
    for family in (2, 3):
        idle = computed(memory, request(12, family))
        memory.commit(idle)
        memory.release(idle)
    for family, length in ((1, 20), (2, 8), (2, 30), (3, 12), (4, 60)):
        req = request(length, family)
        lacking = memory.pages_lacking(req, length)
        memory.match(req, length)
        assert lacking == memory.pages_for(length) - len(req.pages) - memory.available_pages, (family, length)
        memory.unmatch(req)


def test_what_was_looked_at_is_evicted_as_if_nobody_had_looked() -> None:
    memory = KvMemory(4, PAGE_SIZE)
    first, second = computed(memory, request(8)), computed(memory, request(8, family=2))
    for req in (first, second):
        memory.commit(req)
        memory.release(req)
    memory.launched_step = 3
    assert memory.pages_lacking(request(6), 6) == -2
    assert memory.cache.evict(3) == 3  # the first has gone, and no step has to end before its pages are free
    assert memory.pool.count(PageState.FREE) == 3
    assert memory.cache.probe(first.token_ids)[1] == 0
    assert memory.cache.probe(second.token_ids)[1] == PAGE_SIZE


def test_a_failed_gift_changes_nothing() -> None:
    memory = KvMemory(2, PAGE_SIZE)
    req = request(12)
    memory.match(req, 11)
    assert memory.allocate(req, 3) is None
    assert (req.pages, req.owned, memory.pool.free) == ([], [], 2)


def test_a_block_committed_twice_stays_its_owners_while_a_slot_names_it() -> None:
    memory = KvMemory(8, PAGE_SIZE)
    first, second = computed(memory, request(8)), computed(memory, request(8, sequence=2))
    memory.commit(first)
    pages = list(second.pages)
    memory.commit(second)
    assert second.pages == second.owned == pages
    memory.release(first)
    memory.release(second)
    memory.check()


def test_a_shared_block_is_held_once() -> None:
    """Else a request that fits the pool alone might find no room to finish."""
    memory = KvMemory(5, PAGE_SIZE)
    first, second = computed(memory, request(9)), computed(memory, request(8, sequence=2))
    memory.commit_and_dedupe(first)
    second.token_ids.append(5)
    memory.commit_and_dedupe(second)
    assert second.pages == first.pages[:2]
    assert second.owned == []
    memory.release(first)
    assert memory.allocate(second, 3) is not None
    memory.check()


def test_sharing_keeps_the_pages_behind_the_shared_ones() -> None:
    memory = KvMemory(8, PAGE_SIZE)
    first, second = computed(memory, request(8)), computed(memory, request(14, sequence=2))
    assert second.cached_len == 0
    tail = second.pages[2:]
    memory.commit_and_dedupe(first)
    memory.commit_and_dedupe(second)
    assert second.pages == [*first.pages, *tail]
    assert second.owned == tail[1:]
    memory.release(first)
    memory.release(second)
    assert memory.available_pages == 8


def test_what_has_come_into_the_cache_takes_the_place_of_own_pages() -> None:
    memory = KvMemory(9, PAGE_SIZE)
    first, second = computed(memory, request(8)), computed(memory, request(14, sequence=2))
    assert memory.rematch(second, 13) == 0, "nothing has come"
    tail = second.pages[2:]
    memory.commit(first)
    assert memory.rematch(second, 7) == PAGE_SIZE, "no more than it may reuse"
    assert memory.rematch(second, 13) == PAGE_SIZE
    assert (second.pages, second.owned, second.cached_len) == ([*first.pages, *tail], tail, 8)
    assert memory.pool.free == 5, "its own pages are free at once: no step has seen them"
    memory.release(first)
    assert memory.allocate(request(36, family=2), 7) is None, "what it took is locked"
    memory.release(second)
    memory.pool.reclaim(memory.launched_step)
    memory.check()
    assert memory.available_pages == 9


def test_a_request_would_free_what_nobody_else_locks() -> None:
    memory = KvMemory(12, PAGE_SIZE)
    first = computed(memory, request(9))
    memory.commit_and_dedupe(first)
    assert memory.releasable_pages(first) == 3
    second = computed(memory, request(9, sequence=2))
    assert memory.releasable_pages(first) == 1
    room = memory.available_pages
    memory.release(second)
    assert memory.available_pages == room + 1


def test_pages_of_another_key_are_not_found() -> None:
    memory = KvMemory(16, PAGE_SIZE)
    first = request(12)
    first.extra_key = "a"
    memory.commit(computed(memory, first))
    for key, tokens in (("b", 0), ("", 0), ("a", 8)):
        other = request(12, sequence=2)
        other.extra_key = key
        memory.match(other, 11)
        assert other.cached_len == tokens, key
        memory.release(other)
