"""Prompts that a router serves at a decode worker: computed beside the streams, then one of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec
import pytest

from decode.lifecycle import DecodeState
from decode.local_prompts import SPARSE_SECONDS, SPARSE_STEPS
from shared.batch.schedule_batch import ForwardMode, ScheduleBatch
from shared.wire.messages import (
    Cancel,
    Finished,
    Generated,
    Load,
    Migrate,
    Migrating,
    Prefilled,
    Refused,
    Release,
    Serve,
)
from tests.unit.decode.bench import DecodeBench
from tests.unit.decode.test_retraction import in_state
from tests.unit.scheduling.worker_bench import EOS, ORDINARY, PAGE_SIZE, decode, params, prompt


def one_millisecond_a_token(batch: ScheduleBatch) -> float:
    """What a device takes on which rows that decode take 10 ms."""
    return (0.01 if batch.decode_slots else 0.0) + 0.001 * sum(len(row.token_ids) for row in batch.extend)


def serve(
    rid: str,
    token_ids: Sequence[int],
    max_new_tokens: int = 8,
    attempt: int = 1,
    prompt_len: int = 0,
    seed: int = 1,
) -> Serve:
    """A prompt, or with a `prompt_len` a stream that goes on."""
    length = prompt_len or len(token_ids)
    return Serve(rid, attempt, tuple(token_ids), length, params(max_new_tokens, seed))


def bench_with(**settings: object) -> DecodeBench:
    return DecodeBench(**{"local_tokens_max": 8, **settings})  # type: ignore[arg-type]


@pytest.mark.parametrize("overlap", [True, False])
def test_a_prompt_is_computed_in_chunks_tells_its_first_token_and_goes_on(overlap: bool) -> None:
    bench = bench_with(overlap=overlap)
    bench.device.answers[1] = (50, 51, 52, 53)
    bench.send(serve("r", prompt(30), 4))
    bench.run()
    [first] = bench.said(Prefilled)
    assert (first.index, first.token_ids, first.baton, first.finish) == (0, (50,), None, None)
    assert bench.tokens("r") == [51, 52, 53]
    assert [(end.output_len, end.reason) for end in bench.said(Finished)] == [(4, "length")]
    rows = [row for batch in bench.device.batches for row in batch.extend]
    assert sum(len(row.token_ids) for row in rows) == 30
    assert max(len(row.token_ids) for row in rows) <= 8
    assert [row.samples for row in rows] == [False] * (len(rows) - 1) + [True]
    assert bench.core.counters.local_prompts == 1
    assert bench.holds_nothing


def test_streams_go_on_beside_it() -> None:
    bench = bench_with()
    bench.send(decode("s", prompt(8, 2), 30))
    bench.run_until(lambda: in_state(bench, DecodeState.RUNNING) is not None)
    bench.send(serve("r", prompt(40), 4))
    bench.run()
    assert len(bench.device.steps(ForwardMode.MIXED)) >= 5
    assert bench.device.steps(ForwardMode.EXTEND) == []
    assert bench.tokens("s") == [ORDINARY] * 29
    assert bench.tokens("r") == [ORDINARY] * 3


def test_short_prompts_go_past_a_long_one_in_a_quarter_of_its_steps() -> None:
    bench = bench_with(pages=200)
    shorts = [f"s{number}" for number in range(6)]
    bench.send(serve("long", prompt(160)), *[serve(rid, prompt(4, n)) for n, rid in enumerate(shorts, 2)])
    bench.run_until(lambda: len(bench.said(Prefilled)) == 4)
    computed = sum(len(row.token_ids) for batch in bench.device.batches for row in batch.extend)
    assert [said.rid for said in bench.said(Prefilled)] == shorts[:4]
    assert 4 * 4 * 4 - 8 <= computed <= 4 * 4 * 4 + 24, "they take their share, but for the steps in flight"
    bench.run()
    told = [said.rid for said in bench.said(Prefilled)]
    assert sorted(told) == sorted(["long", *shorts])
    assert [rid for rid in told if rid != "long"] == shorts
    assert bench.holds_nothing


def test_a_prompt_that_is_no_shorter_than_a_step_goes_past_none() -> None:
    bench = bench_with(pages=200)
    bench.send(serve("first", prompt(100)), serve("second", prompt(9, 2)))
    bench.run()
    assert [said.rid for said in bench.said(Prefilled)] == ["first", "second"]


def test_what_is_cached_is_not_computed_again() -> None:
    bench = bench_with(local_tokens_max=100)
    bench.send(serve("a", prompt(30), 2))
    bench.run()
    bench.send(serve("b", prompt(30), 2))
    bench.run()
    [_, second] = bench.said(Prefilled)
    assert second.cached_tokens == 28
    assert bench.core.counters.extend_tokens == 32


@pytest.mark.parametrize("overlap", [True, False])
def test_what_another_one_computes_is_computed_once(overlap: bool) -> None:
    bench = bench_with(overlap=overlap)
    bench.send(*[serve(rid, (*prompt(28), *prompt(5, 2 + number))) for number, rid in enumerate("abc")])
    bench.send(serve("d", prompt(9, 9)))
    bench.run()
    assert {said.rid: said.cached_tokens for said in bench.said(Prefilled)} == {
        "a": 0,
        "b": 28,
        "c": 28,
        "d": 0,
    }
    assert bench.core.counters.extend_tokens == 33 + 5 + 5 + 9
    assert bench.core.counters.cached_tokens == 2 * 28
    assert bench.core.counters.waited_for_prompt == 2
    assert bench.holds_nothing


def test_prompts_that_wait_for_one_that_is_cancelled_are_computed_and_the_next_one_is_awaited() -> None:
    bench = bench_with()
    bench.send(*[serve(rid, (*prompt(28), *prompt(5, 2 + number))) for number, rid in enumerate("abc")])
    bench.run_until(lambda: bench.core.counters.extend_tokens > 8)
    bench.send(Cancel("a", 1))
    bench.run()
    told = {said.rid: said.cached_tokens for said in bench.said(Prefilled)}
    assert told == {"b": 8, "c": 28}, "what was computed of the first is kept"
    assert bench.holds_nothing


def test_routers_hear_of_the_tokens_that_will_be_computed() -> None:
    bench = bench_with(local_tokens_max=4)
    bench.send(serve("a", prompt(28)), serve("b", (*prompt(28), *prompt(5, 2))))
    bench.turn()
    bench.now += 10
    bench.turn()
    computed = bench.core.counters.extend_tokens
    assert bench.said(Load)[-1].queued_tokens in (33 - computed, 33 - computed + 4)


def test_a_prompt_whose_logprobs_are_asked_for_waits_for_nobody() -> None:
    bench = bench_with()
    asked = msgspec.structs.replace(params(2), prompt_logprobs=0)
    bench.send(serve("a", prompt(28)), msgspec.structs.replace(serve("b", (*prompt(28), 7)), params=asked))
    bench.run()
    assert [said.cached_tokens for said in bench.said(Prefilled)] == [0, 0]
    assert bench.core.counters.waited_for_prompt == 0


@pytest.mark.parametrize(("answer", "finish"), [((EOS,), "stop"), ((7,), "length")])
def test_it_may_end_with_its_first_token(answer: tuple[int, ...], finish: str) -> None:
    bench = bench_with()
    bench.device.answers[1] = answer
    bench.send(serve("r", prompt(10), 1 if finish == "length" else 8))
    bench.run()
    [first] = bench.said(Prefilled)
    assert (first.token_ids, first.finish) == (answer, finish)
    assert bench.said(Finished) == []
    assert bench.said(Generated) == []
    assert bench.holds_nothing


def test_a_continuation_samples_the_token_behind_its_output() -> None:
    bench = bench_with()
    bench.device.answers[1] = (50, 51, 52, 53)
    bench.send(serve("r", (*prompt(9), 50, 51), 4, attempt=2, prompt_len=9))
    bench.run()
    [first] = bench.said(Prefilled)
    assert (first.index, first.token_ids, first.attempt) == (2, (52,), 2)
    assert [row.index for message in bench.said(Generated) for row in message.rows] == [3]


def test_each_token_of_a_prompt_is_scored_once_if_that_is_asked_for() -> None:
    bench = bench_with()
    asked = msgspec.structs.replace(params(2), prompt_logprobs=0)
    bench.send(msgspec.structs.replace(serve("r", prompt(10), 2), params=asked))
    bench.run()
    rows = [row for batch in bench.device.batches for row in batch.extend]
    assert [token for row in rows for token in row.scores] == [*prompt(10)[1:]]


def test_a_failed_first_token_ends_it() -> None:
    bench = bench_with()
    bench.device.failures[1] = 0
    bench.send(serve("r", prompt(10)))
    bench.run()
    assert bench.said(Prefilled) == []
    assert bench.holds_nothing


@pytest.mark.parametrize("chunks", [0, 1, 2])
def test_a_cancelled_prompt_gives_up_all_that_it_holds(chunks: int) -> None:
    bench = bench_with()
    bench.send(serve("r", prompt(30)))
    bench.turn(chunks + 1)
    bench.send(Cancel("r", 1))
    bench.run()
    assert bench.said(Prefilled) == []
    assert bench.holds_nothing


@pytest.mark.parametrize(
    ("settings", "command", "reason"),
    [
        ({"local_tokens_max": 0}, serve("r", prompt(8)), "internal"),
        ({}, serve("r", prompt(250), 10), "too_long"),
        ({}, serve("r", (1, -1, 2)), "internal"),
        ({}, serve("r", prompt(8), prompt_len=9), "internal"),
        ({}, serve("r", prompt(8), 2, prompt_len=6), "internal"),
        ({"pages": 4}, serve("r", prompt(12), 8), "too_long"),
    ],
)
def test_what_it_cannot_serve_is_refused(settings: dict[str, int], command: Serve, reason: str) -> None:
    bench = bench_with(**settings)
    bench.send(command)
    bench.run()
    assert [each.reason for each in bench.said(Refused)] == [reason]
    assert bench.holds_nothing


def test_without_room_it_is_refused_and_while_draining_too() -> None:
    bench = bench_with(pages=10)
    bench.send(decode("s", prompt(24, 2), 10))
    bench.run_until(lambda: in_state(bench, DecodeState.RUNNING) is not None)
    bench.send(serve("r", prompt(20)))
    bench.turn()
    assert [each.reason for each in bench.said(Refused)] == ["no_room"]
    bench.core.start_draining()
    bench.send(serve("q", prompt(4)))
    bench.turn()
    assert [(each.rid, each.reason) for each in bench.said(Refused)][1:] == [("q", "no_room")]


def test_a_stream_that_lacks_a_page_gets_it_from_the_youngest_prompt() -> None:
    bench = bench_with(pages=27, local_tokens_max=4)
    bench.send(decode("s", prompt(12, 2), 30), decode("t", prompt(12, 3), 30))
    bench.run_until(lambda: in_state(bench, DecodeState.RUNNING) is not None)
    bench.send(serve("r", prompt(60)))
    bench.run()
    assert [(each.rid, each.reason) for each in bench.said(Refused)] == [("r", "no_room")]
    assert bench.core.counters.put_back == 1
    assert bench.core.counters.retractions == bench.core.counters.rows_without_page == 0
    assert [len(bench.tokens(rid)) for rid in "st"] == [29, 29]
    assert bench.holds_nothing


def test_a_tenant_below_its_share_is_not_put_back_for_streams_of_one_that_holds_more() -> None:
    bench = bench_with(pages=27, local_tokens_max=4, tenant_share_max=0.8)
    of_b = msgspec.structs.replace(serve("b", prompt(20, 9), 2), tenant="b")
    for number, rid in enumerate("stu", 2):
        bench.send(msgspec.structs.replace(decode(rid, prompt(12, number), 40), tenant="a"))
    bench.run_until(lambda: bench.core.memory.available_pages < 10)
    bench.send(of_b)
    bench.run_until(lambda: bool(bench.said(Prefilled)) or bool(bench.said(Refused)))
    assert [each.rid for each in bench.said(Prefilled)] == ["b"]
    assert bench.core.counters.put_back == 0


def test_it_migrates_by_its_pages_once_it_has_its_first_token() -> None:
    bench = bench_with()
    bench.send(serve("r", prompt(20), 20))
    bench.run_until(lambda: bool(bench.said(Prefilled)))
    bench.send(Migrate("r", 1))
    bench.run_until(lambda: bool(bench.said(Migrating)))
    [migrating] = bench.said(Migrating)
    assert len(bench.said(Prefilled)) == 1
    assert migrating.baton.kv_len == 20 + migrating.output_len - 1


@pytest.mark.parametrize("overlap", [True, False])
def test_it_leaves_with_its_first_token_if_it_is_asked_for_before(overlap: bool) -> None:
    bench = bench_with(overlap=overlap)
    bench.device.answers[1] = (50,)
    bench.send(decode("s", prompt(8, 2), 30))
    bench.send(serve("r", prompt(20), 20))
    bench.turn(2)
    bench.send(Migrate("r", 1))
    bench.run_until(lambda: bool(bench.said(Prefilled)))
    [first] = bench.said(Prefilled)
    assert first.baton is not None
    assert (first.token_ids, first.finish, first.baton.kv_len) == ((50,), None, 20)
    assert bench.said(Migrating) == []
    assert bench.core.leases_held == 1
    bench.run_until(lambda: bench.core.slots_used == 0)
    assert bench.tokens("r") == [], "it decodes nothing here"
    bench.send(Release("r", 1))
    bench.run()
    assert bench.holds_nothing


def test_one_that_ends_with_its_first_token_leaves_nothing_behind() -> None:
    bench = bench_with()
    bench.send(serve("r", prompt(20), 1))
    bench.turn(1)
    bench.send(Migrate("r", 1))
    bench.run()
    assert [(each.baton, each.finish) for each in bench.said(Prefilled)] == [(None, "length")]
    assert bench.holds_nothing


def test_one_without_a_lease_word_goes_on_here_until_there_is_one() -> None:
    bench = bench_with(words=1)
    for number, rid in enumerate("ab"):
        bench.send(serve(rid, prompt(20, number), 20, seed=number))
        bench.turn(1)
        bench.send(Migrate(rid, 1))
    bench.run_until(lambda: len(bench.said(Prefilled)) == 2)
    a, b = bench.said(Prefilled)
    assert (a.baton is None, b.baton is None) == (False, True)
    bench.send(Release("a", 1))
    bench.run_until(lambda: bool(bench.said(Migrating)))
    assert bench.said(Migrating)[0].rid == "b"


def test_its_load_tells_what_waits_to_be_computed() -> None:
    bench = bench_with(load_seconds=0.001)
    bench.send(serve("r", prompt(30)))
    for _ in range(3):
        bench.now += 0.01
        bench.turn()
    told = [load.queued_tokens for load in bench.said(Load)]
    assert max(told) >= 30 - 2 * 8
    assert all(load.accepting for load in bench.said(Load))


def test_a_page_is_whole_in_every_chunk_but_the_last() -> None:
    bench = bench_with(local_tokens_max=10)
    bench.send(serve("r", prompt(31)))
    bench.run()
    rows = [row for batch in bench.device.batches for row in batch.extend]
    assert all((row.start + len(row.token_ids)) % PAGE_SIZE == 0 for row in rows[:-1])


def test_a_worker_tells_how_fast_it_computes_prompts() -> None:
    bench = DecodeBench(pages=64, local_tokens_max=64, itl_target_seconds=0.06, load_seconds=0.001)
    bench.device.seconds = one_millisecond_a_token
    bench.turn()
    assert bench.said(Load)[-1].extend_rate == 0, "no step has told"
    for number in range(6):
        bench.send(serve(f"r{number}", prompt(20 + number, number), max_new_tokens=6, seed=number))
        bench.run()
    bench.now += 1
    bench.turn()
    alone = bench.said(Load)[-1]
    assert alone.extend_rate == pytest.approx(1000, rel=0.2)
    assert alone.step_seconds == 0
    bench.send(serve("stream", prompt(9), max_new_tokens=40))
    bench.turn(8)
    bench.now += 1
    bench.turn()
    beside = bench.said(Load)[-1]
    assert beside.step_seconds == pytest.approx(0.01, rel=0.1)
    assert beside.extend_rate < alone.extend_rate


def test_where_no_pass_fits_beside_streams_one_step_in_many_has_one_and_is_bounded() -> None:
    bench = DecodeBench(pages=200, local_tokens_max=64, itl_target_seconds=0.011)
    bench.device.seconds = one_millisecond_a_token  # a step is 10 ms, and a page of a prompt 4 more
    bench.send(serve("stream", prompt(9), max_new_tokens=240))
    bench.turn(10)
    bench.send(serve("other", prompt(100, 2), max_new_tokens=2, seed=2))
    before = len(bench.device.batches)
    bench.turn(220)
    steps = bench.device.batches[before:]
    beside = [at for at, batch in enumerate(steps) if batch.extend and batch.decode_slots]
    assert len(beside) >= 3
    assert min(after - at for at, after in pairwise(beside)) >= SPARSE_STEPS
    longest = max(one_millisecond_a_token(steps[at]) for at in beside)
    assert longest <= SPARSE_SECONDS * 0.011 + 0.004, "and a page more at most"


def test_where_streams_miss_the_target_by_themselves_each_step_computes_some_of_a_prompt() -> None:
    bench = DecodeBench(pages=200, local_tokens_max=64, itl_target_seconds=0.009)
    bench.device.seconds = one_millisecond_a_token  # a step is 10 ms
    bench.send(serve("stream", prompt(9), max_new_tokens=240))
    bench.turn(10)
    bench.send(serve("other", prompt(100, 2), max_new_tokens=2, seed=2))
    before = len(bench.device.batches)
    bench.turn(40)
    steps = bench.device.batches[before:]
    beside = [at for at, batch in enumerate(steps) if batch.extend and batch.decode_slots]
    assert beside
    assert beside == list(range(beside[0], beside[-1] + 1))
    assert sum(len(row.token_ids) for batch in steps for row in batch.extend) == 100
    assert max(one_millisecond_a_token(steps[at]) for at in beside) <= 2 * 0.010 + 0.004


def like_a_gpu(batch: ScheduleBatch) -> float:
    """Any pass reads the weights for 8 ms, and 160 tokens of prompts take as long."""
    tokens = sum(len(row.token_ids) for row in batch.extend)
    return (0.008 if batch.decode_slots else 0.0) + (max(0.008, 0.00005 * tokens) if tokens else 0.0)


def test_long_passes_without_streams_do_not_end_the_short_ones_beside_streams() -> None:
    bench = DecodeBench(pages=400, local_tokens_max=1024, itl_target_seconds=0.018)
    bench.device.seconds = like_a_gpu
    bench.send(serve("first stream", prompt(9), max_new_tokens=12))
    bench.send(serve("beside it", prompt(200, 2), max_new_tokens=1, seed=2))
    bench.run()
    for group in range(12):
        for number in range(8 * group, 8 * group + 8):
            bench.send(serve(f"alone {number}", prompt(240, number), max_new_tokens=1, seed=3))
        bench.run()
    bench.send(serve("second stream", prompt(9, 4), max_new_tokens=60, seed=4))
    bench.turn(10)
    before = len(bench.device.batches)
    bench.send(serve("beside it", prompt(200, 99), max_new_tokens=1, seed=5))
    bench.turn(12)
    beside = [batch for batch in bench.device.batches[before:] if batch.extend and batch.decode_slots]
    assert sum(len(row.token_ids) for batch in beside for row in batch.extend) == 200
    assert max(like_a_gpu(batch) for batch in beside) <= 0.018 + 0.001
