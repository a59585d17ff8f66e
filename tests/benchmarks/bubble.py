"""How much of a decode device's time is idle because it waits for Python.

    python -m tests.benchmarks.bubble [--steps 1000] [--rows 64 256 1024] [--milliseconds 2 5 20] [--rounds 3]
                                      [--device engine] [--clock wall] [--prompt 4000] [--outputs 2000 2000]
                                      [--instructions]

The real event loop and decode scheduler. A DECODE step takes a fixed time, a PREBUILT step none. The device is virtual,
or with `--device engine` the CUDA engine's own over a stream on a thread of its own (`timed_engine`). The CPU time of
Python is real: the clock is the thread's CPU time plus what was waited for the device, a fetch or the links. So no step
has to be computed, and other work on the machine counts little; the round with the least CPU time is shown. With
`--clock wall` all of it happens in real time, and whatever else the machine does counts. `--instructions` counts those
of a step by valgrind, in runs in which Python takes no time: a figure that is the same whatever else the machine does.

    python   plan 2 │ launch 2 │ settle 1 │ plan 3 │ launch 3 │ (waits) │ settle 2 │ …
    device   ── step 1 ──┤ idle ├── step 2 ──────────────────────────────┤ …

Prompts of 128 tokens, outputs of 2 to 500 by length, and a new request for each that ends: one in 251 rows a step.
Making the requests is the harness's work and is not counted. It knows nothing of what a step computes.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field
from functools import partial
from typing import Protocol

from shared.batch.effects import Note
from shared.batch.schedule_batch import ForwardMode, ScheduleBatch
from shared.engine.cuda.counters import DeviceCounters
from shared.process.role_main import YOUNG_OBJECTS_OF_WORKER, spare_what_is_loaded
from shared.scheduling.device import Device
from shared.scheduling.event_loop import EventLoop
from shared.wire.sampled import Sampled
from tests.benchmarks.endless_decode import EndlessRouter, TimedFetcher, WallTime, WorkedTime, Workload
from tests.benchmarks.schedulers import PAGE_SIZE, decode_scheduler

USUAL = Workload()
WARM_UP_STEPS = 300  # until requests of all ages run


@dataclass(slots=True)
class TimedDevice:
    """Implements `Device`: steps take a fixed time, one after the other."""

    clock: WorkedTime
    step_seconds: float
    idle_seconds: float = 0.0
    free_at: float = 0.0  # when the last launched step ends
    _ends: dict[int, tuple[float, int]] = field(default_factory=dict)  # by step: its end, its rows
    _completed: int = 0

    def launch(self, batch: ScheduleBatch) -> None:
        begin = max(self.clock.now(), self.free_at)
        if batch.mode is ForwardMode.PREBUILT:
            self._ends[batch.step] = self.free_at, 0
            return
        self.idle_seconds += begin - self.free_at
        self.free_at = begin + self.step_seconds
        self._ends[batch.step] = self.free_at, len(batch.decode_slots)

    def wait(self, step: int) -> Sampled:
        end, rows = self._ends.pop(step)
        self.clock.wait_until(end)
        self._completed = step
        return Sampled([9] * rows, seconds=self.step_seconds if rows else 0.0)

    def completed(self) -> int:
        return self._completed

    def start_backup(self, copy_id: int, pages: Sequence[int], host_pages: Sequence[int]) -> None:
        raise AssertionError(
            f"the pool is ample, but copy {copy_id} of {pages} to {host_pages} was asked for"
        )

    def start_restore(self, copy_id: int, host_pages: Sequence[int], pages: Sequence[int]) -> None:
        raise AssertionError(
            f"the pool is ample, but copy {copy_id} of {host_pages} to {pages} was asked for"
        )

    def copies_done(self) -> list[int]:
        return []


@dataclass(slots=True)
class CountedDevice:
    """Implements `Device` by another one: counts steps, and the CPU time of launches and waits."""

    device: Device
    cpu: Callable[[], float]
    decode_steps: int = 0
    prebuilt_steps: int = 0
    launch_seconds: float = 0.0
    wait_seconds: float = 0.0

    def launch(self, batch: ScheduleBatch) -> None:
        if batch.mode is ForwardMode.PREBUILT:
            self.prebuilt_steps += 1
        else:
            self.decode_steps += 1
        started = self.cpu()
        self.device.launch(batch)
        self.launch_seconds += self.cpu() - started

    def wait(self, step: int) -> Sampled:
        started = self.cpu()
        sampled = self.device.wait(step)
        self.wait_seconds += self.cpu() - started
        return sampled

    def completed(self) -> int:
        return self.device.completed()

    def start_backup(self, copy_id: int, pages: Sequence[int], host_pages: Sequence[int]) -> None:
        self.device.start_backup(copy_id, pages, host_pages)

    def start_restore(self, copy_id: int, host_pages: Sequence[int], pages: Sequence[int]) -> None:
        self.device.start_restore(copy_id, host_pages, pages)

    def copies_done(self) -> list[int]:
        return self.device.copies_done()


class IdleRecord(Protocol):
    """What a device's steps took."""

    @property
    def idle_seconds(self) -> float:
        """Between two steps, so far."""

    @property
    def free_at(self) -> float:
        """When the last launched step ends."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Of a run so far, or of a part of it."""

    decode_steps: int
    prebuilt_steps: int
    seconds: float  # of the device
    idle_seconds: float
    counted_busy_seconds: float  # by the engine's own counters
    counted_idle_seconds: float
    cpu_seconds: float  # of Python, all of it
    launch_seconds: float
    wait_seconds: float

    def since(self, earlier: Totals) -> Totals:
        """What came after."""
        return Totals(*(now - then for now, then in zip(astuple(self), astuple(earlier), strict=True)))


