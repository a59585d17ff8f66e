"""Claims about the end of a worker: when it drains and may exit."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from shared.scheduling.drain import DrainStep, WorkerDrain


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
