"""How KV arrives at a decode worker: what is fetched, what never is, and what an unproven read costs."""

from __future__ import annotations

import msgspec
import pytest

from shared.kv.page_pool import PageState
from shared.wire.messages import Cancel, Finished, Joined, Refused
from tests.unit.decode.bench import DecodeBench
from tests.unit.scheduling.worker_bench import decode, prompt


def transferring(**settings: int) -> DecodeBench:
    """A bench whose request `a`, of three pages, is being fetched."""
    bench = DecodeBench(routers=2, **settings)  # type: ignore[arg-type]
    bench.send(decode("a", prompt(9)))
    bench.turn()
    assert bench.fetcher.under_way == [1]
    return bench


def test_the_batons_pages_are_read_into_pages_of_its_own() -> None:
    bench = transferring()
    baton, start_page, into = bench.fetcher.started[1]
    assert (baton.rid, start_page, len(into)) == ("a", 0, 3)
    assert {bench.core.memory.pool.state(page) for page in into} == {PageState.ARRIVING}


def test_a_landed_request_joins_and_says_so() -> None:
    bench = transferring()
    bench.run()
    (joined,) = bench.said(Joined)
    assert (joined.rid, joined.fetched_bytes, joined.cached_tokens) == ("a", 3 * 64, 0)
    assert (joined.transport, joined.link_bytes_per_second) == ("tcp/eth0", 1e9)
    assert len(bench.tokens("a")) == 7


def test_what_is_cached_here_is_not_fetched() -> None:
    bench = transferring()
    bench.run()
    bench.send(decode("b", (*prompt(8), *prompt(6, family=2))))
    bench.turn()
    _, start_page, into = bench.fetcher.started[2]
    assert (start_page, len(into)) == (2, 2)
    bench.run()
    assert bench.said(Joined)[1].cached_tokens == 8


def test_a_full_hit_fetches_nothing() -> None:
    bench = transferring()
    bench.run()
    bench.send(decode("b", prompt(8)))
    bench.run()
    assert len(bench.fetcher.started) == 1
    assert (bench.core.counters.full_hits, len(bench.tokens("b"))) == (1, 7)
    assert bench.holds_nothing


def test_a_full_hit_that_is_cancelled_in_the_same_turn_never_runs() -> None:
    bench = transferring()
    bench.run()
    bench.send(decode("b", prompt(8)), Cancel("b", 1))
    bench.run()
    assert bench.core.counters.full_hits == 1, "it did not join"
    assert bench.tokens("b") == []
    assert bench.holds_nothing


def test_a_prompt_of_exactly_k_pages_is_shared_by_all_who_have_it() -> None:
    bench = DecodeBench(pages=8)
    bench.send(decode("a", prompt(8)), decode("b", prompt(8)))
    bench.turn()
    bench.fetcher.land_all()
    bench.turn()
    joins = bench.device.batches[0].joins
    assert [len(join.pages) for join in joins] == [2, 2]
    assert joins[0].pages == joins[1].pages  # fetched once, held once
    bench.run()
    assert bench.holds_nothing


def crowd_with_one_prefix() -> DecodeBench:
    """A bench on which `a` fetches two pages that `b` and `c` want as well, and one of its own."""
    bench = DecodeBench(routers=2)
    for number, rid in enumerate("abc"):
        bench.send(decode(rid, (*prompt(8), *prompt(4, family=2 + number))), router=int(rid == "c"))
    bench.turn()
    assert bench.fetcher.under_way == [1]
    assert bench.core.counters.waited_for_prefix == 2
    return bench


def fetches(bench: DecodeBench) -> list[tuple[str, int]]:
    """Who has fetched so far, and from which page on."""
    return [(baton.rid, start_page) for baton, start_page, _ in bench.fetcher.started.values()]


def test_of_those_with_one_prefix_the_first_fetches_it_and_the_others_the_rest() -> None:
    bench = crowd_with_one_prefix()
    assert bench.core.slots_used == 1
    bench.fetcher.land(1)
    bench.turn()
    assert fetches(bench) == [("a", 0), ("b", 2), ("c", 2)]
    bench.run()
    assert [len(bench.tokens(rid)) for rid in "abc"] == [7, 7, 7]
    assert bench.holds_nothing


def test_a_prefix_that_goes_on_behind_another_one_is_fetched_once_as_well() -> None:
    bench = DecodeBench()
    template, question = prompt(8), prompt(8, family=2)
    bench.send(decode("a", (*template, *prompt(4, family=3))))
    bench.send(
        *(
            decode(rid, (*template, *question, *prompt(4, family=number)))
            for number, rid in ((4, "b"), (5, "c"))
        )
    )
    bench.run()
    assert fetches(bench) == [("a", 0), ("b", 2), ("c", 4)]
    assert bench.holds_nothing


def test_no_request_waits_for_a_prefix_of_less_than_a_page_or_under_another_key() -> None:
    bench = DecodeBench()
    bench.send(decode("a", prompt(9)), decode("b", (*prompt(3), *prompt(6, family=2))))
    bench.send(msgspec.structs.replace(decode("c", prompt(9)), extra_key="tenant"))
    bench.turn()
    assert fetches(bench) == [("a", 0), ("b", 0), ("c", 0)]


def test_what_is_cached_under_another_key_is_fetched_all_the_same_and_once() -> None:
    bench = DecodeBench()
    bench.send(decode("a", prompt(9)))
    bench.run()
    bench.send(*(msgspec.structs.replace(decode(rid, prompt(9)), extra_key="tenant") for rid in "bc"))
    bench.run()
    assert fetches(bench)[:2] == [("a", 0), ("b", 0)]
    assert fetches(bench)[2:] == [("c", 2)]
    assert bench.holds_nothing


