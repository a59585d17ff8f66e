"""A decode worker's world for benchmarks: its time, and requests without end whose pages come by themselves.

Making the requests is the harness's work: the CPU time of it is not the worker's.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from shared.links.events import LinkEvent, PeerUp, Received
from shared.transfer.protocol import FetchEvent, FetchLanded
from shared.wire.baton import Baton, Holder
from shared.wire.messages import Decode, Finished, Hello, Message, Refused
from shared.wire.sampling_params import SamplingParams
from tests.benchmarks.schedulers import PAGE_SIZE
from tests.unit.scheduling.worker_bench import HOLDER

CONTEXT_LEN_MIN = 1024
POOL_SHARE = 1.25  # of what all contexts would take: ample, and cached pages are evicted all the time
ROUTER = "router/1"
FETCH_SECONDS = 0.004


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

    def pass_until(self, when: float) -> None:
        """Others need not wait: only `now` is read."""


@dataclass(slots=True)
class WallTime(WorkedTime):
    """The same, but what happens takes as long as it takes."""

    nobody: threading.Event = field(default_factory=threading.Event)  # never set: waiting for it is a sleep

    def now(self) -> float:
        """Seconds of the machine's clock."""
        return time.perf_counter()

    def wait_until(self, when: float) -> None:
        """Sleep until then."""
        self.pass_until(when)

    def pass_until(self, when: float) -> None:
        """The same."""
        if (seconds := when - time.perf_counter()) > 0:
            self.nobody.wait(seconds)


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that share nothing."""

    prompt_len: int = 128
    output_lens: tuple[int, int] = (2, 500)  # the shortest and the longest

    @property
    def context_len(self) -> int:
        """Tokens of the longest request, at least."""
        return max(CONTEXT_LEN_MIN, self.prompt_len + self.output_lens[1] + 1)

    def pages(self, rows: int) -> int:
        """Of the pool."""
        return rows * int(self.context_len * POOL_SHARE) // PAGE_SIZE

    def requests(self) -> Iterator[Decode]:
        """Drawn from a fixed seed."""
        drawn = random.Random(0)
        for number in range(10**9):
            first = self.prompt_len * number % 10**8
            params = SamplingParams(max_new_tokens=drawn.randint(*self.output_lens), seed=number)
            pages = tuple(range(-(-self.prompt_len // PAGE_SIZE)))
            rid = f"cmpl-{number:032x}"
            baton = Baton(rid, 1, HOLDER, "format", 0, 1, self.prompt_len, self.prompt_len, pages)
            token_ids = tuple(range(first, first + self.prompt_len + 1))
            yield Decode(rid, 1, token_ids, self.prompt_len, params, baton)


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
    requests: Iterator[Decode]
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
        self._events.append(Received(ROUTER, next(self.requests)))
        self.clock.of_harness += self.clock.cpu() - started
