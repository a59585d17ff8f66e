"""Work of a step is for what changes: a row that nothing happens to costs hardly a call, however many there are.

Calls are counted, not time: the count is the same on every machine. `python -m tests.benchmarks.schedulers` has times.
"""

from __future__ import annotations

import sys
from types import FrameType

from tests.unit.decode.bench import DecodeBench
from tests.unit.scheduling.worker_bench import decode, prompt

STEPS = 8  # two pages a row


def calls_of_steps(rows: int) -> int:
    """Python functions that are called in `STEPS` turns in which all rows only run."""
    bench = DecodeBench(pages=32 * rows, max_running_requests=rows)
    for number in range(1, rows + 1):
        bench.send(decode(f"r{number}", prompt(8, number), max_new_tokens=100))
    for _ in range(4):
        bench.loop.turn()
        bench.fetcher.land_all()
    assert bench.core.slots_used == rows
    calls = 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        calls += event == "call" and not frame.f_globals["__name__"].startswith("tests.")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        for _ in range(STEPS):
            bench.loop.turn()
    finally:
        sys.setprofile(before)
    return calls


def test_a_row_costs_no_calls_but_for_its_pages() -> None:
    """A page for each fourth step of a row, thirteen calls a page. It was 17 calls a row and step."""
    assert calls_of_steps(96) - calls_of_steps(32) <= 64 * STEPS * 4
