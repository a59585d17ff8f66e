"""One virtual worker: the real event loop around a real scheduler, from its start to its end.

The timeline drives the two halves of the loop's turn, `begin` when there is something to do and `finish` when the step
that it waits for has completed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from decode.config import DecodeConfig
from decode.scheduler import DecodeScheduler
from prefill.config import PrefillConfig
from prefill.scheduler import PrefillScheduler
from shared.batch.effects import Note
from shared.links.events import LinkEvent
from shared.scheduling.drain import DrainStep, WorkerDrain
from shared.scheduling.event_loop import EventLoop
from shared.wire.baton import Holder, agent_name
from shared.wire.messages import UNDERSTOOD, Hello, Limits, Message, WorkerRole
from tests.benchmarks.virtual_cluster.device import EOS_TOKEN_ID, VOCAB_SIZE, StepTimes, VirtualDevice
from tests.benchmarks.virtual_cluster.fabric import VirtualFabric, VirtualFetcher
from tests.benchmarks.virtual_cluster.network import VirtualNetwork
from tests.benchmarks.virtual_cluster.oracle import TimedOracle
from tests.simulation.oracle.device import Pages, Speed
from tests.simulation.world.fabric import FabricWords
from tests.simulation.world.timeline import TimelineProcess

MODEL_NAME = "virtual"
KV_FORMAT = "virtual pages"
LOOK_SECONDS = 0.05  # between two turns of an idle worker that drains
TURN_SECONDS = 0.0002  # of the CPU between two turns; the loop also turns as often while it has work


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerShape:
    """What a worker of one role is: its settings, its pool and its device."""

    config: PrefillConfig | DecodeConfig
    pool_tokens: int
    context_len: int = 8192  # tokens
    page_bytes: int = 1_800_000
    host_share: float = 0.25  # pages in host memory for each of the pool
    times: StepTimes = field(default_factory=StepTimes)
    oracle: bool = False  # the device computes the oracle's model on pages that it has

    @property
    def pages(self) -> int:
        """Of the pool."""
        return self.pool_tokens // self.config.page_size

    @property
    def host_pages(self) -> int:
        """Pages in host memory."""
        return int(self.pages * self.host_share)


class UncheckedPrefill(PrefillScheduler):
    """Does not prove its books when idle: tests/simulation does, and a large pool takes long."""

    def check(self) -> None:
        """Prove nothing."""


class UncheckedDecode(DecodeScheduler):
    """Does not prove its books when idle, as `UncheckedPrefill`."""

    def check(self) -> None:
        """Prove nothing."""


class VirtualWorker:
    """One prefill or decode process."""

    def __init__(
        self,
        uid: str,
        epoch: int,
        shape: WorkerShape,
        process: TimelineProcess,
        network: VirtualNetwork,
        fabric: VirtualFabric,
    ):
        self.process = process
        self.shape = shape
        self.hello = _hello(uid, epoch, shape)
        self.notes: list[Note] = []
        self._network = network
        self.device = self._device(epoch)
        holder = Holder(uid, epoch, agent_name(uid, epoch), b"", 0, shape.page_bytes, 0)
        config = shape.config
        leases = config.leases_max if isinstance(config, PrefillConfig) else config.max_running_requests
        self.fetcher = VirtualFetcher(
            fabric,
            process,
            holder,
            FabricWords(process, leases, count(1).__next__),
            on_event=self._wake,
            pages=self.device.pages if isinstance(self.device, TimedOracle) else None,
        )
        fabric.fetchers[holder.agent] = self.fetcher
        self.scheduler = _scheduler(shape, self.fetcher)
        self._loop = EventLoop(
            self.scheduler, self.device, self.fetcher, self, lambda: process.now, self.notes.append
        )
        self._drain = WorkerDrain(shape.config.drain_seconds)
        self.draining = False
        self._on_exit: Callable[[], None] = lambda: None
        self._inbox: list[LinkEvent] = []
        self._turns = 0  # scheduled so far
        self._turn_at: float | None = None  # when the next begins; None while one is under way
        network.add(self)
        self._turn(process.now)

    def _device(self, epoch: int) -> VirtualDevice | TimedOracle:
        shape = self.shape
        if not shape.oracle:
            return VirtualDevice(process=self.process, times=shape.times, on_copied=self._wake)
        page_size = shape.config.page_size
        return TimedOracle(
            process=self.process,
            pages=Pages(shape.pages, page_size, salt=epoch),
            host_pages=Pages(shape.host_pages, page_size, salt=epoch + 1),
            speed=Speed(copied_page=shape.times.copied_page),
            rng=random.Random(epoch),
            on_copied=self._wake,
            times=shape.times,
        )

    # ---- as the loop and the network see it ----

    def receive(self, timeout_seconds: float) -> list[LinkEvent]:
        """All that has come; the waiting is done by `_rest`."""
        del timeout_seconds
        events, self._inbox = self._inbox, []
        return events

    def send(self, peer: str, message: Message) -> None:
        self._network.send(self, peer, message)

    def take(self, events: list[LinkEvent]) -> None:
        self._inbox += events
        self._wake()

    def sigterm(self, on_exit: Callable[[], None]) -> None:
        """The process is asked to end; `on_exit` is called when it does."""
        self.draining = True
        self._on_exit = on_exit
        self._drain.sigterm(self.process.now)
        self.process.after(self.shape.config.drain_seconds, self._wake)
        self._wake()

    # ---- turns ----

    def _wake(self) -> None:
        if self._turn_at is not None:
            self._turn(self.process.now)

    def _turn(self, seconds: float) -> None:
        """Begin the next turn at `seconds`, unless it begins earlier anyway."""
        if self._turn_at is None or seconds < self._turn_at:
            self._turn_at = seconds
            self._turns += 1
            turn = self._turns
            self.process.at(seconds, lambda: self._begin(turn))

    def _begin(self, turn: int) -> None:
        if turn != self._turns:
            return  # it was woken, and this turn began earlier
        self._turn_at = None
        if (ends_at := self._settles_first_at()) is not None:
            self._turn(ends_at)
            return
        decision = self._drain.decide(self.process.now, self.scheduler)
        if decision.note:
            self.notes.append(decision.note)
        if decision.step is DrainStep.START_DRAINING:
            self.scheduler.start_draining()
        if decision.step is DrainStep.EXIT:
            self._on_exit()
            return
        self._loop.begin()
        if (step := self._loop.awaits) is None:
            self._rest()
        else:
            self.process.at(max(self.process.now, self.device.completes_at(step)), self._finish)

    def _settles_first_at(self) -> float | None:
        """When the step completes that the loop would wait for before it plans; None: it would wait for none.

        The loop takes in what comes during that wait, so the turn begins with its end: nothing else can come then.
        """
        ends_at = self.device.step_ends_at
        if ends_at is None or ends_at <= self.process.now:
            return None
        settles_first = self.scheduler.settles_first() or (self._inbox and self.device.ends_a_prompt)
        return ends_at if settles_first else None

    def _finish(self) -> None:
        self._loop.finish()
        self._rest()

    def _rest(self) -> None:
        """Go on at once while there is work; else sleep until a deadline, or until woken."""
        self._turn_at = None
        now = self.process.now
        if self._inbox or self._loop.patience_seconds() == 0:
            self._turn(now + TURN_SECONDS)
            return
        deadline = self.scheduler.next_deadline()
        if self.draining:
            deadline = now + LOOK_SECONDS
        if deadline is None:
            self._turn_at = float("inf")  # until woken
        else:
            self._turn(max(deadline, now + TURN_SECONDS))


def _hello(uid: str, epoch: int, shape: WorkerShape) -> Hello:
    config = shape.config
    slots = config.max_running_requests
    role: WorkerRole = "prefill" if isinstance(config, PrefillConfig) else "decode"
    extend_tokens = config.local_tokens_max if isinstance(config, DecodeConfig) else 0
    return Hello(
        session=0,
        role=role,
        uid=uid,
        epoch=epoch,
        model_name=MODEL_NAME,
        model="virtual 1",
        kv_format=KV_FORMAT,
        determinism="virtual",
        limits=Limits(shape.context_len, config.page_size, shape.pages, slots, VOCAB_SIZE, extend_tokens),
        understands=UNDERSTOOD[role],
        eos_token_ids=(EOS_TOKEN_ID,),
    )


def _scheduler(shape: WorkerShape, fetcher: VirtualFetcher) -> PrefillScheduler | DecodeScheduler:
    config = shape.config
    if isinstance(config, PrefillConfig):
        return UncheckedPrefill(
            config,
            pages=shape.pages,
            context_len=shape.context_len,
            holder=fetcher.holder,
            words=fetcher.words,
            kv_format=KV_FORMAT,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=frozenset({EOS_TOKEN_ID}),
        )
    return UncheckedDecode(
        config,
        pages=shape.pages,
        host_pages=shape.host_pages,
        context_len=shape.context_len,
        holder=fetcher.holder,
        words=fetcher.words,
        kv_format=KV_FORMAT,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=frozenset({EOS_TOKEN_ID}),
    )
