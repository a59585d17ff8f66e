"""Turns a worker's loop until it may exit, and shows meanwhile what the scheduler counts and holds.

`shared.scheduling.drain` decides, the event loop works. This file knows no engine, no links and no signals.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Protocol

from shared.batch.effects import Note
from shared.kv.kv_memory import KvMemory
from shared.process import gauges
from shared.process.health import Health
from shared.process.metrics import Metrics
from shared.scheduling.drain import DrainFacts, DrainStep, WorkerDrain
from shared.scheduling.event_loop import EventLoop, Scheduler

PUBLISH_SECONDS = 0.05  # between two refreshes of /metrics


class WorkerScheduler(Scheduler, DrainFacts, Protocol):
    """A scheduler with the figures every worker shows."""

    memory: KvMemory

    @property
    def counters(self) -> object: ...
    def start_draining(self) -> None: ...


def turn_until_exit(
    drain: WorkerDrain,
    scheduler: WorkerScheduler,
    loop: EventLoop,
    health: Health,
    publish: Callable[[], None],
    write_note: Callable[[Note], None],
) -> None:
    """Turn the loop until `drain` says that the process may exit. `publish` refreshes /metrics."""
    next_publish = 0.0
    while True:
        decision = drain.decide(monotonic(), scheduler)
        if decision.note:
            write_note(decision.note)
        if decision.step is DrainStep.EXIT:
            return
        if decision.step is DrainStep.START_DRAINING:
            health.start_draining()
            scheduler.start_draining()
            next_publish = 0.0
        loop.begin()
        health.beat()
        if monotonic() >= next_publish:
            publish()  # before a step is waited for, so that /metrics shows what it works on
            next_publish = monotonic() + PUBLISH_SECONDS
        loop.finish()


def publish_scheduler(metrics: Metrics, health: Health, scheduler: WorkerScheduler) -> None:
    """Show what the scheduler counts and holds, and whether the worker is ready: as /readyz says it."""
    metrics.set(gauges.READY, int(health.ready))
    metrics.publish(scheduler.counters)
    for state, count in scheduler.memory.pool.counts().items():
        metrics.set(gauges.PAGES, count, state=state.value)
    metrics.set(gauges.LEASES, scheduler.leases_held)
    metrics.set(gauges.SLOTS_USED, scheduler.slots_used)
