"""How much of a decode device's time is idle because it waits for Python.

    python -m tests.benchmarks.bubble [--steps 1000] [--rows 64 256 1024] [--milliseconds 2 5 20]
                                      [--rounds 3]

The real event loop and decode scheduler. The device is virtual: a DECODE step takes a fixed time, a PREBUILT step
none. The CPU time of Python is real: the clock is the thread's CPU time plus what was waited for the device, a fetch
or the links. So no step has to be computed, and other work on the machine counts little; of some rounds the
one with the least CPU time is shown.

    python   plan 2 │ settle 1 │ plan 3 │ (waits) │ settle 2 │ …
    device   ── step 1 ──┤ idle ├── step 2 ────────┤ …

Prompts of 128 tokens, outputs of 2 to 500 by length, and a new request for each that ends: one in 251 rows a step.
Making the requests is the harness's work and is not counted. It knows nothing of what a step computes.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from shared.baton import Baton, Holder
from shared.effects import Note
from shared.links.events import LinkEvent, PeerUp, Received
from shared.messages import Decode, Finished, Hello, Message, Refused
from shared.process.garbage import YOUNG_OBJECTS_OF_WORKER, spare_what_is_loaded
from shared.sampling_params import SamplingParams
from shared.schedule_batch import ForwardMode, ScheduleBatch
from shared.scheduling.event_loop import EventLoop
from shared.transfer.protocol import FetchEvent, FetchLanded
from tests.benchmarks.schedulers import PAGE_SIZE, decode_scheduler
from tests.unit.scheduling.worker_bench import HOLDER

PROMPT_LEN, OUTPUT_LENS, CONTEXT_LEN = 128, (2, 500), 1024
PAGES_PER_ROW = 80  # 1,280 tokens: ample, and cached pages are evicted all the time
ROUTER = "router/1"
FETCH_SECONDS = 0.004
WARM_UP_STEPS = 300  # until requests of all ages run


@dataclass(slots=True)
class WorkedTime:
    """Seconds that the worker has computed or waited; `cpu` reads the CPU time of this thread."""

    cpu: Callable[[], float] = time.thread_time
    waited: float = 0.0
    of_harness: float = 0.0  # CPU seconds that do not count

    @property
    def worked(self) -> float:
        """CPU seconds of the worker."""
        return self.cpu() - self.of_harness

    def now(self) -> float:
        """Seconds of the worker's clock."""
        return self.worked + self.waited

    def wait_until(self, when: float) -> None:
        """Nothing is computed until then."""
        self.waited += max(0.0, when - self.now())


@dataclass(slots=True)
class TimedDevice:
    """Implements `Device`: steps take a fixed time, one after the other."""

    clock: WorkedTime
    step_seconds: float
    decode_steps: int = 0
    prebuilt_steps: int = 0
    idle_seconds: float = 0.0
    free_at: float = 0.0  # when the last launched step ends
    _ends: dict[int, tuple[float, int]] = field(default_factory=dict)  # by step: its end, its rows
    _completed: int = 0

    def launch(self, batch: ScheduleBatch) -> None:
        begin = max(self.clock.now(), self.free_at)
        if batch.mode is ForwardMode.PREBUILT:
            self.prebuilt_steps += 1
            self._ends[batch.step] = self.free_at, 0
            return
        self.decode_steps += 1
        self.idle_seconds += begin - self.free_at
        self.free_at = begin + self.step_seconds
        self._ends[batch.step] = self.free_at, len(batch.decode_slots)

    def wait(self, step: int) -> list[int]:
        end, rows = self._ends.pop(step)
        self.clock.wait_until(end)
        self._completed = step
        return [9] * rows

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
class TimedFetcher:
    """Implements `Fetcher`: each fetch lands after `FETCH_SECONDS`."""

    clock: WorkedTime
    _landing: deque[tuple[float, int]] = field(default_factory=deque)

    @property
    def holder(self) -> Holder:
        return HOLDER

    def start(self, fetch_id: int, baton: Baton, start_page: int, into: Sequence[int]) -> None:
        del baton, start_page, into
        self._landing.append((self.clock.now() + FETCH_SECONDS, fetch_id))

    def abandon(self, fetch_id: int) -> None:
        raise AssertionError(f"no request is cancelled, but fetch {fetch_id} was abandoned")

    def poll(self) -> list[FetchEvent]:
        landed: list[FetchEvent] = []
        while self._landing and self._landing[0][0] <= self.clock.now():
            _, fetch_id = self._landing.popleft()
            landed.append(FetchLanded(fetch_id, 1, FETCH_SECONDS))
        return landed


