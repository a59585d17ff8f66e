"""The instrument counts as idle what the device waits for Python, and nothing else. Python's time is a script here."""

from __future__ import annotations

import itertools

import pytest

from tests.benchmarks.bubble import BubbleRun, Figures
from tests.benchmarks.endless_decode import WorkedTime

STEP_SECONDS = 0.010


def measured(*, overlap: bool, seconds_a_look: float, engine: bool = False) -> Figures:
    """A run in which Python needs `seconds_a_look` between two looks at its clock."""
    looks = itertools.count()
    clock = WorkedTime(cpu=lambda: seconds_a_look * next(looks))
    return BubbleRun(16, STEP_SECONDS, overlap=overlap, engine=engine, clock=clock).measure(steps=200)


@pytest.mark.parametrize("engine", [False, True])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_device_is_never_idle_when_python_takes_no_time(overlap: bool, engine: bool) -> None:
    figures = measured(overlap=overlap, seconds_a_look=0.0, engine=engine)
    assert figures.idle_share == pytest.approx(0.0)
    assert figures.counted_idle_share == pytest.approx(0.0)
    assert figures.prebuilt_share == 0.0
    assert figures.cpu_seconds == 0.0


def test_without_overlap_the_device_is_idle_while_python_works() -> None:
    figures = measured(overlap=False, seconds_a_look=0.0002)
    step_seconds = STEP_SECONDS + figures.cpu_seconds
    assert figures.cpu_seconds > 0.0005
    assert figures.idle_share == pytest.approx(figures.cpu_seconds / step_seconds, rel=0.35)


@pytest.mark.parametrize("engine", [False, True])
def test_overlap_hides_work_that_is_shorter_than_a_step(engine: bool) -> None:
    hidden = measured(overlap=True, seconds_a_look=0.0002, engine=engine)
    shown = measured(overlap=False, seconds_a_look=0.0002, engine=engine)
    assert 0.0005 < hidden.cpu_seconds < STEP_SECONDS
    assert hidden.idle_share < shown.idle_share / 2


def test_overlap_cannot_hide_work_that_is_longer_than_a_step() -> None:
    assert measured(overlap=True, seconds_a_look=0.004).idle_share > 0.5
