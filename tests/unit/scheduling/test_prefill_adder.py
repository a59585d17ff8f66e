"""Claims about the admission of EXTEND: what fits a step, where it is cut, and what is held meanwhile."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.baton import pages_of
from shared.errors import InvariantError
from shared.kv.page_pool import PageState
from shared.kv.radix_cache import RadixCache
from shared.req import Req
from shared.scheduling.prefill_adder import AddResult, PrefillAdder
from tests.unit.kv.lettered_pages import PAGE, cached, check, insert, new_cache, request

CONTINUE, NO_TOKENS, OTHER = AddResult.CONTINUE, AddResult.NO_TOKENS, AddResult.OTHER


def _adder(
    cache: RadixCache,
    *,
    chunk: int | None = 1000,
    max_prefill_tokens: int = 1000,
    max_output_reserve: int = 4096,
    new_token_ratio: float = 0.0,
    reserved_tokens: int = 0,
) -> PrefillAdder:
    return PrefillAdder(
        cache,
        cache.pool,
        page_size=PAGE,
        max_prefill_tokens=max_prefill_tokens,
        chunked_prefill_size=chunk,
        max_output_reserve=max_output_reserve,
        new_token_ratio=new_token_ratio,
        reserved_tokens=reserved_tokens,
    )


def _rows(adder: PrefillAdder) -> list[tuple[int, int, int, bool]]:
    return [(extend.req.arrival, extend.start, extend.end, extend.last) for extend in adder.extends]


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
    cache = new_cache()
    req = request(_prompt(tokens), 1)
    adder = _adder(cache)
    assert adder.add(req) is CONTINUE
    assert _rows(adder) == [(1, 0, tokens, True)]
    assert len(req.pages) == pages
    assert req.owned == req.pages
    assert (req.cached_len, req.launched_len) == (0, 0)
    check(cache)


def test_a_cached_prefix_is_locked_and_only_the_rest_is_computed() -> None:
    cache = new_cache()
    table = insert(cache, "ab")
    req = request("abc", 1)
    adder = _adder(cache)
    assert adder.add(req) is CONTINUE
    assert _rows(adder) == [(1, 2 * PAGE, 3 * PAGE, True)]
    assert req.pages == table + req.owned
    assert (req.cached_len, len(req.owned)) == (2 * PAGE, 1)
    assert (cache.evict(9), cache.locks) == (0, 1)
    check(cache)


def test_a_prompt_that_is_cached_whole_still_leaves_a_token_to_compute() -> None:
    cache = new_cache()
    insert(cache, "ab")
    req = request("ab", 1)
    adder = _adder(cache)
    assert adder.add(req) is CONTINUE
    assert _rows(adder) == [(1, PAGE, 2 * PAGE, True)]


def test_a_prefix_of_another_namespace_is_no_hit() -> None:
    cache = new_cache()
    insert(cache, "ab", extra_key="tenant")
    req = request("abc", 1)
    _adder(cache).add(req)
    assert req.cached_len == 0


def test_a_request_that_was_admitted_is_not_admitted_again() -> None:
    cache = new_cache()
    req = request("a", 1)
    _adder(cache).add(req)
    with pytest.raises(InvariantError, match="admitted already"):
        _adder(cache).add(req)


def test_only_a_request_with_tokens_left_has_a_chunk_to_continue() -> None:
    cache = new_cache()
    with pytest.raises(InvariantError, match="no chunk to continue"):
        _adder(cache).add_chunked(request("ab", 1))
    req = request("ab", 1)
    _adder(cache).add(req)
    req.launched_len = 2 * PAGE
    with pytest.raises(InvariantError, match="no chunk to continue"):
        _adder(cache).add_chunked(req)


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
    assert _adder(new_cache(pool_pages)).add(request(_prompt(tokens), 1)) is result


@pytest.mark.parametrize("max_new_tokens", range(1, 2 * PAGE + 2))
def test_a_request_whose_output_fills_the_pool_is_admitted_alone(max_new_tokens: int) -> None:
    req = request("a", 1, max_new_tokens=max_new_tokens)
    pool_pages = pages_of(req.final_kv_len, PAGE)
    assert _adder(new_cache(pool_pages), new_token_ratio=1.0).add(req) is CONTINUE


def test_a_request_that_does_not_fit_is_left_as_it_was() -> None:
    cache = new_cache(pages=3)
    insert(cache, "ab")
    req = request("abcd", 1)
    adder = _adder(cache)
    assert adder.add(req) is NO_TOKENS
    assert (req.node, req.pages, req.owned, req.cached_len) == (None, [], [], 0)
    assert (cache.locks, cached(cache, "ab"), adder.extends) == (0, 2, [])
    check(cache)


def test_cached_pages_that_nobody_holds_make_room() -> None:
    cache = new_cache(pages=4)
    insert(cache, "wxyz")
    adder = _adder(cache)
    assert adder.add(request("abc", 1)) is CONTINUE
    assert cached(cache, "wxyz") == 1
    check(cache)


def test_its_own_cached_prefix_does_not_count_as_room_for_the_rest() -> None:
    cache = new_cache(pages=3)
    insert(cache, "ab")
    assert _adder(cache).add(request("abcd", 1)) is NO_TOKENS
    assert _adder(cache).add(request("abc", 2)) is CONTINUE
    assert cached(cache, "ab") == 2


@pytest.mark.parametrize(
    ("reserved_tokens", "result"),
    [
        pytest.param(0, CONTINUE, id="nobody else"),
        pytest.param(2 * PAGE, CONTINUE, id="the others leave just enough"),
        pytest.param(2 * PAGE + 1, NO_TOKENS, id="the others leave a token too few"),
    ],
)
def test_what_running_requests_will_need_is_not_given_away(reserved_tokens: int, result: AddResult) -> None:
    cache = new_cache(pages=4)
    assert _adder(cache, reserved_tokens=reserved_tokens).add(request("ab", 1)) is result


@pytest.mark.parametrize(
    ("ratio", "max_output_reserve", "admitted"),
    [
        pytest.param(0.0, 4096, 8, id="without output reserve prompts fill the pool"),
        pytest.param(1.0, 4096, 1, id="with all output reserved one request does"),
        pytest.param(0.5, 4096, 2, id="with half of it reserved two do"),
        pytest.param(1.0, 4, 3, id="a bounded reserve lets more in"),
    ],
)
def test_output_is_reserved_by_the_new_token_ratio(
    ratio: float, max_output_reserve: int, admitted: int
) -> None:
    cache = new_cache(pages=8)
    adder = _adder(cache, new_token_ratio=ratio, max_output_reserve=max_output_reserve)
    results = [
        adder.add(request([arrival] * PAGE, arrival, max_new_tokens=4 * PAGE)) for arrival in range(10)
    ]
    assert results == [CONTINUE] * admitted + [NO_TOKENS] * (10 - admitted)
    check(cache)


def test_tokens_of_earlier_attempts_are_not_reserved_again() -> None:
    req = request("abc", 1, max_new_tokens=2 * PAGE + 1)
    req.prompt_len = PAGE  # b and c are output already: one token more is allowed
    adder = _adder(new_cache(pages=5), new_token_ratio=1.0)
    assert [adder.add(req), adder.add(request("x", 2))] == [CONTINUE, CONTINUE]


def test_evicted_pages_that_a_step_still_reads_are_waited_for_but_evicted_once() -> None:
    cache = new_cache(pages=4)
    for names in ("wx", "yz"):
        own = cache.pool.allocate(2, PageState.OWNED)
        cache.insert(request(names).token_ids, own, last_step=1)
    req = request("ab", 1)
    assert [_adder(cache).add(req) for _ in range(3)] == [NO_TOKENS] * 3
    assert cache.pool.count(PageState.TREE) == 2
    cache.pool.reclaim(1)
    assert _adder(cache).add(req) is CONTINUE
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
    cache = new_cache()
    req = request(_prompt(tokens), 1)
    adder = _adder(cache, chunk=2 * PAGE)
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
    adder = _adder(new_cache(), chunk=chunk)
    adder.add(request(_prompt(50), 1))
    assert _rows(adder) == [(1, 0, end, False)]


def test_without_chunking_the_first_prompt_is_taken_whole_however_long() -> None:
    adder = _adder(new_cache(), chunk=None, max_prefill_tokens=2 * PAGE)
    assert adder.add(request(_prompt(40), 1)) is CONTINUE
    assert adder.add(request("a", 2)) is OTHER
    assert _rows(adder) == [(1, 0, 40, True)]


def test_without_chunking_a_prompt_that_exceeds_what_is_left_waits() -> None:
    adder = _adder(new_cache(), chunk=None, max_prefill_tokens=3 * PAGE)
    assert [adder.add(request("ab", 1)), adder.add(request("cd", 2))] == [CONTINUE, OTHER]


def test_a_step_takes_no_more_input_than_the_lesser_of_its_budgets() -> None:
    adder = _adder(new_cache(), chunk=4 * PAGE, max_prefill_tokens=3 * PAGE)
    assert [adder.add(request(names, i)) for i, names in enumerate(["ab", "cd", "ef"])] == [
        CONTINUE,
        CONTINUE,
        OTHER,
    ]
    assert _rows(adder) == [(0, 0, 2 * PAGE, True), (1, 0, PAGE, False)]


def test_cached_tokens_cost_no_input() -> None:
    cache = new_cache()
    insert(cache, "abc")
    adder = _adder(cache, chunk=PAGE)
    assert adder.add(request("abcd", 1)) is CONTINUE
    assert _rows(adder) == [(1, 3 * PAGE, 4 * PAGE, True)]


def test_only_one_request_is_cut_in_a_step() -> None:
    adder = _adder(new_cache(), chunk=2 * PAGE + 2)
    results = [adder.add(request(_prompt(50), 1)), adder.add(request(_prompt(40), 2))]
    assert results == [CONTINUE, OTHER]
    assert _rows(adder) == [(1, 0, 2 * PAGE, False)]


def test_what_the_page_boundary_leaves_of_a_step_serves_a_short_request() -> None:
    adder = _adder(new_cache(), chunk=2 * PAGE + 2)
    assert [adder.add(request(_prompt(50), 1)), adder.add(request([7, 8], 2))] == [CONTINUE, CONTINUE]
    assert _rows(adder) == [(1, 0, 2 * PAGE, False), (2, 0, 2, True)]


def test_the_rest_of_a_cut_prompt_is_reserved_for_it() -> None:
    cache = new_cache(pages=4)
    adder = _adder(cache, chunk=2 * PAGE + 2)
    assert adder.add(request(_prompt(4 * PAGE), 1)) is CONTINUE
    assert adder.add(request([7, 8], 2)) is NO_TOKENS


def test_the_chunked_request_goes_first_and_others_fill_the_step() -> None:
    cache = new_cache()
    long = request(_prompt(3 * PAGE), 1)
    _adder(cache, chunk=2 * PAGE).add(long)
    long.launched_len = 2 * PAGE
    adder = _adder(cache, chunk=2 * PAGE)
    assert adder.add_chunked(long) is CONTINUE
    assert adder.add(request([9] * PAGE, 2)) is CONTINUE
    assert _rows(adder) == [(1, 2 * PAGE, 3 * PAGE, True), (2, 0, PAGE, True)]
    assert len(long.pages) == 3
    check(cache)


def test_a_chunk_without_room_waits_with_what_it_has() -> None:
    cache = new_cache(pages=4)
    long = request(_prompt(4 * PAGE), 1)
    _adder(cache, chunk=2 * PAGE).add(long)
    long.launched_len = 2 * PAGE
    taken = cache.pool.allocate(1, PageState.ARRIVING)
    adder = _adder(cache, chunk=2 * PAGE)
    assert adder.add_chunked(long) is NO_TOKENS
    assert (len(long.pages), adder.extends) == (2, [])
    cache.pool.retire(taken, PageState.ARRIVING, after_step=0)
    assert adder.add_chunked(long) is CONTINUE


@settings(max_examples=150, deadline=None)
@given(
    prompts=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    chunk=st.one_of(st.none(), st.integers(1, 30)),
    max_prefill_tokens=st.integers(1, 60),
    pool_pages=st.integers(10, 24),
)
def test_all_prompts_are_computed_whole_in_order_and_the_pool_balances(
    prompts: list[int], chunk: int | None, max_prefill_tokens: int, pool_pages: int
) -> None:
    """Steps until all is done; each request gives its pages up with its last row, as an aborted one does."""
    cache = new_cache(pool_pages)
    waiting = [request([arrival] * tokens, arrival) for arrival, tokens in enumerate(prompts)]
    chunked: Req | None = None
    done: list[int] = []
    for step in range(1, 2 + sum(prompts)):
        adder = _adder(cache, chunk=chunk, max_prefill_tokens=max_prefill_tokens)
        if chunked is not None:
            assert adder.add_chunked(chunked) is CONTINUE
            chunked = None
        while waiting and adder.add(waiting[0]) is CONTINUE:
            waiting.pop(0)
        assert sum(not extend.last for extend in adder.extends) <= 1
        for extend in adder.extends:
            req = extend.req
            assert extend.start == (req.launched_len or req.cached_len) < extend.end
            assert len(req.pages) == pages_of(extend.end, PAGE)
            req.launched_len = extend.end
            if not extend.last:
                assert extend.end % PAGE == 0
                chunked = req
                continue
            done.append(req.arrival)
            cache.pool.retire(req.owned, PageState.OWNED, after_step=step)
            assert req.node is not None
            cache.unlock(req.node, last_step=step)
        check(cache)
        cache.pool.reclaim(step)
        if len(done) == len(prompts):
            break
    assert sorted(done) == list(range(len(prompts)))
    assert cache.pool.free == pool_pages
