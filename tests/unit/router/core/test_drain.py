"""When a router becomes unready, stops listening, ends its answers and exits."""

from __future__ import annotations

import pytest

from router.core.drain import (
    ENDING_SECONDS,
    LOOK_SECONDS,
    TRANSITIONS,
    RouterDrain,
    RouterDrainState,
    RouterDrainStep,
)
from shared.batch.effects import Note

UNREADY, CLOSED, END, EXIT = RouterDrainStep


class DrainingRouter:
    """A drain core, the time, and the steps it took with their times."""

    def __init__(self, lag_seconds: float = 5.0, drain_seconds: float = 300.0):
        self.core = RouterDrain(lag_seconds, drain_seconds)
        self.now = 0.0
        self.open = 1
        self.steps: list[tuple[float, RouterDrainStep]] = []
        self.warnings: list[Note] = []

    def sigterm(self) -> None:
        self.core.sigterm(self.now)
        self._take()

    def sigint(self) -> None:
        self.core.sigint(self.now)
        self._take()

    def wait(self, seconds: float) -> None:
        end = self.now + seconds
        while (deadline := self.core.next_deadline()) is not None and deadline <= end:
            assert deadline > self.now, "it would look again at once, for ever"
            self.now = deadline
            self.core.tick(self.now, self.open)
            self._take()
        self.now = end

    def _take(self) -> None:
        effects = self.core.take_effects()
        self.steps += [(self.now, effect) for effect in effects if isinstance(effect, RouterDrainStep)]
        notes = [effect for effect in effects if isinstance(effect, Note)]
        self.warnings += [note for note in notes if note.level == "warning"]


def test_a_router_that_serves_has_no_deadline() -> None:
    assert DrainingRouter().core.next_deadline() is None


def test_a_draining_router_listens_until_proxies_know_and_exits_when_its_last_answer_is_written() -> None:
    router = DrainingRouter()
    router.sigterm()
    router.wait(50)
    assert router.steps == [(0.0, UNREADY), (5.0, CLOSED)]
    router.open = 0
    router.wait(LOOK_SECONDS * 1.01)
    assert [step for _, step in router.steps] == [UNREADY, CLOSED, EXIT]
    assert router.core.next_deadline() is None


def test_an_idle_router_still_listens_for_the_whole_lag() -> None:
    router = DrainingRouter()
    router.open = 0
    router.sigterm()
    router.wait(4.99)
    assert router.steps == [(0.0, UNREADY)]
    router.wait(1.0)
    assert router.steps[1:] == [(5.0, CLOSED), (5.0, EXIT)]


def test_answers_that_outlast_the_drain_are_ended_and_the_process_soon_after_in_any_case() -> None:
    router = DrainingRouter(drain_seconds=10.0)
    router.sigterm()
    router.wait(100)
    ended = [(at, step) for at, step in router.steps if step in (END, EXIT)]
    assert ended == [(15.0, END), (15.0 + ENDING_SECONDS, EXIT)]
    assert router.warnings == [Note("router.ended_with_work", {"answers": 1}, "warning")]


@pytest.mark.parametrize("after_seconds", [1.0, 20.0], ids=["in the lag", "while draining"])
def test_a_second_sigterm_ends_the_answers_at_once(after_seconds: float) -> None:
    router = DrainingRouter()
    router.sigterm()
    router.wait(after_seconds)
    router.sigterm()
    assert router.steps[-3:] == [(after_seconds, step) for step in (UNREADY, CLOSED, END)]
    router.open = 0
    router.wait(1.0)
    assert router.steps[-1][1] is EXIT


def test_sigint_ends_a_serving_router_at_once_and_later_signals_change_nothing() -> None:
    router = DrainingRouter()
    router.sigint()
    assert router.steps == [(0.0, UNREADY), (0.0, CLOSED), (0.0, END)]
    router.wait(1.0)
    router.sigint()
    router.sigterm()
    router.wait(5.0)
    router.sigint()
    assert router.steps[3:] == [(ENDING_SECONDS, EXIT)]
    assert not router.warnings, "who asks for that knows what it cuts"


def test_every_state_leads_to_the_end() -> None:
    for state in set(RouterDrainState) - TRANSITIONS.ended:
        assert set(TRANSITIONS.rows[state].values()) & {RouterDrainState.ENDING, RouterDrainState.ENDED}
