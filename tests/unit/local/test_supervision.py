"""Supervision: a crash is answered with another start, a child that cannot start with the end."""

from __future__ import annotations

from shared.local.supervision import BACKOFF_SECONDS_MAX, STABLE_SECONDS, GiveUp, RestartPolicy, StartAgain


def ready_child(now: float = 0.0) -> RestartPolicy:
    supervision = RestartPolicy(["decode-0"])
    supervision.started("decode-0", now)
    supervision.became_ready("decode-0")
    return supervision


def test_all_are_due_at_first_and_none_twice() -> None:
    supervision = RestartPolicy(["router", "decode-0"])
    assert supervision.due(0.0) == ["router", "decode-0"]
    supervision.started("router", 0.0)
    assert supervision.due(0.0) == ["decode-0"]


def test_the_set_is_ready_when_each_is() -> None:
    supervision = RestartPolicy(["router", "decode-0"])
    supervision.became_ready("router")
    assert not supervision.all_ready()
    supervision.became_ready("decode-0")
    assert supervision.all_ready()


def test_a_child_that_fails_before_it_was_ready_ends_the_deployment() -> None:
    supervision = RestartPolicy(["decode-0"])
    supervision.started("decode-0", 0.0)
    assert supervision.ended("decode-0", 1, 3.0) == GiveUp()


def test_a_child_killed_while_loading_is_started_again() -> None:
    supervision = RestartPolicy(["decode-0"])
    supervision.started("decode-0", 0.0)
    assert isinstance(supervision.ended("decode-0", -9, 3.0), StartAgain)


def test_a_child_that_was_ready_once_is_always_started_again_after_a_pause() -> None:
    supervision = ready_child()
    assert supervision.ended("decode-0", -9, 100.0) == StartAgain(0.5)
    assert not supervision.all_ready()
    assert supervision.due(100.4) == []
    assert supervision.due(100.5) == ["decode-0"]
    supervision.started("decode-0", 100.5)
    assert isinstance(supervision.ended("decode-0", 1, 101.0), StartAgain)


def test_quick_deaths_double_the_pause_up_to_a_bound_and_a_long_life_resets_it() -> None:
    supervision, now, pauses = ready_child(), 0.0, []
    for _ in range(50):
        verdict = supervision.ended("decode-0", -9, now + 1.0)
        assert isinstance(verdict, StartAgain)
        pauses.append(verdict.seconds)
        now += 1.0 + verdict.seconds
        supervision.started("decode-0", now)
    assert pauses[:4] == [0.5, 1.0, 2.0, 4.0]
    assert max(pauses) == pauses[-1] == BACKOFF_SECONDS_MAX
    assert supervision.ended("decode-0", -9, now + STABLE_SECONDS) == StartAgain(0.5)
