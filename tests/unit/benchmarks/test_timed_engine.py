"""What a launch of the CUDA engine's device costs the host, in calls, which no other work on the machine changes.

And that its counters say what the stream under it has seen: time that the host takes to stage a step is the GPU's idle
time, not its work.
"""

from __future__ import annotations

import sys
from types import FrameType

import pytest

from shared.batch.schedule_batch import ForwardMode, PageGrant, ScheduleBatch, SlotJoin
from shared.engine.cuda.device import CudaDevice
from shared.engine.cuda.graphs import DecodeGraphs
from shared.engine.streams import Work
from shared.wire.sampling_params import SamplingParams
from tests.benchmarks.endless_decode import WorkedTime
from tests.benchmarks.timed_engine import TOKEN, TimedStream, timed_engine

PAGE_SIZE, PAGES_PER_ROW, STEP_SECONDS = 16, 300, 0.005


class TimedBench:
    """A device on which `rows` requests of so many tokens decode. The clock stands still but for what a test adds."""

    def __init__(self, rows: int, prompt_len: int) -> None:
        self.cpu_seconds = 0.0
        self.rows = rows
        self.clock = WorkedTime(cpu=lambda: self.cpu_seconds)
        context_len = PAGE_SIZE * PAGES_PER_ROW
        self.device: CudaDevice
        self.stream: TimedStream
        self.device, self.stream = timed_engine(
            self.clock, rows, rows * PAGES_PER_ROW, PAGE_SIZE, context_len, STEP_SECONDS
        )
        self.step = 0
        self.pages = prompt_len // PAGE_SIZE + 1
        self.decode(joins=tuple(self._join(slot, prompt_len) for slot in range(rows)))

    def decode(self, joins: tuple[SlotJoin, ...] = (), grants: tuple[PageGrant, ...] = ()) -> int:
        """One step, and the calls that its launch makes."""
        self.step += 1
        batch = ScheduleBatch(
            self.step, ForwardMode.DECODE, joins, grants, decode_slots=tuple(range(self.rows))
        )
        calls = 0

        def count(_frame: FrameType, event: str, _argument: object) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            self.device.launch(batch)
        finally:
            sys.setprofile(None)
        assert self.device.wait(self.step).token_ids == [TOKEN] * self.rows
        return calls

    def grants(self, count: int) -> tuple[PageGrant, ...]:
        """A page more for the first requests."""
        self.pages += 1
        return tuple(PageGrant(slot, (slot * PAGES_PER_ROW + self.pages - 1,)) for slot in range(count))

    def _join(self, slot: int, prompt_len: int) -> SlotJoin:
        first = slot * PAGES_PER_ROW
        params = SamplingParams(max_new_tokens=100, seed=slot)
        return SlotJoin(slot, tuple(range(first, first + self.pages)), prompt_len, params, prompt_len, (), 1)


def test_a_row_that_nothing_happens_to_costs_no_call() -> None:
    few, many = TimedBench(64, 100), TimedBench(256, 100)
    assert few.decode() == many.decode()


def test_a_step_of_the_rows_of_the_one_before_costs_few_calls() -> None:
    """Calls are most of what it costs the host; some are those of the stream."""
    assert TimedBench(64, 100).decode() <= 150


def test_a_step_costs_the_same_at_any_length() -> None:
    short, long = TimedBench(64, 100), TimedBench(64, 4000)
    assert short.decode() == long.decode()


def test_a_page_costs_a_handful_of_calls() -> None:
    bench = TimedBench(64, 100)
    one, many = bench.decode(grants=bench.grants(1)), bench.decode(grants=bench.grants(33))
    assert many - one <= 32 * 4


def test_what_the_host_takes_to_stage_is_idle_time(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = TimedBench(4, 100)
    bench.decode()
    idle, busy = bench.device.counters.idle_seconds, bench.device.counters.decode_seconds
    seen = bench.stream.idle_seconds
    real = DecodeGraphs.stage

    def slowly(graphs: DecodeGraphs, *arrays: object) -> Work:
        bench.cpu_seconds += 0.001
        return real(graphs, *arrays)  # type: ignore[arg-type]

    monkeypatch.setattr(DecodeGraphs, "stage", slowly)
    for _ in range(10):
        bench.decode()
    assert bench.stream.idle_seconds - seen == pytest.approx(0.010)
    assert bench.device.counters.idle_seconds - idle == pytest.approx(0.010)
    assert bench.device.counters.decode_seconds - busy == pytest.approx(10 * STEP_SECONDS)