@dataclass(frozen=True, slots=True)
class Figures:
    """What one run showed after its warm-up."""

    totals: Totals

    @property
    def idle_share(self) -> float:
        """Of the device's time."""
        return self.totals.idle_seconds / self.totals.seconds

    @property
    def counted_idle_share(self) -> float:
        """The same by the engine's own counters; 0 for a virtual device."""
        counted = self.totals.counted_idle_seconds + self.totals.counted_busy_seconds
        return self.totals.counted_idle_seconds / counted if counted else 0.0

    @property
    def prebuilt_share(self) -> float:
        """Of all steps."""
        return self.totals.prebuilt_steps / (self.totals.prebuilt_steps + self.totals.decode_steps)

    @property
    def cpu_seconds(self) -> float:
        """Of Python, a DECODE step."""
        return self.totals.cpu_seconds / self.totals.decode_steps

    @property
    def parts(self) -> tuple[float, float, float]:
        """Of it the scheduler's and its loop's, the launch's, the wait's."""
        launch, wait = self.totals.launch_seconds, self.totals.wait_seconds
        steps = self.totals.decode_steps
        return (self.totals.cpu_seconds - launch - wait) / steps, launch / steps, wait / steps


class BubbleRun:
    """One worker whose device needs `step_seconds` for each DECODE step of `rows` rows."""

    def __init__(
        self,
        rows: int,
        step_seconds: float,
        *,
        overlap: bool,
        engine: bool = False,
        clock: WorkedTime | None = None,
        workload: Workload = USUAL,
    ):
        self.clock = clock = clock or WorkedTime()
        pages, context_len = workload.pages(rows), workload.context_len
        self.counters = DeviceCounters()
        self.timeline: IdleRecord
        self._close: Callable[[], None] = _nothing
        if engine:
            from tests.benchmarks.timed_engine import timed_engine  # needs torch, as nothing else here does

            device, stream = timed_engine(clock, rows, pages, PAGE_SIZE, context_len, step_seconds)
            self.counters, self._close, self.timeline = device.counters, device.close, stream
            self.device = CountedDevice(device, clock.cpu)
        else:
            self.timeline = virtual = TimedDevice(clock, step_seconds)
            self.device = CountedDevice(virtual, clock.cpu)
        self.core = decode_scheduler(rows, pages, 0, context_len, frozenset({0}))
        self.loop = EventLoop(
            self.core,
            self.device,
            TimedFetcher(clock),
            EndlessRouter(clock, rows, workload.requests()),
            clock.now,
            _ignore,
            overlap=overlap,
        )

    def measure(self, steps: int) -> Figures:
        """Figures of `steps` DECODE steps after the warm-up."""
        try:
            self._run_until(WARM_UP_STEPS)
            before = self._totals()
            self._run_until(WARM_UP_STEPS + steps)
            return Figures(self._totals().since(before))
        finally:
            self._close()

    def _totals(self) -> Totals:
        device, counters = self.device, self.counters
        return Totals(
            device.decode_steps,
            device.prebuilt_steps,
            self.timeline.free_at,
            self.timeline.idle_seconds,
            counters.decode_seconds + counters.prebuilt_seconds,
            counters.idle_seconds,
            self.clock.worked,
            device.launch_seconds,
            device.wait_seconds,
        )

    def _run_until(self, decode_steps: int) -> None:
        while self.device.decode_steps < decode_steps:
            self.loop.turn()