@dataclass(slots=True)
class EndlessRouter:
    """Implements `WorkerEndpoint`: sends a new request for each that ends."""

    clock: WorkedTime
    rows: int
    _requests: Iterator[Decode] = field(default_factory=lambda: drawn_requests(random.Random(0)))
    _events: list[LinkEvent] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._events.append(PeerUp(ROUTER, Hello(session=1, role="router", uid="router", epoch=1)))
        for _ in range(self.rows):
            self._ask()

    def receive(self, timeout_seconds: float) -> list[LinkEvent]:
        if not self._events:
            self.clock.wait_until(self.clock.now() + timeout_seconds)
        events, self._events = self._events, []
        return events

    def send(self, peer: str, message: Message) -> None:
        assert peer == ROUTER
        match message:
            case Finished():
                self._ask()
            case Refused():
                raise AssertionError(f"the pool is ample, but {message.rid} was refused: {message.reason}")

    def _ask(self) -> None:
        started = self.clock.cpu()
        self._events.append(Received(ROUTER, next(self._requests)))
        self.clock.of_harness += self.clock.cpu() - started


def drawn_requests(rng: random.Random) -> Iterator[Decode]:
    """Requests whose prompts share nothing."""
    for number in range(10**9):
        first = PROMPT_LEN * number % 10**8
        params = SamplingParams(max_new_tokens=rng.randint(*OUTPUT_LENS), seed=number)
        pages = tuple(range(PROMPT_LEN // PAGE_SIZE))
        rid = f"cmpl-{number:032x}"
        baton = Baton(rid, 1, HOLDER, "format", 0, 1, PROMPT_LEN, PROMPT_LEN, pages)
        yield Decode(rid, 1, tuple(range(first, first + PROMPT_LEN + 1)), PROMPT_LEN, params, baton)


@dataclass(frozen=True, slots=True)
class Figures:
    """What one run showed after its warm-up."""

    idle_share: float  # of the device's time
    prebuilt_share: float  # of all steps
    cpu_seconds: float  # of Python, a DECODE step


class BubbleRun:
    """One worker whose device needs `step_seconds` for each DECODE step of `rows` rows."""

    def __init__(
        self, rows: int, step_seconds: float, *, overlap: bool, cpu: Callable[[], float] = time.thread_time
    ):
        self.clock = WorkedTime(cpu)
        self.device = TimedDevice(self.clock, step_seconds)
        self.core = decode_scheduler(rows, rows * PAGES_PER_ROW, 0, CONTEXT_LEN, frozenset({0}))
        self.loop = EventLoop(
            self.core,
            self.device,
            TimedFetcher(self.clock),
            EndlessRouter(self.clock, rows),
            self.clock.now,
            _ignore,
            overlap=overlap,
        )

    def measure(self, steps: int) -> Figures:
        """Figures of `steps` DECODE steps after the warm-up."""
        device = self.device
        self._run_until(WARM_UP_STEPS)
        prebuilt, idle, ended, worked = (
            device.prebuilt_steps,
            device.idle_seconds,
            device.free_at,
            self.clock.worked,
        )
        self._run_until(WARM_UP_STEPS + steps)
        prebuilt = device.prebuilt_steps - prebuilt
        return Figures(
            idle_share=(device.idle_seconds - idle) / (device.free_at - ended),
            prebuilt_share=prebuilt / (prebuilt + steps),
            cpu_seconds=(self.clock.worked - worked) / steps,
        )

    def _run_until(self, decode_steps: int) -> None:
        while self.device.decode_steps < decode_steps:
            self.loop.turn()


def _ignore(note: Note) -> None:
    del note


def best_of(rounds: int, rows: int, step_seconds: float, steps: int, *, overlap: bool) -> Figures:
    """The round with the least CPU time: other work on the machine only adds."""
    figures = []
    for _ in range(rounds):
        gc.collect()
        figures.append(BubbleRun(rows, step_seconds, overlap=overlap).measure(steps))
    return min(figures, key=lambda figure: figure.cpu_seconds)


def main() -> None:
    """Print one line for each number of rows and length of a step."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000, help="DECODE steps that are measured")
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256, 1024], help="requests that run")
    parser.add_argument("--milliseconds", type=float, nargs="+", default=[2, 5, 20], help="of a DECODE step")
    parser.add_argument("--rounds", type=int, default=3, help="of each figure; the best is shown")
    given = parser.parse_args()
    spare_what_is_loaded(YOUNG_OBJECTS_OF_WORKER)
    sys.stdout.write("rows  step, ms | idle  PREBUILT  CPU of a step, ms | without overlap: idle   CPU, ms\n")
    for rows in given.rows:
        for milliseconds in given.milliseconds:
            with_overlap, without = (
                best_of(given.rounds, rows, milliseconds / 1000, given.steps, overlap=overlap)
                for overlap in (True, False)
            )
            sys.stdout.write(
                f"{rows:4d} {milliseconds:9g} | {with_overlap.idle_share:5.1%} {with_overlap.prebuilt_share:7.0%}"
                f" {with_overlap.cpu_seconds * 1000:13.2f} | {without.idle_share:22.1%}"
                f" {without.cpu_seconds * 1000:9.2f}\n"
            )
            sys.stdout.flush()


if __name__ == "__main__":
    main()
