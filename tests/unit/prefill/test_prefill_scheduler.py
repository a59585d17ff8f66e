"""The prefill core, claim by claim: chunks, handover, leases, gates, and the end of a request in every state."""

from __future__ import annotations

import pytest

from shared.wire.messages import Cancel, DrainAck, Draining, Load, Message, Prefilled, Refused, Release, Renew
from tests.unit.prefill.bench import CONTEXT_LEN, PrefillBench
from tests.unit.scheduling.worker_bench import EOS, ORDINARY, prefill, prompt

# ---- one request -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    ("length", "pages"),
    [pytest.param(3, 1, id="shorter than a page"), pytest.param(8, 2, id="exactly two pages"), (9, 3)],
)
def test_a_prompt_becomes_its_first_token_and_a_baton(length: int, pages: int, overlap: bool) -> None:
    bench = PrefillBench(overlap=overlap)
    bench.send(prefill("a", prompt(length)))
    bench.run()
    (answer,) = bench.said(Prefilled)
    assert (answer.index, answer.token_ids, answer.finish) == (0, (ORDINARY,), None)
    assert answer.baton is not None
    assert (answer.baton.kv_len, len(answer.baton.pages)) == (length, pages)
    assert bench.words.values[answer.baton.lease] == answer.baton.nonce


@pytest.mark.parametrize("answer", [pytest.param([EOS], id="end of sequence as the very first token")])
def test_a_request_that_ends_with_its_first_token_gets_no_baton(answer: list[int]) -> None:
    bench = PrefillBench()
    bench.device.answers[1] = answer
    bench.send(prefill("a", prompt(9)))
    bench.run()
    (said,) = bench.said(Prefilled)
    assert (said.token_ids, said.baton, said.finish) == ((EOS,), None, "stop")
    assert bench.holds_nothing


def test_max_new_tokens_of_one_ends_at_prefill() -> None:
    bench = PrefillBench()
    bench.send(prefill("a", prompt(9), max_new_tokens=1))
    bench.run()
    (said,) = bench.said(Prefilled)
    assert (said.baton, said.finish) == (None, "length")
    assert bench.holds_nothing


def test_a_later_attempt_counts_output_from_the_end_of_the_prompt() -> None:
    bench = PrefillBench()
    command = prefill("a", prompt(12), attempt=2)
    bench.send(type(command)("a", 2, command.token_ids, 9, command.params))
    bench.run()
    (said,) = bench.said(Prefilled)
    assert said.index == 3
    assert said.baton is not None
    assert (said.baton.kv_len, said.baton.prompt_len) == (12, 9)


def test_the_same_prompt_again_computes_one_page_at_most() -> None:
    bench = PrefillBench()
    for rid in ("a", "b"):
        bench.send(prefill(rid, prompt(8)))
        bench.run()
    assert [said.cached_tokens for said in bench.said(Prefilled)] == [0, 4]
    assert [len(row.token_ids) for rows in bench.extends for row in rows] == [8, 4]
    first, second = (said.baton for said in bench.said(Prefilled))
    assert first is not None
    assert second is not None
    assert first.pages == second.pages  # the block computed twice is held once


# ---- chunks and batches ----------------------------------------------------------------------------------------


def test_a_long_prompt_is_cut_at_page_boundaries_and_sampled_once() -> None:
    bench = PrefillBench(chunked_prefill_size=10)
    bench.send(prefill("a", prompt(21)))
    bench.run()
    assert [(row.start, len(row.token_ids), row.samples) for rows in bench.extends for row in rows] == [
        (0, 8, False),
        (8, 8, False),
        (16, 5, True),
    ]
    granted = [page for batch in bench.device.batches for grant in batch.grants for page in grant.pages]
    (said,) = bench.said(Prefilled)
    assert said.baton is not None
    assert said.baton.pages == (*bench.device.batches[0].joins[0].pages, *granted)


def test_the_last_chunk_shares_its_step_with_the_next_request() -> None:
    bench = PrefillBench(chunked_prefill_size=12)
    bench.send(prefill("a", prompt(16)), prefill("b", prompt(5, family=2)))
    bench.run()
    assert [[len(row.token_ids) for row in rows] for rows in bench.extends] == [[12], [4, 5]]


