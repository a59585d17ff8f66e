"""Claims about the admission of EXTEND: what fits a step, where it is cut, and what is held meanwhile."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.batch.req import Req
from shared.kv.kv_memory import KvMemory
from shared.kv.page_pool import PageState, pages_for_tokens
from shared.kv.radix_cache import Node
from shared.primitives.errors import InvariantError
from shared.scheduling.prefill_adder import AddResult, PrefillAdder, step_input
from tests.unit.kv.lettered_pages import PAGE, cached, check, insert, new_memory, request

CONTINUE, NO_TOKENS, OTHER = AddResult.CONTINUE, AddResult.NO_TOKENS, AddResult.OTHER


def _adder(
    memory: KvMemory,
    *,
    chunk: int = 1000,
    max_prefill_tokens: int = 1000,
    short_tokens: int = 0,
) -> PrefillAdder:
    return PrefillAdder(memory, step_input(max_prefill_tokens, chunk, PAGE), short_tokens)


def _rows(adder: PrefillAdder) -> list[tuple[int, int, int, bool]]:
    return [(extend.req.sequence, extend.start, extend.end, extend.last) for extend in adder.extends]


def _prompt(tokens: int) -> list[int]:
    return list(range(tokens))


# ---- one request ----


@pytest.mark.parametrize(
    ("tokens", "pages"),
    [
        pytest.param(1, 1, id="a prompt of one token"),
        pytest.param(PAGE - 1, 1, id="a prompt shorter than a page"),
        pytest.param(PAGE, 1, id="a prompt of exactly one page"),
        pytest.param(PAGE + 1, 2, id="a page and one"),
        pytest.param(3 * PAGE, 3, id="exactly k pages"),
    ],
)
def test_a_request_gets_the_pages_of_its_prompt_and_no_more(tokens: int, pages: int) -> None:
    memory = new_memory()
    cache = memory.cache
    req = request(_prompt(tokens), 1)
    adder = _adder(memory)
    assert adder.add(req) is CONTINUE
    assert _rows(adder) == [(1, 0, tokens, True)]
    assert len(req.pages) == pages
    assert req.owned == req.pages
    assert (req.cached_len, req.launched_len) == (0, 0)
    check(cache)


def test_a_cached_prefix_is_locked_and_only_the_rest_is_computed() -> None:
    memory = new_memory()
    cache = memory.cache
    table = insert(cache, "ab")
    req = request("abc", 1)
    adder = _adder(memory)
    assert adder.add(req) is CONTINUE
    assert _rows(adder) == [(1, 2 * PAGE, 3 * PAGE, True)]
    assert req.pages == table + req.owned
    assert (req.cached_len, len(req.owned)) == (2 * PAGE, 1)
    assert (cache.evict(9), cache.locks) == (0, 1)
    check(cache)


def test_a_prompt_that_is_cached_whole_still_leaves_a_token_to_compute() -> None:
    memory = new_memory()
    cache = memory.cache
    insert(cache, "ab")
    req = request("ab", 1)
    adder = _adder(memory)
    assert adder.add(req) is CONTINUE
    assert _rows(adder) == [(1, PAGE, 2 * PAGE, True)]


def test_a_prefix_of_another_namespace_is_no_hit() -> None:
    memory = new_memory()
    cache = memory.cache
    insert(cache, "ab", extra_key="tenant")
    req = request("abc", 1)
    _adder(memory).add(req)
    assert req.cached_len == 0


def test_a_request_that_was_admitted_is_not_admitted_again() -> None:
    memory = new_memory()
    req = request("a", 1)
    _adder(memory).add(req)
    with pytest.raises(InvariantError, match="admitted already"):
        _adder(memory).add(req)


def test_only_a_request_with_tokens_left_has_a_chunk_to_continue() -> None:
    memory = new_memory()
    with pytest.raises(InvariantError, match="no chunk to continue"):
        _adder(memory).add_chunked(request("ab", 1))
    req = request("ab", 1)
    _adder(memory).add(req)
    req.launched_len = 2 * PAGE
    with pytest.raises(InvariantError, match="no chunk to continue"):
        _adder(memory).add_chunked(req)


# ---- memory ----


@pytest.mark.parametrize(
    ("pool_pages", "tokens", "result"),
    [
        pytest.param(3, 3 * PAGE, CONTINUE, id="a prompt that fills the pool to the last token"),
        pytest.param(3, 2 * PAGE + 1, CONTINUE, id="a prompt that fills the pool to the last page"),
        pytest.param(3, 3 * PAGE + 1, NO_TOKENS, id="a prompt of one token too many"),
    ],
)
def test_a_prompt_that_can_fit_alone_is_admitted_alone(
    pool_pages: int, tokens: int, result: AddResult
) -> None:
    assert _adder(new_memory(pool_pages)).add(request(_prompt(tokens), 1)) is result


def test_a_request_that_does_not_fit_holds_nothing() -> None:
    memory = new_memory(pages=3)
    cache = memory.cache
    insert(cache, "ab")
    req = request("abcd", 1)
    adder = _adder(memory)
    assert adder.add(req) is NO_TOKENS
    assert (req.node, req.pages, req.owned) == (None, [], [])
    assert (cache.locks, cached(cache, "ab"), adder.extends) == (0, 2, [])
    check(cache)


def test_cached_pages_that_nobody_holds_make_room() -> None:
    memory = new_memory(pages=4)
    cache = memory.cache
    insert(cache, "wxyz")
    adder = _adder(memory)
    assert adder.add(request("abc", 1)) is CONTINUE
    assert cached(cache, "wxyz") == 1
    check(cache)


def test_its_own_cached_prefix_does_not_count_as_room_for_the_rest() -> None:
    memory = new_memory(pages=3)
    cache = memory.cache
    insert(cache, "ab")
    assert _adder(memory).add(request("abcd", 1)) is NO_TOKENS
    assert _adder(memory).add(request("abc", 2)) is CONTINUE
    assert cached(cache, "ab") == 2


def test_evicted_pages_that_a_step_still_reads_are_waited_for_but_evicted_once() -> None:
    memory = new_memory(pages=4)
    cache = memory.cache
    for names in ("wx", "yz"):
        own = cache.pool.allocate(2, PageState.OWNED)
        node = cache.insert(request(names).token_ids, own).node
        cache.lock(node)
        cache.unlock(node, last_step=1)
    req = request("ab", 1)
    assert [_adder(memory).add(req) for _ in range(3)] == [NO_TOKENS] * 3
    assert cache.pool.count(PageState.TREE) == 2
    cache.pool.reclaim(1)
    assert _adder(memory).add(req) is CONTINUE
    assert cache.pool.count(PageState.TREE) == 2


# ---- input and chunks ----


@pytest.mark.parametrize(
    ("tokens", "end"),
    [
        pytest.param(2 * PAGE, 2 * PAGE, id="what fits the chunk is not cut"),
        pytest.param(2 * PAGE + 1, 2 * PAGE, id="one token more is"),
        pytest.param(9 * PAGE, 2 * PAGE, id="a long prompt is cut at the chunk size"),
    ],
)
def test_a_prompt_is_cut_at_the_chunk_size(tokens: int, end: int) -> None:
    memory = new_memory()
    req = request(_prompt(tokens), 1)
    adder = _adder(memory, chunk=2 * PAGE)
    assert adder.add(req) is CONTINUE
    assert _rows(adder) == [(1, 0, end, end == tokens)]
    assert len(req.pages) == 2


@pytest.mark.parametrize(
    ("chunk", "end"),
    [
        pytest.param(2 * PAGE + 3, 2 * PAGE, id="a chunk size off the page boundary"),
        pytest.param(1, PAGE, id="a chunk size below a page counts as one"),
    ],
)
def test_chunks_end_at_page_boundaries(chunk: int, end: int) -> None:
    adder = _adder(new_memory(), chunk=chunk)
    adder.add(request(_prompt(50), 1))
    assert _rows(adder) == [(1, 0, end, False)]


def test_a_step_takes_no_more_input_than_the_lesser_of_its_budgets() -> None:
    adder = _adder(new_memory(), chunk=4 * PAGE, max_prefill_tokens=3 * PAGE)
    assert [adder.add(request(names, i)) for i, names in enumerate(["ab", "cd", "ef"])] == [
        CONTINUE,
        CONTINUE,
        OTHER,
    ]
    assert _rows(adder) == [(0, 0, 2 * PAGE, True), (1, 0, PAGE, False)]


def test_cached_tokens_cost_no_input() -> None:
    memory = new_memory()
    cache = memory.cache
    insert(cache, "abc")
    adder = _adder(memory, chunk=PAGE)
    assert adder.add(request("abcd", 1)) is CONTINUE
    assert _rows(adder) == [(1, 3 * PAGE, 4 * PAGE, True)]


def test_only_one_request_is_cut_in_a_step() -> None:
    adder = _adder(new_memory(), chunk=2 * PAGE + 2)
    results = [adder.add(request(_prompt(50), 1)), adder.add(request(_prompt(40), 2))]
    assert results == [CONTINUE, OTHER]
    assert _rows(adder) == [(1, 0, 2 * PAGE, False)]


def test_what_the_page_boundary_leaves_of_a_step_serves_a_short_request() -> None:
    adder = _adder(new_memory(), chunk=2 * PAGE + 2)
    assert [adder.add(request(_prompt(50), 1)), adder.add(request([7, 8], 2))] == [CONTINUE, CONTINUE]
    assert _rows(adder) == [(1, 0, 2 * PAGE, False), (2, 0, 2, True)]


def test_a_prompt_that_is_cut_leaves_input_to_short_ones_and_takes_what_they_leave() -> None:
    memory = new_memory()
    adder = _adder(memory, chunk=6 * PAGE, short_tokens=3 * PAGE + 1)
    assert adder.add(request(_prompt(50), 1)) is CONTINUE
    assert _rows(adder) == [(1, 0, 3 * PAGE, False)]
    assert adder.add(request([9] * (PAGE + 1), 2)) is CONTINUE
    assert adder.add(request([8] * (2 * PAGE), 3)) is OTHER
    assert adder.fill() == 2 * PAGE
    assert _rows(adder) == [(1, 0, 4 * PAGE, False), (2, 0, PAGE + 1, True)]
    check(memory.cache)


def test_a_prompt_beside_that_nobody_stands_loses_nothing_to_short_ones() -> None:
    adder = _adder(new_memory(), chunk=6 * PAGE, short_tokens=3 * PAGE)
    adder.add(request(_prompt(50), 1))
    assert adder.fill() == 0
    assert _rows(adder) == [(1, 0, 6 * PAGE, False)]


@pytest.mark.parametrize("short_tokens", [2 * PAGE, 99])
def test_a_prompt_that_is_cut_keeps_a_page_of_the_step(short_tokens: int) -> None:
    adder = _adder(new_memory(), chunk=2 * PAGE, short_tokens=short_tokens)
    adder.add(request(_prompt(50), 1))
    adder.add(request([9] * PAGE, 2))
    assert adder.fill() == PAGE
    assert _rows(adder) == [(1, 0, PAGE, False), (2, 0, PAGE, True)]


def test_the_last_chunk_leaves_nothing_to_short_ones() -> None:
    adder = _adder(new_memory(), chunk=3 * PAGE, short_tokens=PAGE)
    adder.add(request(_prompt(3 * PAGE), 1))
    assert adder.add(request([9], 2)) is OTHER
    assert adder.fill() == 0


def test_short_prompts_leave_the_pages_that_the_rest_of_a_cut_one_needs() -> None:
    memory = new_memory(pages=5)
    adder = _adder(memory, chunk=3 * PAGE, short_tokens=2 * PAGE)
    assert adder.add(request(_prompt(4 * PAGE), 1)) is CONTINUE
    assert adder.add(request([9] * (PAGE + 1), 2)) is NO_TOKENS
    assert adder.add(request([9] * PAGE, 3)) is CONTINUE


def test_the_rest_of_a_cut_prompt_is_reserved_for_it() -> None:
    memory = new_memory(pages=4)
    adder = _adder(memory, chunk=2 * PAGE + 2)
    assert adder.add(request(_prompt(4 * PAGE), 1)) is CONTINUE
    assert adder.add(request([7, 8], 2)) is NO_TOKENS


def test_the_chunked_request_goes_first_and_others_fill_the_step() -> None:
    memory = new_memory()
    cache = memory.cache
    long = request(_prompt(3 * PAGE), 1)
    _adder(memory, chunk=2 * PAGE).add(long)
    long.launched_len = 2 * PAGE
    adder = _adder(memory, chunk=2 * PAGE)
    assert adder.add_chunked(long) is CONTINUE
    assert adder.add(request([9] * PAGE, 2)) is CONTINUE
    assert _rows(adder) == [(1, 2 * PAGE, 3 * PAGE, True), (2, 0, PAGE, True)]
    assert len(long.pages) == 3
    check(cache)


def test_a_chunk_without_room_waits_with_what_it_has() -> None:
    memory = new_memory(pages=4)
    cache = memory.cache
    long = request(_prompt(4 * PAGE), 1)
    _adder(memory, chunk=2 * PAGE).add(long)
    long.launched_len = 2 * PAGE
    taken = cache.pool.allocate(1, PageState.ARRIVING)
    adder = _adder(memory, chunk=2 * PAGE)
    assert adder.add_chunked(long) is NO_TOKENS
    assert (len(long.pages), adder.extends) == (2, [])
    cache.pool.retire(taken, PageState.ARRIVING, after_step=0)
    assert adder.add_chunked(long) is CONTINUE


@settings(max_examples=150, deadline=None)
@given(
    prompts=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    chunk=st.integers(1, 30),
    max_prefill_tokens=st.integers(1, 60),
    pool_pages=st.integers(10, 24),
    short_tokens=st.integers(0, 40),
)
def test_all_prompts_are_computed_whole_in_order_and_the_pool_balances(
    prompts: list[int], chunk: int, max_prefill_tokens: int, pool_pages: int, short_tokens: int
) -> None:
    """Steps until all is done; each request gives its pages up with its last row, as an aborted one does."""
    memory = new_memory(pool_pages)
    cache = memory.cache
    waiting = [request([sequence] * tokens, sequence) for sequence, tokens in enumerate(prompts)]
    chunked: Req | None = None
    done: list[int] = []
    for step in range(1, 2 + sum(prompts)):
        adder = _adder(memory, chunk=chunk, max_prefill_tokens=max_prefill_tokens, short_tokens=short_tokens)
        if chunked is not None:
            assert adder.add_chunked(chunked) is CONTINUE
            chunked = None
        while waiting and adder.add(waiting[0]) is CONTINUE:
            waiting.pop(0)
        adder.fill()
        assert sum(e.end - e.start for e in adder.extends) <= max(min(chunk, max_prefill_tokens), PAGE)
        assert sum(not extend.last for extend in adder.extends) <= 1
        for extend in adder.extends:
            req = extend.req
            assert extend.start == (req.launched_len or req.cached_len) < extend.end
            assert len(req.pages) == pages_for_tokens(extend.end, PAGE)
            req.launched_len = extend.end
            if not extend.last:
                assert extend.end % PAGE == 0
                chunked = req
                continue
            done.append(req.sequence)
            cache.pool.retire(req.owned, PageState.OWNED, after_step=step)
            assert isinstance(req.node, Node)
            cache.unlock(req.node, last_step=step)
        check(cache)
        cache.pool.reclaim(step)
        if len(done) == len(prompts):
            break
    assert sorted(done) == list(range(len(prompts)))
    assert cache.pool.free == pool_pages
