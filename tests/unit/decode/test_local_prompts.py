"""Retracted requests without room in host memory: they keep their place in line and are computed again here."""

from __future__ import annotations

import pytest

from decode.counters import DecodeCounters
from decode.lifecycle import DecodeState
from decode.local_prompts import LocalPrompts
from shared.batch.req import Req
from shared.batch.schedule_batch import ForwardMode, ScheduleBatch
from shared.kv.kv_memory import KvMemory
from shared.kv.page_pool import PageState
from shared.kv.radix_cache import ancestry
from shared.scheduling.step_cost import StepCost
from shared.wire.messages import Cancel, Finished, Migrate, Paused, Refused
from shared.wire.sampling_params import SamplingParams
from tests.unit.decode.bench import DecodeBench
from tests.unit.decode.test_retraction import crowd, in_state
from tests.unit.scheduling.worker_bench import PAGE_SIZE, decode, prompt

STATES = [DecodeState.QUEUED, DecodeState.EXTENDING]


def without_host_memory(**settings: object) -> DecodeBench:
    """A bench on which two requests do not fit together."""
    bench = DecodeBench(**{"pages": 10, "host_pages": 0, "routers": 2, "local_tokens_max": 8, **settings})  # type: ignore[arg-type]
    bench.send(*crowd("ab"))
    return bench


def victim_in(state: DecodeState) -> tuple[DecodeBench, Req]:
    """A bench with a request in this state."""
    bench = without_host_memory()
    bench.run_until(lambda: in_state(bench, state) is not None)
    victim = in_state(bench, state)
    assert victim is not None
    return bench, victim


@pytest.mark.parametrize("overlap", [True, False])
def test_all_end_with_every_token_and_none_is_returned_to_its_router(overlap: bool) -> None:
    bench = without_host_memory(overlap=overlap)
    bench.run()
    counters = bench.core.counters
    assert sorted(said.rid for said in bench.said(Finished)) == ["a", "b"]
    assert all(len(bench.tokens(rid)) == 19 for rid in "ab")
    assert bench.said(Refused) == []
    assert counters.retractions == counters.recomputed == counters.resumes > 0
    assert counters.backups == counters.returned_to_router == 0
    assert bench.holds_nothing


def test_it_is_computed_beside_those_that_decode_and_takes_up_what_is_cached() -> None:
    bench = DecodeBench(pages=40, host_pages=0, local_tokens_max=8, turn_seconds=0.05)
    bench.send(*[decode(rid, prompt(24, n), 60) for n, rid in enumerate("abc", 1)])
    for _ in range(600):
        bench.now += 0.01
        bench.turn()
        bench.fetcher.land_all()
    assert len(bench.said(Finished)) == 3
    mixed = bench.device.steps(ForwardMode.MIXED)
    assert mixed
    assert len(mixed) == bench.core.counters.mixed_steps
    assert all(row.samples is False for batch in mixed for row in batch.extend)
    extended = sum(len(row.token_ids) for batch in bench.device.batches for row in batch.extend)
    assert extended == bench.core.counters.extend_tokens
    assert all(len(bench.tokens(rid)) == 59 for rid in "abc")


