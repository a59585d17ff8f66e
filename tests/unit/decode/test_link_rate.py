"""What a decode worker tells of its links: pages that are on their way, and how many come in a second."""

from __future__ import annotations

import pytest

from decode.link_rate import LinkRate
from shared.wire.messages import Cancel, Load
from tests.unit.decode.bench import DecodeBench
from tests.unit.scheduling.worker_bench import decode, prompt


def test_a_rate_shows_only_where_something_is_on_its_way_for_a_while() -> None:
    rate = LinkRate()
    rate.started(1.0)
    rate.landed(10, 1.2, more=False)
    assert rate.per_second(1.2) == 0.0
    rate.started(2.0)
    rate.started(2.1)
    rate.landed(10, 2.2, more=True)
    rate.landed(10, 2.5, more=False)
    assert rate.per_second(2.5) == 40.0, "what came before the while was over counts"


def test_idle_time_does_not_count_and_what_is_given_up_neither() -> None:
    rate = LinkRate()
    rate.started(1.0)
    rate.landed(10, 2.0, more=False)
    rate.started(3.0)
    rate.stopped()
    rate.landed(0, 4.0, more=False)
    assert rate.per_second(4.0) == 10.0


def test_the_last_seconds_count_and_a_rate_is_forgotten() -> None:
    rate = LinkRate()
    rate.started(0.0)
    for second in range(1, 9):
        rate.landed(100 if second <= 3 else 10, float(second), more=True)
    assert rate.per_second(8.0) == 10.0
    assert rate.per_second(18.0) == 10.0
    assert rate.per_second(18.1) == 0.0


def test_a_worker_tells_what_is_on_its_way_and_how_fast_it_comes() -> None:
    bench = DecodeBench(pages=64, load_seconds=0.001)
    bench.send(decode("a", prompt(9)))
    bench.send(decode("b", prompt(9, 2)))
    bench.turn(2)
    assert (bench.said(Load)[-1].pages_arriving, bench.said(Load)[-1].pages_arriving_a_second) == (6, 0.0)
    bench.now += 0.5
    bench.fetcher.land_all()
    bench.turn(2)
    told = bench.said(Load)[-1]
    assert told.pages_arriving == 0
    assert told.pages_arriving_a_second == pytest.approx(6 / 0.5, rel=0.1)


def test_what_is_cancelled_on_its_way_is_not_on_its_way_any_more() -> None:
    bench = DecodeBench(pages=64, load_seconds=0.001)
    bench.send(decode("a", prompt(9)))
    bench.turn(2)
    bench.send(Cancel("a", 1))
    bench.now += 0.5
    bench.turn(2)
    assert bench.said(Load)[-1].pages_arriving == 0
