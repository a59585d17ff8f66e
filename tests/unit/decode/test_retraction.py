"""KV pressure: which requests are retracted, how they resume, and that one always keeps running."""

from __future__ import annotations

from dataclasses import replace

import pytest

from decode.lifecycle import DecodeState
from decode.retraction import Retraction
from shared.batch.req import Req
from shared.batch.schedule_batch import ForwardMode
from shared.kv.page_pool import PageState
from shared.wire.messages import Cancel, Decode, Failed, Finished, Load, Message, Paused, Refused
from tests.unit.decode.bench import DecodeBench
from tests.unit.scheduling.worker_bench import EOS, WorkerBench, decode, prompt


def crowd(rids: str, prompt_len: int = 7, max_new_tokens: int = 20) -> list[Decode]:
    """Requests of unlike prompts; by default each has two pages at first and grows to seven."""
    return [decode(rid, prompt(prompt_len, n), max_new_tokens) for n, rid in enumerate(rids, 1)]


def short_of_pages(rids: str = "ab", *, retractions: int = 1, **settings: object) -> DecodeBench:
    """A bench at the moment a request was retracted; copies that began are not done."""
    bench = DecodeBench(**{"pages": 10, "routers": 2, **settings})  # type: ignore[arg-type]
    bench.send(*crowd(rids))
    bench.run_until(lambda: bench.core.counters.retractions >= retractions)
    return bench


def finished(bench: WorkerBench) -> list[str]:
    return [said.rid for said in bench.said(Finished)]


@pytest.mark.parametrize("overlap", [True, False])
def test_a_crowd_that_overflows_the_pool_ends_with_every_token(overlap: bool) -> None:
    bench = DecodeBench(pages=10, overlap=overlap)
    bench.send(*crowd("abc"))
    bench.run()
    assert sorted(finished(bench)) == list("abc")
    for rid in "abc":
        assert len(bench.tokens(rid)) == 19
    assert bench.core.counters.resumes == bench.core.counters.backups == bench.core.counters.retractions > 0
    assert bench.holds_nothing


def test_fewest_output_tokens_are_retracted_first_and_the_longest_prompt_on_ties() -> None:
    bench = DecodeBench(pages=40)
    reqs = []
    for rid, prompt_len, output_len, retractions in [
        ("much output", 8, 9, 0),
        ("little output", 8, 2, 0),
        ("and a longer prompt", 12, 2, 0),
        ("too often", 12, 1, 3),
    ]:
        command = decode(rid, prompt(prompt_len), 30)
        bench.send(command)
        bench.turn()
        req = bench.core._reqs[rid]
        req.token_ids += [9] * (output_len - 1)
        req.retractions = retractions
        reqs.append(req)
    order = []
    while reqs:
        victim = bench.core._retraction.victim(reqs)
        reqs.remove(victim)
        order.append(victim.rid)
    assert order == ["and a longer prompt", "little output", "much output", "too often"]


def test_one_shortage_takes_out_no_more_than_it_must() -> None:
    """What a victim holds in the tree is on its way too: else all but one would be retracted."""
    bench = DecodeBench(pages=14, retract_steps=8)
    bench.send(*crowd("abc", prompt_len=16, max_new_tokens=9))
    bench.run_until(lambda: bench.core.counters.retractions > 0)
    bench.turn(2)
    assert bench.core.counters.retractions == 1
    bench.run()
    assert sorted(finished(bench)) == list("abc")


def test_a_request_that_ends_with_the_step_in_flight_is_no_victim() -> None:
    bench = DecodeBench(pages=6, retract_steps=1)
    bench.send(decode("short", prompt(7), max_new_tokens=6), decode("long", prompt(7, 2), max_new_tokens=14))
    bench.run()
    assert finished(bench) == ["short", "long"]
    assert bench.core.counters.retractions == 0
    assert bench.core.counters.rows_without_page == 1


def test_a_victim_is_copied_only_after_its_step_has_settled() -> None:
    bench = DecodeBench(pages=10, routers=1)
    bench.send(*crowd("ab"))
    while not bench.core.counters.retractions:
        bench.loop.begin()
        if not bench.core.counters.retractions:
            bench.loop.finish()
        bench.fetcher.land_all()
    assert bench.device.copies == []
    bench.loop.finish()
    assert len(bench.device.copies) == 1
    bench.run()
    assert sorted(finished(bench)) == ["a", "b"]


def test_pages_under_copy_are_not_reused() -> None:
    bench = short_of_pages()
    assert bench.device.copies
    copying = bench.core.memory.pool.count(PageState.COPYING)
    assert copying > 0
    bench.turn(3)
    assert bench.core.memory.pool.count(PageState.COPYING) == copying


