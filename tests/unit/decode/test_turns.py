"""Turns: how long they are, and that requests which do not fit together run one after the other, none for long."""

from __future__ import annotations

import pytest

from decode.turns import Turns
from shared.wire.messages import Decode, Finished, Generated
from tests.unit.decode.bench import DecodeBench
from tests.unit.scheduling.worker_bench import decode, prompt

STEP_SECONDS = 0.02
TURN_SECONDS = 0.5


def requests(count: int) -> list[Decode]:
    """Of unlike prompts; each grows to 31 pages."""
    return [decode(f"r{number}", prompt(5, number), 120) for number in range(1, count + 1)]


def longest_pauses(bench: DecodeBench, commands: list[Decode]) -> dict[str, float]:
    """By request, in seconds, until all have ended; a step takes `STEP_SECONDS`."""
    bench.send(*commands)
    heard_at: dict[str, float] = {}
    pauses: dict[str, float] = dict.fromkeys((command.rid for command in commands), 0.0)
    heard = 0
    while len(bench.said(Finished)) < len(commands):
        assert bench.now < 300, bench.said(Finished)
        bench.now += STEP_SECONDS
        bench.turn()
        bench.fetcher.land_all()
        bench.device.finish_copies()
        for message in bench.heard[heard:]:
            for row in message.rows if isinstance(message, Generated) else ():
                pauses[row.rid] = max(pauses[row.rid], bench.now - heard_at.get(row.rid, bench.now))
                heard_at[row.rid] = bench.now
        heard = len(bench.heard)
    return pauses


def test_requests_that_do_not_fit_together_run_in_turns_and_none_pauses_for_long() -> None:
    bench = DecodeBench(pages=62, host_pages=400, turn_seconds=TURN_SECONDS, flush_seconds=0.001)
    pauses = longest_pauses(bench, requests(8))  # two fit at their end
    copies = 2 * STEP_SECONDS  # one out and one back
    turn_seconds = max(TURN_SECONDS, 20 * copies)
    assert max(pauses.values()) <= 3 * (turn_seconds + 3 * copies)  # three times two others run
    assert bench.core.counters.turns > 8
    assert all(len(bench.tokens(f"r{number}")) == 119 for number in range(1, 9))
    assert bench.holds_nothing


def test_without_room_in_host_memory_nobody_leaves_for_another() -> None:
    bench = DecodeBench(pages=40, host_pages=8, turn_seconds=TURN_SECONDS)
    bench.send(*requests(2))
    for _ in range(400):
        bench.now += STEP_SECONDS
        bench.turn()
        bench.fetcher.land_all()
        bench.device.finish_copies()
    assert bench.core.counters.turns == 0
    assert bench.said(Finished)


@pytest.mark.parametrize(
    ("running", "out", "seconds"),
    [(4, 1, 2.0), (4, 4, 2.0), (4, 8, 2.0), (4, 14, 8 * 4 / 14), (1, 16, 0.5), (0, 8, 1.0)],
)
def test_a_turn_is_shorter_the_more_wait(running: int, out: int, seconds: float) -> None:
    bench = DecodeBench()
    bench.send(*requests(running))
    bench.turn()
    turns = Turns(2.0)
    turns.look(bench.core.requests, [], out)
    assert turns.seconds == pytest.approx(min(2.0, seconds))


def test_a_turn_lasts_until_a_token_has_come() -> None:
    bench = DecodeBench()
    bench.send(*requests(2))
    bench.turn()
    turns = Turns(0.1)
    first, second = bench.core.requests
    turns.look([first, second], [], 1)
    turns.now = 5.0
    assert turns.over([first, second]) == []
    first.token_ids.append(1)
    assert turns.over([first, second]) == [first]


def test_a_turn_is_as_long_as_twenty_copies() -> None:
    turns = Turns(0.1)
    turns.now = 1.0
    turns.copied("backup", 0.97)
    turns.copied("restore", 0.98)
    assert turns.seconds == pytest.approx(20 * 0.05)


def test_a_turn_is_twice_as_long_as_all_that_run_take_to_be_computed_again_but_has_a_bound() -> None:
    bench = DecodeBench()
    bench.send(*requests(4))
    bench.turn()
    turns = Turns(2.0)
    turns.look(bench.core.requests, [], 4)
    turns.returned(0.5)
    assert turns.seconds == pytest.approx(2 * 4 * 0.5)
    turns.look(
        bench.core.requests[:1], [], 7
    )  # those that are computed again one after the other will run, too
    assert turns.seconds == pytest.approx(2 * 4 * 0.5)
    for _ in range(20):
        turns.returned(15.0)
    assert turns.seconds == 20.0
    for _ in range(200):
        turns.returned(60.0)
    assert turns.seconds == pytest.approx(60.0), "one of them takes longer than the bound"
    turns.look([], [], 0)
    turns.look(bench.core.requests, [], 1)
    assert turns.seconds == 2.0
