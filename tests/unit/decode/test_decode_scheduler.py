"""The decode core, claim by claim: steps, ends, the extra token, messages, and the end of a request in every state."""

from __future__ import annotations

import pytest

from shared.batch.schedule_batch import ForwardMode
from shared.kv.page_pool import PageState
from shared.wire.messages import Cancel, Failed, Finished, Generated, Joined, Load, Refused
from tests.unit.decode.bench import DecodeBench
from tests.unit.scheduling.worker_bench import EOS, ORDINARY, decode, prompt


def running(**settings: object) -> DecodeBench:
    """A bench whose request `a` has joined, and has a step in flight if the loop overlaps."""
    bench = DecodeBench(**{"routers": 2, **settings})  # type: ignore[arg-type]
    bench.send(decode("a", prompt(8), max_new_tokens=8))
    bench.turn()
    bench.fetcher.land_all()
    bench.turn(2)
    return bench


# ---- steps -----------------------------------------------------------------------------------------------------


def test_the_next_step_is_launched_before_the_last_is_settled() -> None:
    bench = DecodeBench()
    bench.send(decode("a", prompt(8), max_new_tokens=3))
    bench.run()
    assert bench.device.trace == [
        *("launch 1", "launch 2", "settle 1"),
        "settle 2",
    ]


def test_normal_mode_settles_each_step_before_the_next() -> None:
    bench = DecodeBench(overlap=False)
    bench.send(decode("a", prompt(8), max_new_tokens=3))
    bench.run()
    assert bench.device.trace == [f"{act} {step}" for step in (1, 2) for act in ("launch", "settle")]


def test_a_landed_request_joins_in_the_step_of_the_others() -> None:
    bench = running()
    bench.send(decode("b", prompt(8, family=2)))
    bench.turn()
    bench.fetcher.land_all()
    before = len(bench.device.batches)
    bench.turn()
    (step,) = bench.device.batches[before:]
    assert step.mode is ForwardMode.DECODE
    assert [join.slot for join in step.joins] == [1]
    assert list(step.decode_slots) == [0, 1]


def test_a_request_joins_alone_while_no_page_is_free_to_decode() -> None:
    """The pages of a request that is cancelled retire until the step in flight has completed."""
    bench = DecodeBench(pages=5)
    bench.send(decode("a", prompt(8), max_new_tokens=5), decode("b", prompt(8, family=2), max_new_tokens=3))
    bench.turn()
    bench.fetcher.land(1)
    bench.turn()
    bench.fetcher.land(2)
    bench.send(Cancel("a", 1))
    bench.turn()
    step = bench.device.batches[-1]
    assert (step.mode, len(step.joins), list(step.decode_slots)) == (ForwardMode.PREBUILT, 1, [])
    bench.run()
    assert len(bench.tokens("b")) == 2


def test_a_join_tells_the_device_where_the_request_stands() -> None:
    bench = running()
    (join,) = bench.device.batches[0].joins
    assert (join.kv_len, join.prompt_len, join.last_token, len(join.pages)) == (8, 8, ORDINARY, 2)


def test_a_page_is_granted_just_before_the_step_that_needs_it() -> None:
    bench = DecodeBench()
    bench.send(decode("a", prompt(7), max_new_tokens=7))
    bench.run()
    granted = [len(batch.grants) for batch in bench.device.steps(ForwardMode.DECODE)]
    assert granted == [0, 1, 0, 0, 0, 1]


def test_no_row_misses_a_step_for_a_page_that_the_cache_can_give() -> None:
    """Three rows need a page in the step after that in which the page of an ended request retires."""
    bench = DecodeBench(pages=20)
    bench.send(decode("cached", prompt(44), max_new_tokens=2))
    bench.run()
    rids = dict(zip("abc", (2, 3, 4), strict=True))
    bench.send(decode("ends", prompt(8, family=5), max_new_tokens=2))
    bench.send(*(decode(rid, prompt(6, family=n), max_new_tokens=6) for rid, n in rids.items()))
    met_short = False
    while len(bench.said(Finished)) < 5:
        bench.turn()
        bench.fetcher.land_all()
        pool = bench.core.memory.pool
        met_short |= pool.free == 0 and pool.count(PageState.RETIRING) > 0
    assert met_short
    assert bench.core.counters.rows_without_page == 0