def test_retracted_requests_resume_first_in_first_out() -> None:
    bench = DecodeBench(pages=12)
    bench.send(*crowd("abcd"))
    left: list[str] = []
    real: Retraction = bench.core._retraction
    resumed: list[str] = []
    for _ in range(500):
        before = [req.rid for req, _ in real._line]
        bench.turn()
        bench.fetcher.land_all()
        after = [req.rid for req, _ in real._line]
        left += [rid for rid in after if rid not in before]
        resumed += [rid for rid in before if rid not in after]
        bench.device.finish_copies()
    assert sorted(finished(bench)) == list("abcd")
    assert len(left) > 1
    assert resumed == left


def test_no_new_request_comes_in_while_a_retracted_one_waits() -> None:
    bench = short_of_pages()
    bench.send(decode("new", prompt(3, 9)))
    bench.turn()
    assert [(said.rid, said.reason) for said in bench.said(Refused)] == [("new", "no_room")]
    bench.now += 0.1
    bench.turn()
    assert not bench.said(Load)[-1].accepting


def test_the_router_of_a_retracted_request_hears_so_behind_its_tokens_and_every_five_seconds() -> None:
    bench = short_of_pages(flush_seconds=1000.0)
    bench.turn()
    (paused,) = bench.said(Paused)
    assert paused.cause == "retracted"
    tokens = len(bench.tokens(paused.rid))
    assert tokens > 1
    for seconds in (4.9, 0.2, 4.7, 0.3):
        bench.now += seconds
        bench.turn()
    assert len(bench.said(Paused)) == 3
    assert len(bench.tokens(paused.rid)) == tokens
    bench.run()
    assert len(bench.said(Paused)) == 3
    assert sorted(finished(bench)) == ["a", "b"]


def test_a_router_that_does_not_know_of_pauses_hears_of_none() -> None:
    bench = short_of_pages(understands=())
    bench.turn()
    bench.run()
    assert bench.said(Paused) == []


