"""Work that is late ends with an exception in its own thread, and never anywhere else."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from router.text.chat_template import TimeLimit, TimeLimitError
from tests.waiting import comes_true


def endless() -> None:
    while True:
        pass


def test_work_that_does_not_end_is_ended_and_its_thread_goes_on() -> None:
    limit = TimeLimit(0.1)
    with ThreadPoolExecutor(1) as threads:
        for _ in range(3):
            assert isinstance(threads.submit(limit.run, endless).exception(timeout=20), TimeLimitError)
        assert threads.submit(limit.run, lambda: 5).result(timeout=20) == 5


def test_what_work_returns_and_raises_passes() -> None:
    limit = TimeLimit(5)
    assert limit.run(lambda: "done") == "done"
    with pytest.raises(ZeroDivisionError):
        limit.run(lambda: 1 / 0)


def test_no_exception_comes_after_the_work_however_closely_it_ends() -> None:
    limit = TimeLimit(0.004)
    ended = {"in time": 0, "late": 0}

    def work(loops: int) -> None:
        for _ in range(loops):
            sum(range(200))

    def run(turn: int) -> None:
        try:
            limit.run(lambda: work(turn * 20))
            ended["in time"] += 1
        except TimeLimitError:
            ended["late"] += 1
        for _ in range(20):  # an exception that comes too late would show here
            time.monotonic()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(run, range(200)))
    assert min(ended.values()) > 0
    assert sum(ended.values()) == 200


def test_the_watching_thread_ends_when_nothing_runs() -> None:
    limit = TimeLimit(0.05)
    limit.run(lambda: None)
    assert comes_true(lambda: not any(thread.name == "time-limit" for thread in threading.enumerate()))
