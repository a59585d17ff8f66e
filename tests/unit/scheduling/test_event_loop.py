"""The loop: what happens in which order, and that it never sleeps on work.

The cores here are the real ones; what they plan is tested with them.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from decode.lifecycle import DecodeState
from shared.batch.schedule_batch import ForwardMode
from shared.kv.page_pool import PageState
from shared.primitives.errors import InvariantError
from shared.scheduling.event_loop import BUSY_POLL_SECONDS, CHECK_SECONDS_MIN, IDLE_WAIT_SECONDS_MAX
from shared.wire.messages import Cancel, Finished, Generated, Message, Prefilled, Release
from tests.unit.decode.bench import DecodeBench
from tests.unit.prefill.bench import PrefillBench
from tests.unit.scheduling.worker_bench import EOS, ORDINARY, WorkerBench, decode, prefill, prompt


def test_an_idle_loop_waits_no_longer_than_its_gauges_may_be_stale() -> None:
    bench = PrefillBench()
    bench.now += 1.0
    bench.turn(2)
    assert bench.loop.patience_seconds() == IDLE_WAIT_SECONDS_MAX


def test_the_loop_never_blocks_while_a_step_is_in_flight() -> None:
    bench = PrefillBench(chunked_prefill_size=4)
    bench.send(prefill("a", prompt(12)))
    while not bench.said(Prefilled):
        bench.turn()
        assert bench.loop.patience_seconds() == 0.0


@pytest.mark.parametrize("ended", [False, True])
def test_the_loop_looks_often_while_a_fetch_is_under_way_or_unproven(ended: bool) -> None:
    bench = DecodeBench()
    bench.send(decode("a", prompt(8)))
    bench.turn(2)
    assert 0 < bench.loop.patience_seconds() <= BUSY_POLL_SECONDS
    bench.fetcher.fail(1, ended=ended)
    bench.now += 1.0
    bench.turn(2)
    assert bench.loop.patience_seconds() == (IDLE_WAIT_SECONDS_MAX if ended else BUSY_POLL_SECONDS)


def test_the_loop_wakes_to_send_tokens_that_have_waited() -> None:
    bench = DecodeBench(flush_seconds=0.01)
    bench.send(decode("a", prompt(8), max_new_tokens=100))
    bench.run_until(lambda: len(bench.said(Generated)) > 0)
    bench.turn()
    assert bench.scheduler.next_deadline() == pytest.approx(bench.now + 0.01)


@pytest.mark.parametrize("exceptional", [False, True], ids=["settled behind the launch", "settled before it"])
def test_a_step_is_settled_behind_the_next_launch_but_for_the_first_token(exceptional: bool) -> None:
    bench = PrefillBench(chunked_prefill_size=8, short_share=0)
    bench.send(prefill("a", prompt(8 if exceptional else 16)), prefill("b", prompt(8, family=2)))
    bench.run()
    assert bench.device.trace[1] == ("settle 1" if exceptional else "launch 2")


@pytest.mark.parametrize("overlap", [True, False])
def test_no_baton_is_given_before_its_last_step_was_waited_for(overlap: bool) -> None:
    """Until `wait` has returned, writes to the pages may be under way on the device: a peer would read half of them."""
    bench = PrefillBench(chunked_prefill_size=8, overlap=overlap)
    steps_waited: list[int] = []

    def look() -> None:
        steps_waited.append(bench.device.completed() + 1)
        assert not any(bench.words.values)
        assert not bench.said(Prefilled)

    bench.device.on_wait = look
    bench.send(prefill("a", prompt(20)))
    bench.run_until(lambda: len(bench.said(Prefilled)) > 0)
    assert steps_waited == [1, 2, 3]
    assert bench.words.values.count(0) == len(bench.words.values) - 1


def test_a_request_that_comes_while_a_step_is_settled_joins_the_next_one() -> None:
    bench = PrefillBench(chunked_prefill_size=8)
    bench.send(prefill("a", prompt(8)), prefill("b", prompt(4, family=2)))
    bench.turn()
    bench.device.on_wait = lambda: bench.send(prefill("newcomer", prompt(4, family=3)))
    bench.turn()
    assert [len(rows) for rows in bench.extends] == [1, 2]


def test_begin_never_waits_for_the_step_it_launched() -> None:
    for overlap in (True, False):
        bench = PrefillBench(overlap=overlap, chunked_prefill_size=8)
        bench.send(prefill("a", prompt(24)))
        bench.loop.begin()
        assert bench.device.trace == ["launch 1"]
        assert bench.loop.awaits == (None if overlap else 1)


def idle_with_a_lost_page() -> DecodeBench:
    """A worker that fell idle and was checked; then a page is lost."""
    bench = DecodeBench()
    bench.send(decode("a", prompt(8)))
    bench.run()
    bench.now += CHECK_SECONDS_MIN
    bench.loop.turn()
    bench.core.memory.pool.allocate(1, state=PageState.OWNED)
    return bench


def test_an_idle_loop_checks_its_books_once_after_each_change() -> None:
    bench = idle_with_a_lost_page()
    bench.now += 2 * CHECK_SECONDS_MIN
    bench.loop.turn()  # nothing has changed since
    bench.send(Cancel("unknown", 1))
    with pytest.raises(InvariantError, match="are owned"):
        bench.loop.turn()


def test_a_loop_that_often_falls_idle_checks_its_books_every_few_seconds() -> None:
    bench = idle_with_a_lost_page()
    for _ in range(4):  # a check takes time in proportion to the pool, and the next request waits for it
        bench.now += CHECK_SECONDS_MIN / 5
        bench.send(Cancel("unknown", 1))
        bench.loop.turn()
    bench.now += CHECK_SECONDS_MIN / 5
    with pytest.raises(InvariantError, match="are owned"):
        bench.loop.turn()


# ---- no turn without a forward ---------------------------------------------------------------------------------


def can_decode(bench: DecodeBench) -> bool:
    """Whether a request that runs could have had a row in a step that was just planned, and had none."""
    pages = bench.core.memory.available_pages
    reqs = [req for req in bench.core.requests if req.state is DecodeState.RUNNING]
    return any(req.launched_len < (req.final_kv_len if pages else req.launched_max) for req in reqs)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("pages", [5, 8, 12, 64])
def test_no_join_takes_the_place_of_a_step_that_decodes(overlap: bool, pages: int) -> None:
    """With a join in every other turn: a turn computes nothing only while no request can decode."""
    bench = DecodeBench(overlap=overlap, pages=pages)
    joins = 0
    for turn in range(200):
        if turn % 2 == 0:
            bench.send(decode(f"r{turn}", prompt(8, family=turn + 1), max_new_tokens=2 + turn % 7))
        before = len(bench.device.batches)
        bench.loop.begin()
        launched = bench.device.batches[before:]
        joins += sum(len(batch.joins) for batch in launched)
        if not any(batch.mode is ForwardMode.DECODE for batch in launched):
            assert not can_decode(bench), f"turn {turn} launched {launched}"
        bench.loop.finish()
        bench.fetcher.land_all()
        bench.device.finish_copies()
    assert joins >= 10


# ---- no stall --------------------------------------------------------------------------------------------------


def run_without_sleeping(bench: WorkerBench, done: Callable[[], bool], copy_turns: int = 3) -> None:
    """Turn until `done`; whenever the loop would sleep longer than it polls, nothing may be left to do."""
    waited = 0
    for _ in range(2000):
        if done():
            return
        bench.turn()
        bench.fetcher.land_all()
        waited = waited + 1 if bench.device.copies else 0
        if waited > copy_turns:
            bench.device.finish_copies()
        assert done() or bench.loop.patience_seconds() <= BUSY_POLL_SECONDS
    raise AssertionError("not done in 2000 turns")


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("pages", [8, 9, 10, 12, 16])
@pytest.mark.parametrize("retract_steps", [1, 4, 20])
def test_a_crowd_never_puts_the_loop_to_sleep(pages: int, overlap: bool, retract_steps: int) -> None:
    """Rows without a page, pages that retire, copies under way: something always wakes the loop."""
    bench = DecodeBench(pages=pages, overlap=overlap, retract_steps=retract_steps, flush_seconds=1000.0)
    bench.send(*(decode(rid, prompt(7, n), 20, seed=n) for n, rid in enumerate("abcd", 1)))
    bench.turn()
    admitted = bench.core.slots_used
    assert admitted > 0
    run_without_sleeping(bench, lambda: len(bench.said(Finished)) == admitted)
    bench.run()
    assert bench.holds_nothing


@pytest.mark.parametrize("overlap", [True, False])
def test_pages_that_retire_under_a_waiting_request_wake_it(overlap: bool) -> None:
    bench = PrefillBench(pages=4, overlap=overlap)
    bench.device.answers[1] = [EOS]
    bench.send(*(prefill(rid, prompt(14, n)) for n, rid in enumerate("abc", 1)))
    run_without_sleeping(bench, lambda: len(bench.said(Prefilled)) == 3)


@pytest.mark.parametrize("message", [Release("a", 1), Cancel("a", 1)])
def test_the_end_of_a_lease_starts_a_waiting_request_in_the_same_turn(message: Message) -> None:
    bench = PrefillBench(words=1)
    bench.send(prefill("a", prompt(8)), prefill("b", prompt(8, 2)))
    bench.run()
    bench.send(message)
    bench.turn()
    assert len(bench.device.batches) == 2


def test_a_request_that_was_put_off_for_a_prefix_is_not_forgotten() -> None:
    bench = PrefillBench(max_running_requests=1, shared_prefix_tokens_min=4)
    bench.send(*(prefill(rid, (*prompt(16), n)) for n, rid in enumerate("abcd")))
    run_without_sleeping(bench, lambda: len(bench.said(Prefilled)) == 4)


def test_a_landed_request_runs_in_the_same_turn() -> None:
    bench = DecodeBench()
    bench.send(decode("a", prompt(8)))
    bench.turn(3)
    bench.fetcher.land(1)
    bench.turn()
    assert len(bench.device.batches) == 1
    bench.run()
    assert bench.tokens("a") == [ORDINARY] * 7
