"""A child that crashes is started again; a child that cannot start ends the deployment."""

from __future__ import annotations

from shared.local.restart_policy import BACKOFF_SECONDS_MAX, STABLE_SECONDS, GiveUp, Restart, RestartPolicy


def ready_child(now: float = 0.0) -> RestartPolicy:
    policy = RestartPolicy(["decode-0"])
    policy.started("decode-0", now)
    policy.became_ready("decode-0")
    return policy


def test_all_are_due_at_first_and_none_twice() -> None:
    policy = RestartPolicy(["router", "decode-0"])
    assert policy.due(0.0) == ["router", "decode-0"]
    policy.started("router", 0.0)
    assert policy.due(0.0) == ["decode-0"]


def test_the_set_is_ready_when_each_is() -> None:
    policy = RestartPolicy(["router", "decode-0"])
    policy.became_ready("router")
    assert not policy.all_ready()
    policy.became_ready("decode-0")
    assert policy.all_ready()


def test_a_child_that_fails_before_it_was_ready_ends_the_deployment() -> None:
    policy = RestartPolicy(["decode-0"])
    policy.started("decode-0", 0.0)
    assert policy.ended("decode-0", 1, 3.0) == GiveUp()


def test_a_child_killed_while_loading_is_started_again() -> None:
    policy = RestartPolicy(["decode-0"])
    policy.started("decode-0", 0.0)
    assert isinstance(policy.ended("decode-0", -9, 3.0), Restart)


def test_a_child_that_was_ready_once_is_always_started_again_after_a_pause() -> None:
    policy = ready_child()
    assert policy.ended("decode-0", -9, 100.0) == Restart(0.5)
    assert not policy.all_ready()
    assert policy.due(100.4) == []
    assert policy.due(100.5) == ["decode-0"]
    policy.started("decode-0", 100.5)
    assert isinstance(policy.ended("decode-0", 1, 101.0), Restart)


def test_quick_ends_double_the_pause_up_to_a_bound_and_a_long_life_resets_it() -> None:
    policy, now, pauses = ready_child(), 0.0, []
    for _ in range(50):
        verdict = policy.ended("decode-0", -9, now + 1.0)
        assert isinstance(verdict, Restart)
        pauses.append(verdict.seconds)
        now += 1.0 + verdict.seconds
        policy.started("decode-0", now)
    assert pauses[:4] == [0.5, 1.0, 2.0, 4.0]
    assert max(pauses) == pauses[-1] == BACKOFF_SECONDS_MAX
    assert policy.ended("decode-0", -9, now + STABLE_SECONDS) == Restart(0.5)
