"""Migration: pages are leased only when settled, behind the last tokens, and held until another worker has them."""

from __future__ import annotations

import pytest

from shared.wire.messages import (
    Cancel,
    DrainAck,
    Draining,
    Failed,
    Finished,
    Generated,
    Joined,
    Migrate,
    Migrating,
    Refused,
    Release,
)
from tests.unit.decode.bench import DecodeBench
from tests.unit.scheduling.worker_bench import EOS, decode, prompt


def running(rids: str = "a", **settings: object) -> DecodeBench:
    """A bench on which these requests decode."""
    bench = DecodeBench(**settings)  # type: ignore[arg-type]
    bench.send(*[decode(rid, prompt(6, number), 60) for number, rid in enumerate(rids, 1)])
    bench.run_until(lambda: bench.core.counters.generated_tokens >= 3 * len(rids))
    return bench


@pytest.mark.parametrize("overlap", [True, False])
def test_a_request_is_leased_with_all_its_settled_tokens_and_no_step_touches_it_any_more(
    overlap: bool,
) -> None:
    bench = running(overlap=overlap)
    bench.send(Migrate("a", 1))
    bench.turn(3)
    moving = bench.said(Migrating)[-1]
    assert moving.output_len == 1 + len(bench.tokens("a"))
    assert moving.baton.kv_len == 6 + moving.output_len - 1
    assert len(moving.baton.pages) == bench.core.memory.pages_for(moving.baton.kv_len)
    assert bench.heard.index(moving) > max(
        i for i, said in enumerate(bench.heard) if isinstance(said, Generated)
    )
    steps = len(bench.device.batches)
    bench.turn(5)
    assert len(bench.device.batches) == steps
    assert bench.words.values[moving.baton.lease] == moving.baton.nonce
    bench.send(Release("a", 1))
    bench.turn()
    assert bench.holds_nothing


def test_the_others_go_on() -> None:
    bench = running("ab")
    bench.send(Migrate("a", 1))
    bench.run()
    assert [said.rid for said in bench.said(Finished)] == ["b"]
    assert [said.rid for said in bench.said(Migrating)] == ["a"]


def test_a_request_that_ends_with_its_step_in_flight_finishes_instead() -> None:
    bench = DecodeBench()
    bench.device.answers[1] = [0, *[9] * 4, EOS]
    bench.send(decode("a", prompt(6), 60))
    bench.run_until(lambda: bench.core.counters.generated_tokens == 4)
    bench.send(Migrate("a", 1))
    bench.run()
    assert [said.rid for said in bench.said(Finished)] == ["a"]
    assert not bench.said(Migrating)
    assert bench.holds_nothing


def test_a_request_that_sits_out_its_step_in_flight_migrates_with_the_tokens_before() -> None:
    bench = DecodeBench()
    bench.device.answers[1] = list(range(10, 80))
    bench.send(decode("a", prompt(6), 60))
    bench.run_until(lambda: bench.core.counters.generated_tokens == 4)
    bench.device.sits_out = lambda _seed, _index: True
    bench.turn()
    bench.send(Migrate("a", 1))
    bench.run()
    (moving,) = bench.said(Migrating)
    assert bench.core.counters.rows_without_mask > 0
    assert moving.output_len == 1 + len(bench.tokens("a"))
    assert moving.baton.kv_len == 6 + moving.output_len - 1
    assert bench.tokens("a") == list(range(11, 11 + moving.output_len - 1))


def test_a_request_that_fails_with_its_step_in_flight_does_not_migrate() -> None:
    bench = DecodeBench()
    bench.device.failures[1] = 5
    bench.send(decode("a", prompt(6), 60))
    bench.run_until(lambda: bench.core.counters.generated_tokens == 4)
    bench.send(Migrate("a", 1))
    bench.run()
    assert [said.rid for said in bench.said(Failed)] == ["a"]
    assert not bench.said(Migrating)
    assert bench.holds_nothing


def test_a_lease_that_is_not_renewed_ends_and_its_router_gets_a_refusal() -> None:
    bench = running(lease_seconds=4.0)
    bench.send(Migrate("a", 1))
    bench.turn(3)
    bench.now += 5
    bench.turn()
    assert [(said.rid, said.reason) for said in bench.said(Refused)] == [("a", "stale")]
    assert bench.holds_nothing


@pytest.mark.parametrize("turns", range(4))
def test_a_cancelled_migration_leaves_nothing(turns: int) -> None:
    bench = running()
    bench.send(Migrate("a", 1))
    bench.turn(turns)
    bench.send(Cancel("a", 1))
    bench.turn(3)
    assert bench.holds_nothing


def test_no_more_requests_migrate_at_a_time_than_there_are_lease_words() -> None:
    bench = running("abc", words=2)
    bench.send(*[Migrate(rid, 1) for rid in "abc"])
    bench.turn(4)
    assert len(bench.said(Migrating)) == 2
    first = bench.said(Migrating)[0].rid
    bench.send(Release(first, 1))
    bench.turn(4)
    assert sorted(said.rid for said in bench.said(Migrating)) == ["a", "b", "c"]


def test_a_request_asked_for_while_its_pages_transfer_migrates_when_it_runs() -> None:
    bench = DecodeBench()
    bench.send(decode("a", prompt(6), 60))
    bench.turn()
    bench.send(Migrate("a", 1))
    bench.turn(2)
    assert not bench.said(Migrating)
    bench.fetcher.land_all()
    bench.turn(4)
    assert bench.said(Joined)
    assert bench.said(Migrating)


def test_a_migration_of_another_attempt_means_nothing() -> None:
    bench = running()
    bench.send(Migrate("a", 2), Migrate("b", 1))
    bench.turn(5)
    assert not bench.said(Migrating)


def test_a_draining_worker_refuses_new_requests_and_is_drained_when_nothing_is_left_and_every_router_knows() -> (
    None
):
    bench = running(routers=2)
    bench.core.start_draining()
    bench.turn()
    assert len(bench.said(Draining)) == 2
    bench.send(decode("b", prompt(6, 2)))
    bench.turn()
    assert [(said.rid, said.reason) for said in bench.said(Refused)] == [("b", "no_room")]
    bench.send(DrainAck())
    bench.send(Migrate("a", 1))
    bench.turn(4)
    bench.send(Release("a", 1))
    bench.turn()
    assert not bench.core.drained  # the other router may have sent something before it heard
    bench.send(DrainAck(), router=1)
    bench.turn()
    assert bench.core.drained
