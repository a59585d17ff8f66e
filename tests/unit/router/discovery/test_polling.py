"""When discovery lists, watches and pauses, without a thread, a clock or an API server."""

from __future__ import annotations

import pytest

from router.discovery.polling import (
    PAUSE_SECONDS,
    PAUSE_SECONDS_MAX,
    ListSlices,
    Pace,
    Polling,
    Step,
    WatchSlices,
)

PACE = Pace(relist_seconds=300.0, watch_read_seconds=60.0)


class Asking:
    """A thread that carries out each step and takes as long as the test says."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.polling = Polling(PACE)

    def step(self, seconds: float, *, failed: bool = False) -> tuple[Step, float]:
        """The next step, which takes this long, and the pause after it."""
        step, began = self.polling.next_step(self.now), self.now
        self.now += seconds
        pause_seconds = self.polling.ended(step, began, self.now, failed=failed)
        self.now += pause_seconds
        return step, pause_seconds


def test_a_list_is_followed_by_watches_until_the_next_list_is_due() -> None:
    asking = Asking()
    assert [asking.step(0.0), *(asking.step(60.0) for _ in range(5)), asking.step(0.0)] == [
        (ListSlices(), 0.0),
        *[(WatchSlices(60), 0.0)] * 5,
        (ListSlices(), 0.0),
    ]


def test_the_last_watch_before_a_list_is_shorter_and_of_whole_seconds() -> None:
    asking = Asking()
    asking.step(0.0)
    asking.step(270.5)
    assert asking.step(30.0) == (WatchSlices(30), 0.0)
    assert asking.step(0.0) == (ListSlices(), 0.0)


def test_pauses_between_failures_double_up_to_their_limit_and_only_lists_are_tried() -> None:
    asking = Asking()
    steps = [asking.step(3.0, failed=True) for _ in range(9)]
    assert {step for step, _ in steps} == {ListSlices()}
    assert [pause for _, pause in steps] == [PAUSE_SECONDS * 2**times for times in range(6)] + [
        PAUSE_SECONDS_MAX
    ] * 3


@pytest.mark.parametrize(
    ("seconds", "failed"),
    [pytest.param(0.1, True, id="an error"), pytest.param(0.1, False, id="an end before its time")],
)
def test_a_list_that_works_does_not_excuse_watches_that_fail(seconds: float, failed: bool) -> None:
    asking = Asking()
    pauses = []
    for _ in range(3):
        assert asking.step(0.1) == (ListSlices(), 0.0)
        pauses.append(asking.step(seconds, failed=failed)[1])
    assert pauses == [PAUSE_SECONDS, 2 * PAUSE_SECONDS, 4 * PAUSE_SECONDS]


def test_after_a_watch_that_lasted_the_pauses_begin_anew() -> None:
    asking = Asking()
    for _ in range(6):
        asking.step(0.1, failed=True)
    asking.step(0.1)
    assert asking.step(20.0, failed=True) == (WatchSlices(60), PAUSE_SECONDS)
    assert asking.step(0.1, failed=True) == (ListSlices(), 2 * PAUSE_SECONDS)
