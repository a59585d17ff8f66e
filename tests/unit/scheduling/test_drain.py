"""Claims about the end of a worker: when it drains and may exit, and that what it is and did is shown in time."""

from __future__ import annotations

from dataclasses import dataclass
from time import monotonic

import pytest

from shared.process.health import Health
from shared.process.metrics import Metrics
from shared.scheduling.drain import DrainStep, WorkerDrain
from shared.wire.messages import DrainAck, Draining, Prefilled, Release
from shared.worker import worker
from shared.worker.worker import publish_scheduler, turn_until_exit
from tests.metric_pages import samples_of
from tests.unit.prefill.bench import PrefillBench
from tests.unit.scheduling.worker_bench import prefill, prompt


@dataclass
class Facts:
    """What a scheduler says of itself."""

    drained: bool = False
    slots_used: int = 0
    leases_held: int = 0


def test_a_worker_that_nobody_asked_goes_on_even_when_it_holds_nothing() -> None:
    assert WorkerDrain(30.0).decide(5.0, Facts(drained=True)).step is DrainStep.CONTINUE


def test_a_worker_asked_to_end_starts_to_drain_once_and_exits_when_nothing_is_left() -> None:
    drain = WorkerDrain(30.0)
    drain.sigterm(10.0)
    busy = Facts(slots_used=2, leases_held=1)
    decision = drain.decide(10.0, busy)
    assert decision.step is DrainStep.START_DRAINING
    assert decision.note is not None
    assert (decision.note.event, decision.note.fields) == ("worker.draining", {"slots_used": 2, "leases": 1})
    assert drain.decide(11.0, busy).step is DrainStep.CONTINUE
    assert drain.decide(12.0, Facts(drained=True)).step is DrainStep.CONTINUE
    decision = drain.decide(12.1, Facts(drained=True))
    assert decision.step is DrainStep.EXIT
    assert decision.note is not None
    assert decision.note.event == "worker.drained"


def test_a_worker_that_hears_of_a_router_in_its_last_turn_does_not_exit() -> None:
    drain = WorkerDrain(30.0)
    drain.sigterm(10.0)
    drain.decide(10.0, Facts(drained=True))
    assert drain.decide(10.1, Facts(drained=True)).step is DrainStep.CONTINUE
    assert drain.decide(10.2, Facts(drained=False)).step is DrainStep.CONTINUE, (
        "it has not acknowledged the drain"
    )
    assert drain.decide(10.3, Facts(drained=True)).step is DrainStep.CONTINUE
    assert drain.decide(10.4, Facts(drained=True)).step is DrainStep.EXIT


def test_a_worker_drains_no_longer_than_it_may_and_says_what_it_held() -> None:
    drain = WorkerDrain(30.0)
    drain.sigterm(10.0)
    busy = Facts(slots_used=1)
    drain.decide(10.0, busy)
    assert drain.decide(39.9, busy).step is DrainStep.CONTINUE
    decision = drain.decide(40.0, busy)
    assert decision.step is DrainStep.EXIT
    assert decision.note is not None
    assert (decision.note.event, decision.note.level) == ("worker.ended_with_work", "warning")


@pytest.mark.parametrize("sigints", [0, 1], ids=["a second SIGTERM", "SIGINT"])
def test_a_worker_that_is_not_to_wait_exits_at_once(sigints: int) -> None:
    drain = WorkerDrain(30.0)
    drain.sigterm(10.0)
    assert drain.decide(10.0, Facts(slots_used=1)).step is DrainStep.START_DRAINING
    if sigints:
        drain.sigint()
    else:
        drain.sigterm(10.1)
    decision = drain.decide(10.1, Facts(slots_used=1))
    assert decision.step is DrainStep.EXIT
    assert decision.note is not None
    assert decision.note.event == "worker.ended_with_work"
    assert decision.note.level == "info", "who asks for that knows what it cuts"


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