def test_rows_are_in_the_order_in_which_requests_joined() -> None:
    bench = DecodeBench()
    bench.send(*(decode(rid, prompt(8, family=n)) for n, rid in enumerate("zyxwv", 1)))
    bench.run_until(lambda: bool(bench.said(Generated)))
    assert [row.rid for row in bench.said(Generated)[0].rows] == list("zyxwv")
    assert list(bench.device.batches[0].decode_slots) == [0, 1, 2, 3, 4]


# ---- ends ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False])
def test_a_request_ends_by_length_without_an_extra_step(overlap: bool) -> None:
    bench = DecodeBench(overlap=overlap)
    bench.send(decode("a", prompt(8), max_new_tokens=5))
    bench.run()
    assert bench.tokens("a") == [ORDINARY] * 4
    assert [(said.output_len, said.reason) for said in bench.said(Finished)] == [(5, "length")]
    assert len(bench.device.steps(ForwardMode.DECODE)) == 4
    assert bench.core.counters.extra_tokens == 0
    assert bench.holds_nothing


@pytest.mark.parametrize(("overlap", "extra"), [(True, 1), (False, 0)])
def test_the_extra_token_of_a_request_that_has_ended_is_discarded(overlap: bool, extra: int) -> None:
    bench = DecodeBench(overlap=overlap)
    bench.device.answers[1] = [ORDINARY, 5, EOS, 7, 7]
    bench.send(decode("a", prompt(8)))
    bench.run()
    assert bench.tokens("a") == [5, EOS]
    assert [(said.output_len, said.reason) for said in bench.said(Finished)] == [(3, "stop")]
    assert bench.core.counters.extra_tokens == extra
    assert bench.holds_nothing


@pytest.mark.parametrize("overlap", [True, False])
def test_a_request_that_cannot_go_on_ends_by_its_own_fault_behind_its_tokens(overlap: bool) -> None:
    bench = DecodeBench(overlap=overlap, flush_seconds=60.0)
    bench.device.failures[1] = 3
    bench.send(decode("a", prompt(8)), decode("b", prompt(8, family=2), seed=2, max_new_tokens=6))
    bench.run()
    assert bench.said(Failed) == [Failed("a", 1, 400, "grammar_too_complex", "scripted")]
    assert bench.tokens("a") == [ORDINARY] * 2
    assert bench.tokens("b") == [ORDINARY] * 5
    assert [said.rid for said in bench.said(Finished)] == ["b"]
    assert bench.holds_nothing


@pytest.mark.parametrize("overlap", [True, False])
def test_a_row_that_sits_out_gets_the_same_token_in_a_later_step(overlap: bool) -> None:
    bench = DecodeBench(overlap=overlap)
    wait = iter([True, True, False, True, False, False, True, True, True] + [False] * 99)
    bench.device.sits_out = lambda seed, _index: seed == 1 and next(wait)
    bench.device.answers[1] = [ORDINARY, 5, 6, 7, 8, EOS]
    bench.device.answers[2] = [ORDINARY, *range(11, 20)]
    bench.send(decode("a", prompt(8)), decode("b", prompt(8, family=2), seed=2, max_new_tokens=10))
    bench.run()
    assert bench.tokens("a") == [5, 6, 7, 8, EOS]
    assert bench.tokens("b") == list(range(11, 20))
    ends = {said.rid: (said.output_len, said.reason) for said in bench.said(Finished)}
    assert ends == {"a": (6, "stop"), "b": (10, "length")}
    counters = bench.core.counters
    assert counters.rows_without_mask == 6
    assert counters.generated_tokens == 5 + 9
    assert bench.holds_nothing