@pytest.mark.parametrize("end", ["stale", "failed", "not proven to have ended", "cancelled"])
def test_when_the_awaited_fetch_does_not_land_each_fetches_for_itself(end: str) -> None:
    bench = crowd_with_one_prefix()
    match end:
        case "stale":
            bench.fetcher.find_stale(1)
        case "cancelled":
            bench.send(Cancel("a", 1))
        case _:
            bench.fetcher.fail(1, ended=end == "failed")
    bench.turn()
    assert fetches(bench) == [("a", 0), ("b", 0), ("c", 0)]
    if end in ("not proven to have ended", "cancelled"):
        bench.fetcher.end(1)
    bench.run()
    assert [len(bench.tokens(rid)) for rid in "abc"] == [0, 7, 7]
    assert bench.holds_nothing


def test_who_waits_for_a_prefix_can_be_cancelled_and_lost_with_its_router() -> None:
    bench = crowd_with_one_prefix()
    bench.send(Cancel("b", 1))
    bench.routers[1].drop(bench.links)
    bench.run()
    assert fetches(bench) == [("a", 0)]
    assert (len(bench.tokens("a")), bench.core.requests) == (7, [])
    assert bench.holds_nothing


def test_who_finds_no_room_after_waiting_is_refused() -> None:
    bench = DecodeBench(max_running_requests=1)
    bench.send(decode("a", prompt(9)), decode("b", prompt(9)))
    bench.turn()
    bench.fetcher.land(1)
    bench.turn()
    assert [(refused.rid, refused.reason) for refused in bench.said(Refused)] == [("b", "no_room")]


def test_a_prompt_shorter_than_a_page_is_fetched_whole() -> None:
    bench = DecodeBench()
    bench.send(decode("a", prompt(3)))
    bench.run()
    assert len(bench.fetcher.started[1][2]) == 1
    assert len(bench.tokens("a")) == 7
    assert bench.holds_nothing


def test_a_stale_baton_is_refused_and_frees_its_pages() -> None:
    bench = transferring()
    bench.fetcher.find_stale(1)
    bench.run()
    assert [(said.rid, said.reason) for said in bench.said(Refused)] == [("a", "stale")]
    assert bench.core.memory.pool.free == 64


def test_a_failed_fetch_that_has_ended_frees_its_pages() -> None:
    bench = transferring()
    bench.fetcher.fail(1, ended=True)
    bench.run()
    assert [said.reason for said in bench.said(Refused)] == ["unreachable"]
    assert bench.core.memory.pool.free == 64


def test_the_pages_of_an_unproven_read_are_quarantined_until_it_has_ended() -> None:
    bench = transferring()
    bench.fetcher.fail(1, ended=False)
    bench.run()
    assert [said.reason for said in bench.said(Refused)] == ["unreachable"]
    assert bench.core.memory.pool.count(PageState.QUARANTINED) == 3
    assert bench.core.slots_used == 0
    bench.fetcher.end(1)
    bench.turn()
    assert bench.core.memory.pool.free == 64


@pytest.mark.parametrize("how", ["cancel", "router lost"])
def test_giving_up_an_transferring_request_abandons_its_fetch(how: str) -> None:
    bench = transferring()
    if how == "cancel":
        bench.send(Cancel("a", 1))
    else:
        bench.links.drop(bench.routers[0])
    bench.turn()
    assert bench.fetcher.abandoned == [1]
    assert bench.core.memory.pool.count(PageState.QUARANTINED) == 3
    bench.fetcher.end(1)
    bench.run()
    assert bench.holds_nothing
    assert bench.said(Refused) == []


def test_news_of_a_fetch_abandoned_in_the_same_turn_frees_the_pages() -> None:
    bench = transferring()
    bench.fetcher.land(1)
    bench.fetcher.under_way.append(1)
    bench.send(Cancel("a", 1))
    bench.turn()
    assert bench.holds_nothing
    assert bench.said(Joined) == []


def test_a_newer_attempt_replaces_an_transferring_one() -> None:
    bench = transferring()
    bench.send(decode("a", prompt(9, family=2), attempt=2))
    bench.turn()
    assert (bench.fetcher.abandoned, bench.fetcher.under_way) == ([1], [2])
    bench.fetcher.end(1)
    bench.run()
    assert [said.attempt for said in bench.said(Finished)] == [2]
    assert bench.holds_nothing


def test_a_cancel_of_an_older_attempt_changes_nothing() -> None:
    bench = DecodeBench()
    bench.send(decode("a", prompt(9), attempt=2), Cancel("a", 1), decode("a", prompt(9), attempt=1))
    bench.run()
    assert [said.attempt for said in bench.said(Finished)] == [2]
    assert len(bench.fetcher.started) == 1


def test_a_quarantined_page_is_not_allocated() -> None:
    bench = transferring(pages=6)
    bench.fetcher.fail(1, ended=False)
    bench.turn()
    bench.send(decode("b", prompt(9, family=2), max_new_tokens=8))
    bench.run()
    assert [said.reason for said in bench.said(Refused)] == ["unreachable", "no_room"]
    bench.fetcher.end(1)
    bench.turn()
    bench.send(decode("b", prompt(9, family=2), attempt=2))
    bench.run()
    assert [said.rid for said in bench.said(Finished)] == ["b"]