def test_middle_chunks_overlap_and_the_step_behind_a_finished_prompt_does_not() -> None:
    bench = PrefillBench(chunked_prefill_size=8, short_share=0)
    bench.send(prefill("a", prompt(24)), prefill("b", prompt(8, family=2)))
    bench.run()
    assert bench.device.trace == [
        *("launch 1", "launch 2", "settle 1", "launch 3", "settle 2"),
        *("settle 3", "launch 4", "settle 4"),
    ]


def test_normal_mode_settles_every_step_before_the_next() -> None:
    bench = PrefillBench(chunked_prefill_size=8, overlap=False)
    bench.send(prefill("a", prompt(24)))
    bench.run()
    assert bench.device.trace == [f"{act} {step}" for step in (1, 2, 3) for act in ("launch", "settle")]


def test_requests_go_in_the_order_they_came() -> None:
    bench = PrefillBench(max_running_requests=2)
    bench.send(*(prefill(rid, prompt(6, family=number)) for number, rid in enumerate("zyxwv")))
    bench.run()
    assert [said.rid for said in bench.said(Prefilled)] == list("zyxwv")


def test_the_queue_policy_decides_who_goes_first() -> None:
    bench = PrefillBench(max_running_requests=1, queue_policy="lof")
    bench.send(*(prefill(rid, prompt(6, family=n), max_new_tokens=10 * n) for n, rid in enumerate("abc", 1)))
    bench.run()
    assert [said.rid for said in bench.said(Prefilled)] == ["c", "b", "a"]


@pytest.mark.parametrize(("queue_max", "first"), [(1, "b"), (2, "c")])
def test_a_long_queue_is_served_by_arrival_where_matching_costs_too_much(queue_max: int, first: str) -> None:
    bench = PrefillBench(max_running_requests=1, queue_policy="lpm", prefix_aware_queue_max=queue_max)
    bench.send(prefill("a", prompt(12)))
    bench.run()
    bench.send(prefill("b", prompt(12, family=2)), prefill("c", prompt(12)))
    bench.run()
    assert bench.said(Prefilled)[1].rid == first


@pytest.mark.parametrize(("prefix_aware_queue_max", "rows"), [(1, 2), (2, 1)])
def test_requests_behind_the_bound_do_not_wait_for_a_shared_prefix(
    prefix_aware_queue_max: int, rows: int
) -> None:
    bench = PrefillBench(prefix_aware_queue_max=prefix_aware_queue_max, shared_prefix_tokens_min=4)
    bench.send(prefill("a", prompt(9)), prefill("b", prompt(9)))
    bench.run()
    assert len(bench.extends[0]) == rows


def test_of_two_with_a_common_prefix_one_computes_it() -> None:
    bench = PrefillBench(shared_prefix_tokens_min=8, shared_prefix_cached_tokens_max=4)
    bench.send(prefill("a", (*prompt(16), 1, 2)), prefill("b", (*prompt(16), 3, 4)))
    bench.run()
    assert [[len(row.token_ids) for row in rows] for rows in bench.extends] == [[18], [2]]


# ---- gates -----------------------------------------------------------------------------------------------------


def test_a_full_queue_refuses() -> None:
    bench = PrefillBench(max_queued_requests=2)
    bench.send(*(prefill(rid, prompt(6)) for rid in "abc"))
    bench.turn()
    assert [(said.rid, said.reason) for said in bench.said(Refused)] == [("c", "no_room")]


@pytest.mark.parametrize(
    ("length", "pages"),
    [pytest.param(CONTEXT_LEN, 99, id="no room for a token"), pytest.param(17, 4, id="too few pages")],
)
def test_what_never_fits_is_refused_at_intake(length: int, pages: int) -> None:
    bench = PrefillBench(pages=pages)
    bench.send(prefill("a", prompt(length)))
    bench.turn()
    assert [said.reason for said in bench.said(Refused)] == ["too_long"]


def test_without_lease_words_requests_wait() -> None:
    bench = PrefillBench(words=1)
    bench.send(prefill("a", prompt(6)), prefill("b", prompt(6, family=2)))
    bench.run()
    assert [said.rid for said in bench.said(Prefilled)] == ["a"]
    bench.send(Release("a", 1))
    bench.run()
    assert [said.rid for said in bench.said(Prefilled)] == ["a", "b"]


def test_nothing_starts_while_leases_hold_too_much() -> None:
    bench = PrefillBench(pages=10, lease_fraction=0.5)
    for number, rid in enumerate("abc"):
        bench.send(prefill(rid, prompt(12, family=number)))
        bench.run()
    assert [said.rid for said in bench.said(Prefilled)] == ["a", "b"]
    bench.send(Release("a", 1))
    bench.run()
    assert [said.rid for said in bench.said(Prefilled)] == ["a", "b", "c"]


