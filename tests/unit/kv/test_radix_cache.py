"""Claims about the prefix cache, one by one; `test_radix_cache_model` compares it with a plain dictionary."""

from __future__ import annotations

import pytest

from shared.kv.page_pool import PageState
from shared.kv.radix_cache import Match
from shared.primitives.errors import InvariantError
from tests.unit.kv.lettered_pages import PAGE, cached, check, insert, new_cache, tokens

# ---- matching ----


@pytest.mark.parametrize(
    ("asked", "pages"),
    [
        pytest.param("", 0, id="no tokens match nothing"),
        pytest.param("x", 0, id="a foreign page matches nothing"),
        pytest.param("a", 1, id="one page"),
        pytest.param("abc", 3, id="the prompt itself, of exactly k pages"),
        pytest.param("abcd", 3, id="a longer prompt"),
        pytest.param("abx", 2, id="a prompt that leaves in the middle of an edge"),
        pytest.param("xbc", 0, id="a prompt that differs in its first page only"),
    ],
)
def test_a_match_is_the_longest_cached_prefix_in_whole_pages(asked: str, pages: int) -> None:
    cache = new_cache()
    table = insert(cache, "abc")
    assert cache.match_prefix(tokens(asked)).pages == table[:pages]
    check(cache)


@pytest.mark.parametrize("asked", range(3 * PAGE + 2))
def test_tokens_beyond_the_last_whole_page_do_not_count(asked: int) -> None:
    cache = new_cache()
    table = insert(cache, "abc")
    prompt = [*tokens("abc"), 1]
    assert cache.match_prefix(prompt[:asked]).pages == table[: min(3, asked // PAGE)]


def test_a_prompt_shorter_than_a_page_neither_matches_nor_is_cached() -> None:
    cache = new_cache()
    own = cache.pool.allocate(1, PageState.OWNED)
    inserted = cache.insert([1, 2, 3], own)
    assert inserted.adopted == []
    assert cache.match_prefix([1, 2, 3]).pages == []
    assert cache.pool.count(PageState.OWNED) == 1
    check(cache)


def test_leaving_a_token_to_compute_costs_a_whole_page_of_a_prompt_of_exactly_k_pages() -> None:
    cache = new_cache()
    table = insert(cache, "abc")
    assert cache.match_prefix(tokens("abc")[:-1]).pages == table[:2]


def test_prefixes_of_different_extra_keys_never_meet() -> None:
    cache = new_cache()
    plain = insert(cache, "ab")
    tenant = insert(cache, "ab", extra_key="tenant")
    assert not set(plain) & set(tenant)
    assert cache.match_prefix(tokens("ab")).pages == plain
    assert cache.match_prefix(tokens("ab"), "tenant").pages == tenant
    assert cache.match_prefix(tokens("ab"), "another").pages == []
    check(cache)


def test_the_matched_node_covers_exactly_the_matched_pages() -> None:
    cache = new_cache()
    insert(cache, "abcd")
    match = cache.match_prefix(tokens("abx"))
    cache.lock(match.node)
    assert cache.evictable == 2  # c and d only
    check(cache)


def test_a_split_keeps_the_locks_of_those_who_hold_the_whole_edge() -> None:
    cache = new_cache()
    insert(cache, "abcd")
    whole = cache.match_prefix(tokens("abcd"))
    cache.lock(whole.node)
    part = cache.match_prefix(tokens("abx"))
    assert part.node is not whole.node
    assert cache.evictable == 0
    check(cache)
    cache.unlock(whole.node, last_step=0)
    assert (cache.evictable, cache.locks) == (4, 0)
    check(cache)


def test_a_probe_leaves_no_trace() -> None:
    cache = new_cache()
    insert(cache, "ab")
    insert(cache, "xy")
    assert cache.probe(tokens("az"))[1] == PAGE  # would split, would make "ab" the most recent
    assert cache.probe_pages(tokens("az")) == (1, 1)
    cache.evict(2)
    assert (cached(cache, "ab"), cached(cache, "xy")) == (0, 2)


# ---- insertion ----


def test_an_insertion_takes_over_the_new_pages_only() -> None:
    cache = new_cache()
    first = insert(cache, "ab")
    own = cache.pool.allocate(1, PageState.OWNED)
    inserted = cache.insert(tokens("abc"), first + own)
    assert inserted.adopted == own
    assert cache.match_prefix(tokens("abc")).pages == first + own
    check(cache)


def test_a_block_that_is_cached_already_keeps_its_page_and_the_other_stays_its_owners() -> None:
    cache = new_cache()
    first = insert(cache, "ab")
    own = cache.pool.allocate(3, PageState.OWNED)
    inserted = cache.insert(tokens("abc"), own)
    assert inserted.adopted == own[2:]
    assert cache.match_prefix(tokens("abc")).pages == [*first, own[2]]
    assert [cache.pool.state(page) for page in own[:2]] == [PageState.OWNED] * 2
    check(cache)


def test_the_same_pages_again_change_nothing() -> None:
    cache = new_cache()
    table = insert(cache, "abc")
    before = cache.pool.counts()
    assert cache.insert(tokens("abc"), table).adopted == []
    assert cache.pool.counts() == before
    check(cache)


def test_pages_beyond_the_whole_ones_stay_their_owners() -> None:
    cache = new_cache()
    own = cache.pool.allocate(3, PageState.OWNED)
    inserted = cache.insert([*tokens("a"), 1], own)
    assert inserted.adopted == own[:1]
    assert cache.pool.count(PageState.OWNED) == 2


def test_fewer_pages_than_tokens_are_refused() -> None:
    with pytest.raises(InvariantError, match="2 whole pages of tokens to cache, but only 1 pages given"):
        new_cache().insert(tokens("ab"), [0])


def test_a_page_that_is_not_the_requests_own_is_refused() -> None:
    cache = new_cache()
    arriving = cache.pool.allocate(1, PageState.ARRIVING)
    with pytest.raises(InvariantError, match="is ARRIVING, not OWNED"):
        cache.insert(tokens("a"), arriving)


def test_a_request_that_grows_by_chunks_holds_every_chunk_it_cached() -> None:
    cache = new_cache(pages=4)
    table = cache.pool.allocate(4, PageState.OWNED)
    node = cache.match_prefix([]).node
    cache.lock(node)
    for chunk in ("ab", "abc", "abcd"):
        inserted = cache.insert(tokens(chunk), table)
        cache.lock(inserted.node)
        cache.unlock(node, last_step=0)
        node = inserted.node
        assert (cache.evict(4), cache.locks) == (0, 1)
        check(cache)
    cache.unlock(node, last_step=0)
    assert cache.evict(9) == 4


# ---- misuse ----


def test_unlocking_more_often_than_locking_is_found() -> None:
    cache = new_cache()
    insert(cache, "a")
    node = cache.match_prefix(tokens("a")).node
    with pytest.raises(InvariantError, match="not locked"):
        cache.unlock(node, last_step=0)


def test_locking_what_was_evicted_since_is_found() -> None:
    cache = new_cache()
    insert(cache, "a")
    node = cache.match_prefix(tokens("a")).node
    cache.evict(1)
    with pytest.raises(InvariantError, match="evicted"):
        cache.lock(node)


def test_everything_can_be_evicted_but_what_is_locked() -> None:
    cache = new_cache()
    insert(cache, "abc")
    node = cache.match_prefix(tokens("a")).node
    cache.lock(node)
    assert cache.evict(3) == 2
    cache.unlock(node, last_step=0)
    assert cache.evict(3) == 1
    assert cache.pool.free == cache.pool.total
    check(cache)


@pytest.mark.parametrize(
    ("corrupt", "complaint"),
    [
        pytest.param(
            lambda cache, held: cache.pool.retire(held.pages[:1], PageState.TREE, 0),
            "is in the tree but FREE",
            id="a page freed under the tree",
        ),
        pytest.param(
            lambda _, held: setattr(held.node.parent, "lock_count", 0),
            "locked less than its children",
            id="a prefix unlocked under its continuation",
        ),
        pytest.param(
            lambda cache, _: setattr(cache, "evictable", 7), "counted 7", id="evictable pages miscounted"
        ),
        pytest.param(
            lambda _, held: held.node.parent.children.clear(), "pages in the tree", id="a lost branch"
        ),
        pytest.param(
            lambda _, held: setattr(held.node, "token_ids", (*held.node.token_ids, 1)),
            "5 tokens on pages",
            id="a stray token",
        ),
        pytest.param(
            lambda _, held: setattr(held.node, "parent", None), "hang where it says", id="an orphan"
        ),
    ],
)
def test_the_check_finds_a_tree_that_does_not_hold_together(corrupt: object, complaint: str) -> None:
    cache = new_cache()
    insert(cache, "ab")
    insert(cache, "ac")
    held: Match = cache.match_prefix(tokens("ab"))
    cache.lock(held.node)
    check(cache)
    assert callable(corrupt)
    corrupt(cache, held)
    with pytest.raises(InvariantError, match=complaint):
        cache.check()
