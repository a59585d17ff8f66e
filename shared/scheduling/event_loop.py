"""The one loop: receive, poll transfers, plan, launch, settle the step before, carry out the effects.

Both roles run it around their scheduler. In overlap mode (the default) step N+1 is planned and launched while step N
still runs, and N's results are settled while N+1 runs; so a plan must not need anything that only the CPU knows about
N. Normal mode is the same loop at depth 0: each step is settled before the next is planned.

    overlap   plan 2 │ launch 2 │ settle 1 │ plan 3 │ launch 3 │ settle 2 │ …
    device    ── step 1 ──────────┼────── step 2 ───────────────┼── step 3 …

A turn has two halves, `begin` and `finish`, and only `finish` waits for the device: a test under a virtual clock
calls them one by one. This file knows nothing of requests, and the scheduler knows nothing of this file.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Protocol

from shared.batch.effects import AbandonFetch, Backup, Note, Restore, Send, StartFetch, WorkerEffect
from shared.batch.schedule_batch import ScheduleBatch
from shared.links.events import LinkEvent
from shared.scheduling.device import Device
from shared.scheduling.step_counters import StepCounters
from shared.transfer.protocol import Fetcher, FetchEvent
from shared.wire.messages import Message
from shared.wire.sampled import Sampled

BUSY_POLL_SECONDS = 0.001  # while a fetch or a copy is under way: neither has anything to block on
CHECK_SECONDS_MIN = 5.0  # between two checks of an idle worker: each walks the whole pool
IDLE_WAIT_SECONDS_MAX = 0.25  # so that liveness is shown and gauges stay fresh


class Scheduler(Protocol):
    """What decides: a core without I/O, clock, threads or log. What it wants done it returns as effects.

    The loop calls the methods in this order. `now` is in seconds of the worker's own clock and never runs backwards.
    Any of them may raise `InvariantError`, which ends the process: a state was met that the design excludes.

        begin    take in  [settles_first → reclaim  settle  take in]  plan  take_effects
        finish   [reclaim  settle  take_effects]
        take in  on_link*  reclaim  on_fetch*  on_copy*  tick

    When `finish` returns, at most one step is in flight, and it was planned in the same turn. So a request that
    `plan` takes out of the batch has settled its last step before the next event from outside.
    """

    def on_link(self, event: LinkEvent, now: float) -> None:
        """A router came, went, or sent a command: before a plan, in the order of arrival.

        Events of one router come in order: `PeerUp`, its messages, `PeerDown`. May take and give up pages and slots.
        """

    def on_fetch(self, event: FetchEvent, now: float) -> None:
        """A fetch that a `StartFetch` began has landed, gone stale, failed, or ended after it was given up."""

    def on_copy(self, copy_id: int, now: float) -> None:
        """The copy that a `Backup` or `Restore` began is done: its source may be reused, its target may be read."""

    def tick(self, now: float) -> None:
        """After all events: do what is due by time. At least once a turn."""

    def reclaim(self, completed_step: int) -> None:
        """The device has completed all steps up to `completed_step`: pages that waited for them are free.

        Called before every `settle` and once a turn, so that `plan` sees every page that is free.
        """

    def settles_first(self) -> bool:
        """Whether the step in flight should be settled before the next one is planned. Asked only if there is one.

        True costs the overlap of this step. Changes nothing. A loop whose launches cost nothing does not ask.
        """

    def plan(self, now: float) -> ScheduleBatch | None:
        """The next step, which is launched at once; None if there is nothing to launch. Once a turn.

        May admit, retract and return requests. It must not need what a step in flight samples.
        """

    def settle(self, batch: ScheduleBatch, sampled: Sampled, now: float) -> None:
        """What `batch` sampled. Every planned batch is settled once, in the order of planning.

        Requests may have ended since it was planned: what was sampled for them is discarded.
        """

    def take_effects(self) -> list[WorkerEffect]:
        """The effects since the last call, in the order in which to carry them out; each is given once."""

    def next_deadline(self) -> float | None:
        """When `tick` has something to do although no event comes; None: never. Changes nothing."""

    def awaits_transfer(self) -> bool:
        """Whether a fetch or a copy will report: the loop then polls often. Changes nothing."""

    def check(self) -> None:
        """Prove that pages, locks, slots and states agree; raises `InvariantError`.

        When idle: once after a change, and no sooner than `CHECK_SECONDS_MIN` after the last time.
        """


class WorkerEndpoint(Protocol):
    """The worker's end of its links to the routers."""

    def receive(self, timeout_seconds: float) -> list[LinkEvent]:
        """All events that have come; blocks for at most `timeout_seconds` while there is none."""

    def send(self, peer: str, message: Message) -> None:
        """Send without blocking; a message to a peer whose session has ended is dropped."""