@pytest.mark.parametrize("overlap", [True, False])
def test_a_row_that_sits_its_last_step_out_still_ends_by_length(overlap: bool) -> None:
    bench = DecodeBench(overlap=overlap)
    wait = iter([False, True, True, False, True])
    bench.device.sits_out = lambda _seed, _index: next(wait, False)
    bench.send(decode("a", prompt(8), max_new_tokens=4))
    bench.run()
    assert [(said.output_len, said.reason) for said in bench.said(Finished)] == [(4, "length")]
    assert bench.core.counters.rows_without_mask == 3
    assert bench.holds_nothing


def test_a_row_that_had_ended_may_sit_out() -> None:
    """Whatever becomes of a row past its end, nothing of it is heard."""
    bench = DecodeBench()
    bench.device.answers[1] = [ORDINARY, EOS]
    bench.device.sits_out = lambda _seed, index: index == 2
    bench.send(decode("a", prompt(8)))
    bench.run()
    assert bench.tokens("a") == [EOS]
    assert bench.holds_nothing


def test_an_older_router_is_given_back_what_cannot_go_on() -> None:
    bench = DecodeBench(understands=())
    bench.device.failures[1] = 3
    bench.send(decode("a", prompt(8)))
    bench.run()
    assert [(said.rid, said.reason) for said in bench.said(Refused)] == [("a", "internal")]
    assert bench.holds_nothing


def test_a_request_that_has_ended_cannot_fail() -> None:
    """Its extra row is discarded, whatever became of it."""
    bench = DecodeBench()
    bench.device.answers[1] = [ORDINARY, EOS]
    bench.device.failures[1] = 2
    bench.send(decode("a", prompt(8)))
    bench.run()
    assert bench.said(Failed) == []
    assert [said.reason for said in bench.said(Finished)] == ["stop"]
    assert bench.holds_nothing


def test_the_very_first_token_here_may_be_the_end_of_sequence() -> None:
    bench = DecodeBench()
    bench.device.answers[1] = [ORDINARY, EOS]
    bench.send(decode("a", prompt(8)))
    bench.run()
    assert bench.tokens("a") == [EOS]
    assert [said.output_len for said in bench.said(Finished)] == [2]
    assert bench.holds_nothing


def test_what_an_ended_request_held_is_retired_until_its_extra_step_is_over() -> None:
    bench = DecodeBench()
    bench.device.answers[1] = [ORDINARY, EOS]
    bench.send(decode("a", prompt(7)))
    bench.run_until(lambda: bool(bench.said(Finished)))
    pool = bench.core.memory.pool
    assert pool.count(PageState.TREE) == 2
    assert pool.count(PageState.RETIRING) == 1  # the page that the extra token is written to
    bench.turn()
    assert pool.free == pool.total - 2


def test_the_slot_of_an_ended_request_may_be_taken_by_the_next_at_once() -> None:
    bench = DecodeBench(max_running_requests=1)
    bench.device.answers[1] = [ORDINARY, EOS]
    bench.send(decode("a", prompt(8)))
    bench.run_until(lambda: bool(bench.said(Finished)))
    assert bench.core.slots_used == 0
    bench.send(decode("b", prompt(8), seed=2))
    bench.run()
    assert len(bench.tokens("b")) == 7
    assert bench.tokens("a") == [EOS]


def test_an_ended_request_leaves_its_settled_pages_to_the_cache() -> None:
    bench = DecodeBench()
    bench.send(decode("a", prompt(8), max_new_tokens=9))
    bench.run()
    assert bench.core.memory.pool.count(PageState.TREE) == 4


# ---- the end of a request, in every state ----------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False])
def test_a_cancel_between_launch_and_settle_discards_the_token(overlap: bool) -> None:
    bench = running(overlap=overlap)
    heard = bench.tokens("a")
    bench.send(Cancel("a", 1))
    bench.run()
    assert bench.tokens("a") == heard
    assert bench.core.counters.extra_tokens == (1 if overlap else 0)
    assert bench.said(Finished) == []
    assert bench.holds_nothing


def test_a_cancel_that_comes_after_the_end_changes_nothing() -> None:
    """A stop string is found by the router one step late: the worker may have ended by itself meanwhile."""
    bench = DecodeBench()
    bench.send(decode("a", prompt(8)))
    bench.run()
    bench.send(Cancel("a", 1))
    bench.run()
    assert (len(bench.said(Finished)), bench.core.counters.cancelled) == (1, 0)
    assert bench.holds_nothing