def _ignore(note: Note) -> None:
    del note


def _nothing() -> None:
    """A virtual device has nothing to close."""


def run_still(rows: int, step_seconds: float, workload: Workload, steps: int) -> None:
    """So many steps after the warm-up, while the clock of Python's CPU time stands still."""
    spare_what_is_loaded(YOUNG_OBJECTS_OF_WORKER)
    clock = WorkedTime(cpu=lambda: 0.0)
    run = BubbleRun(rows, step_seconds, overlap=True, clock=clock, workload=workload)
    run._run_until(WARM_UP_STEPS + steps)


def instructions(rows: int, step_seconds: float, workload: Workload, steps: int) -> float:
    """Instructions of a step: those of a run less those of its warm-up, both counted by valgrind."""
    counts = []
    for some in (0, steps):
        run = f"run_still({rows}, {step_seconds}, {workload!r}, {some})"
        program = f"from tests.benchmarks.bubble import run_still, Workload; {run}"
        command = ["valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null"]
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        told = subprocess.run(
            [*command, sys.executable, "-c", program],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        ).stderr
        found = re.search(r"I +refs: +([0-9,]+)", told)
        assert found is not None, f"valgrind tells no instructions: {told}"
        counts.append(int(found[1].replace(",", "")))
    return (counts[1] - counts[0]) / steps


def _print_instructions(
    rows: Sequence[int], milliseconds: Sequence[float], workload: Workload, steps: int
) -> None:
    for count, length in itertools.product(rows, milliseconds):
        thousands = instructions(count, length / 1000, workload, steps) / 1000
        sys.stdout.write(f"{count:4d} rows, {length:g} ms: {thousands:,.0f} thousand instructions a step\n")


def best_of(rounds: int, run: Callable[[], BubbleRun], steps: int) -> Figures:
    """The round with the least CPU time: other work on the machine only adds."""
    figures = []
    for _ in range(rounds):
        gc.collect()
        figures.append(run().measure(steps))
    return min(figures, key=lambda figure: figure.cpu_seconds)


def main() -> None:
    """Print one line for each number of rows and length of a step."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000, help="DECODE steps that are measured")
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256, 1024], help="requests that run")
    parser.add_argument("--milliseconds", type=float, nargs="+", default=[2, 5, 20], help="of a DECODE step")
    parser.add_argument("--rounds", type=int, default=3, help="of each figure; the best is shown")
    parser.add_argument("--device", choices=["virtual", "engine"], default="virtual")
    parser.add_argument("--clock", choices=["cpu", "wall"], default="cpu", help="what time is")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--outputs", type=int, nargs=2, default=[2, 500], help="shortest and longest, tokens")
    parser.add_argument("--instructions", action="store_true", help="count those of a step; needs valgrind")
    given = parser.parse_args()
    workload = Workload(given.prompt, (given.outputs[0], given.outputs[1]))
    if given.instructions:
        _print_instructions(given.rows, given.milliseconds, workload, given.steps)
        return
    clock = WallTime if given.clock == "wall" else WorkedTime
    spare_what_is_loaded(YOUNG_OBJECTS_OF_WORKER)
    sys.stdout.write(
        "rows  step, ms |  idle  counted  PREBUILT | CPU of a step, us = scheduler   launch     wait"
        " | without overlap: idle  CPU, us\n"
    )
    for rows in given.rows:
        for milliseconds in given.milliseconds:

            def run(overlap: bool, rows: int = rows, seconds: float = milliseconds / 1000) -> BubbleRun:
                return BubbleRun(
                    rows,
                    seconds,
                    overlap=overlap,
                    engine=given.device == "engine",
                    clock=clock(),
                    workload=workload,
                )

            shown, without = (
                best_of(given.rounds, partial(run, overlap), given.steps) for overlap in (True, False)
            )
            parts = "".join(f" {seconds * 1e6:8.0f}" for seconds in shown.parts)
            sys.stdout.write(
                f"{rows:4d} {milliseconds:9g} | {shown.idle_share:5.1%} {shown.counted_idle_share:8.1%}"
                f" {shown.prebuilt_share:9.0%} | {shown.cpu_seconds * 1e6:17.0f}{parts}"
                f" | {without.idle_share:22.1%} {without.cpu_seconds * 1e6:8.0f}\n"
            )
            sys.stdout.flush()


if __name__ == "__main__":
    main()