class EventLoop:
    """One scheduler, its device, its fetcher, its links, and the log that its notes go to."""

    def __init__(
        self,
        scheduler: Scheduler,
        device: Device,
        fetcher: Fetcher,
        links: WorkerEndpoint,
        clock: Callable[[], float],
        write_note: Callable[[Note], None],
        *,
        overlap: bool = True,
        launches_cost: bool = True,
    ):
        """`launches_cost`: a launch takes time from the step in flight, as on a CPU that computes it.

        Where it does not, `settles_first` is not asked: the device would stand still while a step is settled.
        """
        self._scheduler = scheduler
        self._device = device
        self._fetcher = fetcher
        self._links = links
        self._clock = clock
        self._write_note = write_note
        self._depth = 1 if overlap else 0
        self._launches_cost = launches_cost
        self.counters = StepCounters()
        self._in_flight: deque[ScheduleBatch] = deque()
        self._launched = False
        self._progressed = False
        self._checked = False  # since the last change
        self._next_check = -math.inf  # when a check is due at the earliest, in seconds

    def turn(self) -> None:
        """One turn; blocks while there is nothing to do."""
        self.begin()
        self.finish()

    def begin(self) -> None:
        """Everything up to the launch. Blocks on the links only when idle, on the device only if `settles_first`."""
        patience = self.patience_seconds()
        self._progressed = False
        self._take_in(patience)
        if self._launches_cost and self._in_flight and self._scheduler.settles_first():
            self._settle_oldest()
            self._take_in(0.0)  # a request that came meanwhile does not wait for the next step, too
        self._launch(self._clock())
        self._carry_out()

    def finish(self) -> None:
        """Settle the step that `awaits` names, if any."""
        if self.awaits is not None:
            self._settle_oldest()
            self._carry_out()

    @property
    def awaits(self) -> int | None:
        """The step that `finish` will wait for."""
        if len(self._in_flight) > self._depth or (self._in_flight and not self._launched):
            return self._in_flight[0].step
        return None

    def _take_in(self, patience_seconds: float) -> None:
        """Pass on all that has come and is due."""
        events = self._links.receive(patience_seconds)
        now = self._clock()
        for event in events:
            self._scheduler.on_link(event, now)
        if self._poll_transfers(now) or events:
            self._checked = False
        self._scheduler.tick(now)

    def _poll_transfers(self, now: float) -> bool:
        """Pass on the events of fetches and copies; whether there were any."""
        self._scheduler.reclaim(self._device.completed())
        fetch_events, copies = self._fetcher.poll(), self._device.copies_done()
        for event in fetch_events:
            self._scheduler.on_fetch(event, now)
        for copy_id in copies:
            self._scheduler.on_copy(copy_id, now)
        return bool(fetch_events or copies)

    def _launch(self, now: float) -> None:
        batch = self._scheduler.plan(now)
        self._launched = batch is not None
        if batch is not None:
            self._device.launch(batch)
            self._in_flight.append(batch)
            self._progressed = True
            self._checked = False
        elif not self._in_flight and not self._checked and now >= self._next_check:
            self._scheduler.check()
            self._checked = True
            self._next_check = now + CHECK_SECONDS_MIN

    def _settle_oldest(self) -> None:
        batch = self._in_flight.popleft()
        sampled = self._device.wait(batch.step)
        self._scheduler.reclaim(batch.step)
        self._scheduler.settle(batch, sampled, self._clock())
        self.counters.settled(batch, sampled.seconds)
        self._progressed = True

    def patience_seconds(self) -> float:
        """How long the next `begin` may block: not at all while the last turn changed anything."""
        if self._in_flight or self._progressed:
            return 0.0
        deadline = self._scheduler.next_deadline()
        patience = IDLE_WAIT_SECONDS_MAX
        if deadline is not None:
            patience = min(patience, max(0.0, deadline - self._clock()))
        if self._scheduler.awaits_transfer():
            patience = min(patience, BUSY_POLL_SECONDS)
        return patience

    def _carry_out(self) -> None:
        for effect in self._scheduler.take_effects():
            match effect:
                case Send(peer, message):
                    self._links.send(peer, message)
                case StartFetch(fetch_id, baton, start_page, into):
                    self._fetcher.start(fetch_id, baton, start_page, into)
                case AbandonFetch(fetch_id):
                    self._fetcher.abandon(fetch_id)
                case Backup(copy_id, pages, host_pages):
                    self._device.start_backup(copy_id, pages, host_pages)
                case Restore(copy_id, host_pages, pages):
                    self._device.start_restore(copy_id, host_pages, pages)
                case Note() as note:
                    self._write_note(note)
