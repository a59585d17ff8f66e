"""What a worker is and did is shown in time before it exits."""

from __future__ import annotations

from time import monotonic

import pytest

from shared.process.health import Health
from shared.process.metrics import Metrics
from shared.scheduling.drain import WorkerDrain
from shared.wire.messages import DrainAck, Draining, Prefilled, Release
from shared.worker import worker
from shared.worker.worker import publish_scheduler, turn_until_exit
from tests.metric_pages import samples_of
from tests.unit.prefill.bench import PrefillBench
from tests.unit.scheduling.worker_bench import prefill, prompt


def test_the_last_step_is_shown_before_the_worker_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "PUBLISH_SECONDS", 3600.0)
    bench, shown, drain = PrefillBench(), list[int](), WorkerDrain(3600.0)
    bench.send(prefill("a", prompt(8)))

    def publish() -> None:
        shown.append(bench.core.leases_held)
        if shown[-1]:
            drain.sigint()

    turn_until_exit(drain, bench.core, bench.loop, Health(60.0), publish, bench.notes.append)
    assert shown[-1] == 1


def test_a_draining_worker_is_shown_as_not_ready_while_it_still_holds_a_lease() -> None:
    bench, health, metrics, drain = PrefillBench(), Health(60.0), Metrics("prefill"), WorkerDrain(3600.0)
    bench.send(prefill("a", prompt(8)))
    bench.run()
    assert bench.said(Prefilled)
    health.become_ready()
    shown: list[tuple[float, float]] = []

    def publish() -> None:
        publish_scheduler(metrics, health, bench.core)
        samples = samples_of(metrics.render().decode())
        shown.append((samples["segue_ready"], samples["segue_leases"]))
        if len(shown) == 1:
            drain.sigterm(monotonic())
        else:
            bench.send(DrainAck(), Release("a", 1))

    turn_until_exit(drain, bench.core, bench.loop, health, publish, bench.notes.append)
    assert shown[:2] == [(1, 1), (0, 1)]
    assert [note.event for note in bench.notes] == ["worker.draining", "worker.drained"]
    bench._listen()
    assert bench.said(Draining)