def test_without_pages_requests_wait_for_a_lease_to_end() -> None:
    bench = PrefillBench(pages=4)
    bench.send(prefill("a", prompt(12)), prefill("b", prompt(12, family=2)))
    bench.run()
    assert [said.rid for said in bench.said(Prefilled)] == ["a"]
    bench.now += 10.0
    bench.run()
    assert [said.rid for said in bench.said(Prefilled)] == ["a", "b"]


# ---- leases ----------------------------------------------------------------------------------------------------


def leased() -> PrefillBench:
    bench = PrefillBench()
    bench.send(prefill("a", prompt(9)))
    bench.run()
    return bench


@pytest.mark.parametrize("message", [Release("a", 1), Cancel("a", 1)])
def test_release_and_cancel_end_a_lease(message: Message) -> None:
    bench = leased()
    bench.send(message)
    bench.run()
    assert bench.holds_nothing
    assert bench.said(Refused) == []


@pytest.mark.parametrize("message", [Release("a", 0), Cancel("a", 0), Release("b", 1), Renew("b", 1)])
def test_messages_of_other_attempts_and_requests_end_nothing(message: Message) -> None:
    bench = leased()
    bench.send(message)
    bench.run()
    assert bench.core.leases_held == 1


def test_a_lease_that_is_not_renewed_ends_and_the_router_hears_of_it() -> None:
    bench = leased()
    bench.now += 6.0
    bench.send(Renew("a", 1))
    bench.run()
    bench.now += 9.9
    bench.run()
    assert bench.core.leases_held == 1
    bench.now += 0.1
    bench.run()
    assert bench.holds_nothing
    assert [(said.rid, said.reason) for said in bench.said(Refused)] == [("a", "stale")]


def test_the_loop_wakes_when_a_lease_ends() -> None:
    bench = leased()
    bench.now += 9.9
    bench.run()
    assert 0 < bench.loop.patience_seconds() <= 0.1 + 1e-9


# ---- the end of a request, in every state ----------------------------------------------------------------------

STATES = ["waiting", "in flight", "chunked", "leased"]


def in_state(state: str) -> PrefillBench:
    """A bench whose request `a` is in `state`; the end of `b`, which was leased before, is another matter."""
    bench = PrefillBench(words=2 if state == "waiting" else 8, chunked_prefill_size=8, routers=2)
    if state == "waiting":
        bench.send(*(prefill(rid, prompt(5, family=number)) for number, rid in enumerate("bc", 2)), router=1)
        bench.run()
    bench.send(prefill("a", prompt(24 if state == "chunked" else 7)))
    if state in ("chunked", "in flight"):
        bench.turn()
        assert bench.core.slots_used == 1
        assert bench.loop.patience_seconds() == 0
    else:
        bench.run()
    return bench


@pytest.mark.parametrize("state", STATES)
def test_a_cancelled_request_leaves_nothing_and_says_nothing(state: str) -> None:
    bench = in_state(state)
    heard = len(bench.said(Prefilled))
    bench.send(Cancel("a", 1))
    bench.run()
    bench.send(Release("b", 1), Release("c", 1), router=1)
    bench.run()
    assert bench.holds_nothing
    assert len(bench.said(Prefilled)) == heard
    assert bench.core.counters.cancelled == 1


@pytest.mark.parametrize("state", STATES)
def test_a_lost_router_takes_its_requests_along_and_no_others(state: str) -> None:
    bench = in_state(state)
    bench.send(prefill("other", prompt(7, family=8)), router=1)
    bench.links.drop(bench.routers[0])
    bench.send(Release("b", 1), Release("c", 1), router=1)
    bench.run()
    assert [req.rid for req in bench.core.leases.reqs] == ["other"]
    bench.send(Release("other", 1), router=1)
    bench.run()
    assert bench.holds_nothing


@pytest.mark.parametrize("state", STATES)
def test_a_newer_attempt_replaces_an_older_one(state: str) -> None:
    bench = in_state(state)
    bench.send(prefill("a", prompt(7, family=7), attempt=2))
    bench.send(prefill("a", prompt(7, family=7), attempt=1), Cancel("a", 1))
    bench.send(Release("b", 1), Release("c", 1), router=1)
    bench.run()
    assert [(said.rid, said.attempt) for said in bench.said(Prefilled)][-1] == ("a", 2)
    assert [req.attempt for req in bench.core.leases.reqs] == [2]
    bench.send(Release("a", 2))
    bench.run()
    assert bench.holds_nothing