def test_what_is_cached_whole_joins_without_a_step() -> None:
    bench = without_host_memory(pages=11)
    bench.run_until(lambda: in_state(bench, DecodeState.QUEUED) is not None)
    victim = in_state(bench, DecodeState.QUEUED)
    assert victim is not None
    other = next(req for req in bench.core.requests if req is not victim)
    del victim.token_ids[victim.kv_len // PAGE_SIZE * PAGE_SIZE + 1 :]  # a page ends before its last token
    victim.kv_len = len(victim.token_ids) - 1
    bench.send(Cancel(other.rid, 1), router=0)
    bench.turn(2)
    assert victim.state is DecodeState.RUNNING
    assert bench.core.counters.recomputed == 0
    assert bench.core.counters.resumes == 1


@pytest.mark.parametrize("state", STATES)
def test_a_cancelled_request_leaves_nothing(state: DecodeState) -> None:
    bench, victim = victim_in(state)
    bench.send(Cancel(victim.rid, 1))
    bench.run()
    assert victim.state is DecodeState.CANCELLED
    assert len(bench.said(Finished)) == 1
    assert bench.holds_nothing


@pytest.mark.parametrize("state", STATES)
def test_a_lost_router_takes_everything_along(state: DecodeState) -> None:
    bench, _ = victim_in(state)
    bench.links.drop(bench.routers[0])
    bench.run()
    assert bench.core.requests == []
    assert bench.holds_nothing


def test_its_router_hears_that_it_is_paused() -> None:
    bench, victim = victim_in(DecodeState.QUEUED)
    bench.turn()
    assert [said.rid for said in bench.said(Paused)] == [victim.rid]


def test_looks_at_the_first_in_line_leave_the_cache_as_it_is() -> None:
    bench, victim = victim_in(DecodeState.QUEUED)
    memory, retraction = bench.core.memory, bench.core._retraction
    node, cached = memory.cache.probe(victim.token_ids)
    assert cached > 0

    def cache() -> list[object]:
        path = [
            (each.last_access, each.hit_count, each.last_step, each.lock_count) for each in ancestry(node)
        ]
        return [path, memory.cache.evictable, memory.cache._tick, *map(memory.pool.count, PageState)]

    before = cache()
    for seconds in (0.0, 1000.0):  # then its turn has come
        retraction.turns.now += seconds
        assert retraction.resume(bench.core._batch.reqs) is None
        retraction.take_turns([], bench.core._batch.reqs, has_slot=True)
        assert cache() == before


def test_while_the_pages_that_it_needs_are_in_quarantine_its_router_has_it_again() -> None:
    bench = DecodeBench(pages=13, host_pages=0, local_tokens_max=8)
    bench.send(decode("short", prompt(3, 1), 30), decode("long", prompt(23, 2), 20))
    bench.run_until(lambda: in_state(bench, DecodeState.QUEUED) is not None)
    victim = in_state(bench, DecodeState.QUEUED)
    assert victim is not None
    assert victim.rid == "long"
    pool = bench.core.memory.pool
    for _ in range(2):  # what retires is free in the next turn
        bench.core.memory.cache.evict(pool.total)
        pool.move(pool.allocate(pool.free, PageState.ARRIVING), PageState.ARRIVING, PageState.QUARANTINED)
        bench.turn()
    assert victim.state is DecodeState.QUEUED
    bench.send(Cancel("short", 1))
    bench.turn(3)
    assert [(said.rid, said.reason) for said in bench.said(Refused)] == [("long", "no_room")]
    assert bench.core.requests == []


def test_one_is_computed_after_the_other() -> None:
    bench = DecodeBench(pages=30, host_pages=0, local_tokens_max=4)
    bench.send(*[decode(rid, prompt(24, n), 30) for n, rid in enumerate("abcd", 1)])
    most = 0
    for _ in range(800):
        bench.now += 0.01
        bench.turn()
        bench.fetcher.land_all()
        most = max(most, sum(req.state is DecodeState.EXTENDING for req in bench.core.requests))
    assert most == 1
    assert len(bench.said(Finished)) == 4
    assert bench.holds_nothing


def test_one_that_has_returned_is_no_victim_before_it_has_a_token() -> None:
    bench = DecodeBench(pages=40)
    bench.send(*[decode(rid, prompt(8, n), 30) for n, rid in enumerate("ab", 1)])
    bench.turn()
    bench.fetcher.land_all()
    bench.turn(3)
    retraction, (first, second) = bench.core._retraction, bench.core.requests
    assert retraction.victim([first, second]) is first
    retraction._note_return(first)
    retraction.look([first, second])
    assert retraction.victim([first, second]) is second
    assert retraction.victim([first]) is first, "one of them leaves in any case"
    retraction._note_return(second)
    assert retraction.victim([first, second]) is second, "the first of them gets its token"
    bench.turn(2)
    retraction.look([first, second])
    assert retraction.victim([first, second]) is first


@pytest.mark.parametrize("state", STATES)
def test_one_that_is_to_migrate_is_computed_elsewhere(state: DecodeState) -> None:
    bench, victim = victim_in(state)
    bench.send(Migrate(victim.rid, 1))
    bench.turn()
    assert [(said.rid, said.reason) for said in bench.said(Refused)] == [(victim.rid, "stale")]
    bench.run()
    assert bench.holds_nothing


# ---- how much a step computes ----------------------------------------------------------------------------------

TOKEN_SECONDS, STEP_SECONDS = 0.001, 0.020


def local_prompts(*lengths: int, tokens_max: int, target: float) -> tuple[LocalPrompts, list[Req]]:
    """Requests of so many tokens that are being computed, on a device whose costs are known."""
    memory = KvMemory(1000, PAGE_SIZE)
    part = LocalPrompts(memory, DecodeCounters(), tokens_max, target)
    reqs = []
    for slot, length in enumerate(lengths):
        token_ids = list(prompt(length + 1, slot))
        req = Req(str(slot), 1, "router", slot, token_ids, length, SamplingParams(max_new_tokens=8, seed=1))
        memory.match(req, length)
        memory.allocate(req, memory.pages_for(length))
        req.slot, req.state = slot, DecodeState.EXTENDING
        part.start(req, samples=False)
        reqs.append(req)
    for tokens in (8, 16, 32, 64) * 5:
        part.cost.observe_extend(0, [(0, tokens)], 0.004 + TOKEN_SECONDS * tokens)
    part.cost.observe_decode(4, STEP_SECONDS)
    return part, reqs


@pytest.mark.parametrize(
    ("rows", "target", "most"), [(4, 0.1, 76), (4, 0.05, 26), (4, 0.001, 16), (0, 0.05, 196)]
)
def test_a_step_is_as_long_as_streams_may_wait(rows: int, target: float, most: int) -> None:
    part, _ = local_prompts(400, tokens_max=512, target=target)
    _, chunks = part.plan(1, rows)
    tokens = sum(len(row.token_ids) for row in chunks)
    assert most - 2 * PAGE_SIZE <= tokens <= max(most, PAGE_SIZE)


def test_no_step_has_more_tokens_than_it_may() -> None:
    part, _ = local_prompts(400, tokens_max=24, target=10.0)
    _, chunks = part.plan(1, 4)
    assert [len(row.token_ids) for row in chunks] == [24]


def test_what_one_leaves_of_a_step_the_next_takes() -> None:
    part, (first, second) = local_prompts(10, 400, tokens_max=512, target=0.1)
    joins, chunks = part.plan(1, 4)
    assert [join.slot for join in joins] == [first.slot, second.slot]
    assert [row.start for row in chunks] == [0, 0]
    assert len(chunks[0].token_ids) == 10
    assert 40 <= len(chunks[1].token_ids) <= 66
    batch = ScheduleBatch(1, ForwardMode.MIXED, joins, extend=chunks, decode_slots=[7, 8, 9, 10])
    assert [each.prompt.req for each in part.settle(batch, 0.09) if each.last] == [first]
    assert part.extending == [second]
    joins, (chunk,) = part.plan(2, 4)
    assert joins == ()
    assert chunk.start == len(chunks[1].token_ids)


def test_steps_of_one_page_do_not_stay_so_where_a_pass_costs_more_than_its_tokens() -> None:
    part, (req,) = local_prompts(400, tokens_max=512, target=0.1)
    part.cost = StepCost()
    part.cost.observe_decode(4, STEP_SECONDS)
    tokens, step = [], 0
    while part.extending:
        step += 1
        joins, chunks = part.plan(step, 4)
        tokens.append(sum(len(row.token_ids) for row in chunks))
        batch = ScheduleBatch(step, ForwardMode.MIXED, joins, extend=chunks, decode_slots=[7, 8, 9, 10])
        part.settle(batch, STEP_SECONDS + 0.012 + 0.00001 * tokens[-1])
    assert tokens[0] == PAGE_SIZE
    assert sum(tokens) == 400
    assert step < 10
    assert req.kv_len == 400


def test_where_nobody_decodes_a_pass_that_takes_longer_than_it_may_computes_more_than_a_page() -> None:
    part, (req,) = local_prompts(400, tokens_max=64, target=0.005)
    part.cost = StepCost()
    tokens, step = [], 0
    while part.extending:
        step += 1
        joins, chunks = part.plan(step, 0)
        tokens.append(sum(len(row.token_ids) for row in chunks))
        part.settle(ScheduleBatch(step, ForwardMode.EXTEND, joins, extend=chunks), 0.14 + 0.0002 * tokens[-1])
    assert tokens[0] == PAGE_SIZE
    assert sum(tokens) == 400
    assert step < 15
    assert req.kv_len == 400