def test_a_resumed_request_joins_with_all_it_had() -> None:
    bench = short_of_pages()
    bench.run()
    *_, rejoined = (join for batch in bench.device.steps(ForwardMode.DECODE) for join in batch.joins)
    assert rejoined.kv_len > 7
    assert rejoined.last_token == 9
    assert len(rejoined.pages) == -(-rejoined.kv_len // 4)


def test_without_host_memory_a_request_is_returned_behind_its_last_tokens() -> None:
    bench = DecodeBench(pages=10, host_pages=0, flush_seconds=1000.0)
    bench.send(*crowd("ab"))
    bench.run_until(lambda: bench.core.counters.retractions > 0)
    bench.turn()
    (refused,) = bench.said(Refused)
    assert refused.reason == "stale"
    heard = [message for message in bench.heard if not isinstance(message, Load)]
    assert len(bench.tokens(refused.rid)) > 0
    assert heard[-1] is refused or isinstance(heard[-1], Finished)
    count = len(bench.tokens(refused.rid))
    bench.run()
    assert len(bench.tokens(refused.rid)) == count
    assert len(finished(bench)) == 1
    assert bench.holds_nothing


def test_what_was_returned_stays_in_the_cache_while_there_is_room() -> None:
    bench = DecodeBench(pages=10, host_pages=0, flush_seconds=1000.0)
    bench.send(*crowd("ab"))
    bench.turn()
    reqs = dict(bench.core._reqs)
    bench.run_until(lambda: bool(bench.said(Refused)))
    victim = reqs[bench.said(Refused)[0].rid]
    _, cached = bench.core.memory.cache.probe(victim.token_ids)
    assert cached == victim.kv_len // 4 * 4 > 8


def test_a_request_that_comes_back_leaves_room_for_those_being_restored() -> None:
    """Counted without them, the second would come back too early, and one be retracted again: 11 times, not 7."""
    bench = DecodeBench(pages=10, retract_steps=2)
    bench.send(*crowd("abcde", prompt_len=3, max_new_tokens=30))
    bench.run()
    assert sorted(finished(bench)) == list("abcde")
    assert bench.core.counters.retractions <= 8


@pytest.mark.parametrize("host_pages", [0, 1, 32])
def test_a_lone_request_finishes_in_a_pool_of_its_own_size(host_pages: int) -> None:
    bench = DecodeBench(pages=7, host_pages=host_pages)
    bench.send(*crowd("a"))
    bench.run()
    assert len(bench.tokens("a")) == 19


def test_twins_in_a_pool_for_one_both_finish() -> None:
    """Their prompt is fetched twice, because the fetch they waited for fails. If it were also held twice, neither
    would have the room to finish."""
    bench = DecodeBench(pages=11)
    bench.send(*(decode(rid, prompt(16), 28) for rid in ("lost", "a", "b")))
    bench.turn()
    bench.fetcher.fail(1, ended=True)
    bench.run()
    assert [len(into) for _, _, into in bench.fetcher.started.values()] == [4, 4, 4]
    assert sorted(finished(bench)) == ["a", "b"]
    assert bench.holds_nothing


# ---- ends while retracted --------------------------------------------------------------------------------------

# Those that a command can meet.
STATES = [DecodeState.BACKING_UP, DecodeState.RETRACTED, DecodeState.RESTORING]


def in_state(bench: DecodeBench, state: DecodeState) -> Req | None:
    """The first request in this state."""
    return next((req for req in bench.core.requests if req.state is state), None)


def victim_in(state: DecodeState) -> tuple[DecodeBench, Req]:
    """A bench with a retracted request that is in `state`."""
    bench = DecodeBench(pages=10, routers=2)
    bench.send(*crowd("ab"))
    bench.run_until(lambda: in_state(bench, DecodeState.BACKING_UP) is not None)
    if state is not DecodeState.BACKING_UP:
        bench.device.finish_copies()
        bench.turn()
        bench.run_until(lambda: in_state(bench, state) is not None)
    victim = in_state(bench, state)
    assert victim is not None
    return bench, victim


def victim_with_a_row_in_flight() -> tuple[DecodeBench, Req]:
    """A bench in the middle of the turn in which a request is retracted."""
    bench = DecodeBench(pages=10)
    bench.send(*crowd("ab"))
    while True:
        bench.loop.begin()
        victim = in_state(bench, DecodeState.RETRACTING)
        if victim is not None:
            return bench, victim
        bench.loop.finish()
        bench.fetcher.land_all()


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
def test_a_cancelled_request_leaves_nothing(state: DecodeState, twice: bool) -> None:
    bench, victim = victim_in(state)
    rid, other = victim.rid, "b" if victim.rid == "a" else "a"
    bench.send(*[Cancel(rid, 1)] * (2 if twice else 1))
    bench.run()
    assert victim.state is DecodeState.CANCELLED
    assert finished(bench) == [other]
    assert bench.said(Refused) == []
    assert bench.holds_nothing


@pytest.mark.parametrize("state", [DecodeState.BACKING_UP, DecodeState.RESTORING])
def test_a_request_cancelled_while_it_is_copied_keeps_its_pages_until_the_copy_has_ended(
    state: DecodeState,
) -> None:
    bench, victim = victim_in(state)
    bench.send(Cancel(victim.rid, 1))
    bench.turn(3)
    assert in_state(bench, DecodeState.ABORTING) is victim
    assert bench.core.memory.pool.count(PageState.COPYING) > 0
    bench.device.finish_copies()
    bench.turn()
    assert victim.state is DecodeState.CANCELLED
    assert bench.core.memory.pool.count(PageState.COPYING) == 0


@pytest.mark.parametrize("state", STATES)
def test_a_lost_router_takes_everything_along(state: DecodeState) -> None:
    bench, _ = victim_in(state)
    bench.links.drop(bench.routers[0])
    bench.run()
    assert bench.holds_nothing
    assert bench.core.requests == []


@pytest.mark.parametrize("state", STATES)
def test_a_newer_attempt_replaces_it_or_is_refused_for_now(state: DecodeState) -> None:
    bench, victim = victim_in(state)
    rid = victim.rid
    bench.send(decode(rid, prompt(3, 9), attempt=2))
    bench.run()
    answers: list[Message] = [said for said in bench.said(Refused) if said.attempt == 2]
    answers += [said for said in bench.said(Finished) if said.attempt == 2]
    assert len(answers) == 1
    assert [said for said in bench.said(Finished) if (said.rid, said.attempt) == (rid, 1)] == []
    assert bench.holds_nothing


def test_a_request_may_end_with_the_very_step_it_was_retracted_at() -> None:
    bench, req = victim_with_a_row_in_flight()
    step = min(bench.core._batch._planned)  # in flight, and the last that the request takes part in
    place = bench.core._batch._planned[step].index(req)
    bench.device._results[step].token_ids[place] = EOS
    bench.loop.finish()
    bench.run()
    assert finished(bench)[0] == req.rid
    assert bench.core.counters.backups == 0
    assert bench.holds_nothing


def test_a_request_may_fail_with_the_very_step_it_was_retracted_at() -> None:
    bench, req = victim_with_a_row_in_flight()
    step = min(bench.core._batch._planned)
    place = bench.core._batch._planned[step].index(req)
    bench.device._results[step] = replace(bench.device._results[step], failed={place: "scripted"})
    bench.loop.finish()
    bench.run()
    assert [said.rid for said in bench.said(Failed)] == [req.rid]
    assert bench.core.counters.backups == 0
    assert bench.holds_nothing


def test_a_request_may_sit_out_the_very_step_it_was_retracted_at() -> None:
    bench, req = victim_with_a_row_in_flight()
    step = min(bench.core._batch._planned)
    place = bench.core._batch._planned[step].index(req)
    known = len(req.token_ids)
    bench.device._results[step] = replace(bench.device._results[step], sat_out={place})
    bench.device._kv_len[bench.device.batches[step - 1].decode_slots[place]] -= 1
    bench.loop.finish()
    assert (req.launched_len, req.kv_len, len(req.token_ids)) == (known - 1, known - 1, known)
    bench.run()
    assert req.rid in finished(bench)
    assert bench.core.counters.backups == 1
    assert bench.holds_nothing