@pytest.mark.parametrize("state", STATES)
def test_a_repeated_command_is_dropped(state: str) -> None:
    bench = in_state(state)
    bench.send(prefill("a", prompt(7)))
    bench.send(Release("b", 1), Release("c", 1), router=1)
    bench.run()
    assert [said.attempt for said in bench.said(Prefilled) if said.rid == "a"] == [1]


def test_a_request_cancelled_in_flight_keeps_its_pages_until_the_step_is_over() -> None:
    bench = PrefillBench(pages=4, chunked_prefill_size=8)
    bench.send(prefill("a", prompt(16)))
    bench.turn()
    bench.send(Cancel("a", 1), prefill("b", prompt(16, family=2)))
    bench.loop.begin()
    assert len(bench.device.batches) == 1  # b waits: the step in flight still writes a's pages
    bench.loop.finish()
    bench.run()
    assert [said.rid for said in bench.said(Prefilled)] == ["b"]


@pytest.mark.parametrize("length", [1, 4, 16, 60])
def test_a_step_has_no_more_tokens_for_many_prompts_than_for_a_long_one(length: int) -> None:
    bench = PrefillBench(max_running_requests=16, words=32, chunked_prefill_size=16, pages=256)
    bench.send(*(prefill(str(number), prompt(length, number)) for number in range(1, 17)))
    bench.run()
    tokens = [sum(len(row.token_ids) for row in rows) for rows in bench.extends]
    assert sum(tokens) == 16 * length
    assert max(tokens) == 16


# ---- load ------------------------------------------------------------------------------------------------------


def test_a_load_counts_only_tokens_that_are_to_be_computed() -> None:
    bench = PrefillBench(max_running_requests=1, chunked_prefill_size=8)
    bench.send(prefill("a", prompt(100)))
    bench.run()
    bench.now += 0.1
    bench.send(prefill("b", prompt(40, family=2)), *(prefill(rid, prompt(101)) for rid in "cdefgh"))
    bench.turn()
    (load,) = [load for load in bench.said(Load) if load.queued == 7]
    assert load.queued_tokens == 40 + 6 * 1


def test_the_load_of_a_worker_that_became_idle_is_sent_in_time() -> None:
    bench = leased()
    assert bench.loop.patience_seconds() <= 0.1
    bench.now += 0.1
    bench.run()
    assert bench.said(Load)[-1].free_pages == 61
    assert bench.loop.patience_seconds() > 0.1


def test_a_draining_worker_finishes_its_queue_and_waits_for_its_leases() -> None:
    bench = PrefillBench()
    bench.send(prefill("a", prompt(6)))
    bench.turn()
    bench.core.start_draining()
    bench.send(prefill("b", prompt(6, 2)), DrainAck())
    bench.run()
    assert len(bench.said(Draining)) == 1
    assert [(said.rid, said.reason) for said in bench.said(Refused)] == [("b", "no_room")]
    assert [said.rid for said in bench.said(Prefilled)] == ["a"]
    assert not bench.core.drained
    bench.send(Release("a", 1))
    bench.turn()
    assert bench.core.drained


def test_a_router_that_connects_to_a_draining_worker_is_sent_draining() -> None:
    bench = PrefillBench(routers=2)
    bench.turn()
    bench.core.start_draining()
    bench.routers[1].drop(bench.links)
    bench.routers[1].link(bench.links)
    bench.turn(2)
    assert len(bench.said(Draining)) >= 2


def test_a_worker_tells_how_fast_it_computes_prompts() -> None:
    bench = PrefillBench(chunked_prefill_size=16, max_prefill_tokens=16)
    bench.device.seconds = lambda batch: 0.01 + 0.001 * sum(len(row.token_ids) for row in batch.extend)
    bench.turn()
    assert bench.said(Load)[-1].extend_rate == 0, "no step has told"
    for number in range(8):
        bench.send(prefill(f"r{number}", prompt(5 + 3 * number, number)))
        bench.run()
        bench.send(Release(f"r{number}", 1))
    bench.now += 1
    bench.turn()
    assert bench.said(Load)[-1].extend_rate == pytest.approx(16 / 0.026, rel=0.2)