def test_a_landed_request_can_be_cancelled_before_it_joins() -> None:
    bench = running()
    bench.send(decode("b", prompt(8)))  # a full hit: it has landed at once
    bench.send(Cancel("b", 1))
    bench.run()
    assert bench.tokens("b") == []
    assert bench.holds_nothing


@pytest.mark.parametrize("overlap", [True, False])
def test_a_newer_attempt_replaces_a_running_one(overlap: bool) -> None:
    bench = running(overlap=overlap)
    settled = bench.core._reqs["a"].output_len - 1
    bench.send(decode("a", prompt(8), attempt=2), decode("a", prompt(8), attempt=1), Cancel("a", 1))
    bench.run()
    bench.now += 1.0
    bench.turn()
    assert len(bench.tokens("a")) == settled
    assert len(bench.tokens("a", attempt=2)) == 7
    assert [said.attempt for said in bench.said(Finished)] == [2]
    assert bench.holds_nothing


def test_a_lost_router_takes_its_requests_and_their_tokens_along() -> None:
    bench = running(flush_seconds=1000.0)
    bench.turn()
    assert bench.core._reqs["a"].output_len == 3  # of which one token has been sent
    bench.send(decode("b", prompt(8, family=2)), router=1)
    bench.links.drop(bench.routers[0])
    bench.routers[0].link(bench.links)
    bench.run()
    assert [said.rid for said in bench.said(Finished)] == ["b"]
    assert bench.tokens("a") == [ORDINARY]
    assert bench.said(Refused) == []
    assert bench.holds_nothing


# ---- messages --------------------------------------------------------------------------------------------------


def test_the_first_token_goes_at_once_and_later_ones_share_a_message() -> None:
    bench = DecodeBench(flush_seconds=0.01)
    bench.send(decode("a", prompt(8)), decode("b", prompt(8, family=2)))
    bench.run()
    sent = [[row.token_ids for row in message.rows] for message in bench.said(Generated)]
    assert sent == [[(ORDINARY,)] * 2, [(ORDINARY,) * 6] * 2]


def test_tokens_do_not_wait_longer_than_flush_seconds() -> None:
    bench = running(flush_seconds=0.01)
    assert len(bench.tokens("a")) == 1
    bench.now += 0.01
    bench.turn()
    assert len(bench.tokens("a")) > 1


def test_a_request_that_ends_takes_only_its_own_tokens_along() -> None:
    bench = DecodeBench(flush_seconds=1000.0)
    bench.send(decode("a", prompt(8), max_new_tokens=4), decode("b", prompt(8, family=2), max_new_tokens=90))
    bench.run_until(lambda: bool(bench.said(Finished)))
    sent = [[(row.rid, len(row.token_ids)) for row in message.rows] for message in bench.said(Generated)]
    assert sent == [[("a", 1), ("b", 1)], [("a", 2)]]


def test_every_router_hears_of_its_own_requests_alone() -> None:
    bench = running()
    bench.send(decode("b", prompt(8, family=2)), router=1)
    bench.run()
    for message in bench.said(Generated):
        assert len(dict.fromkeys(row.rid for row in message.rows)) == 1


def test_a_request_says_joined_before_its_first_token_and_finished_after_its_last() -> None:
    bench = DecodeBench()
    bench.send(decode("a", prompt(8)))
    bench.run()
    kinds = [type(message) for message in bench.heard if not isinstance(message, Load)]
    assert kinds == [Joined, Generated, Generated, Finished]


def test_the_load_of_a_worker_that_became_idle_is_sent_in_time() -> None:
    bench = running()
    bench.run()
    assert bench.said(Load)[-1].running == 0 or 0 < bench.loop.patience_seconds() <= 0.1
    bench.now += 0.1
    bench.run()
    assert (bench.said(Load)[-1].running, bench.said(Load)[-1].slots_free) == (0, 8)
