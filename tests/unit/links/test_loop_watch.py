"""A worker whose loop hangs is lost to its routers until the loop turns again, although its links live."""

from __future__ import annotations

from shared.links.events import PeerUp
from shared.wire.messages import Cancel, Refused
from tests.unit.links.cable import ROUTER, Cable, downs, noted, received

HANG = "the worker's loop has not turned for 5 s"


def turning(seconds: float) -> Cable:
    """A link whose worker's loop has turned for so long, and turns no more."""
    cable = Cable()
    cable.worker.loop_watch.seconds_max = 5.0
    end = cable.now + seconds
    while cable.now < end:
        cable.worker.loop_watch.turned(cable.now)
        cable.run(0.25)
    return cable


def ups(cable: Cable) -> int:
    return sum(isinstance(event, PeerUp) for event in cable.router_saw)


def test_a_loop_that_turns_keeps_its_sessions_however_long() -> None:
    cable = turning(30.0)
    assert (ups(cable), downs(cable.router_saw), downs(cable.worker_saw)) == (1, [], [])
    assert cable.worker_counters.loop_hangs == 0


def test_a_process_that_has_not_begun_to_turn_is_not_judged() -> None:
    cable = Cable()
    cable.worker.loop_watch.seconds_max = 5.0
    cable.run(30.0)
    assert (ups(cable), downs(cable.router_saw)) == (1, [])


def test_a_loop_that_hangs_ends_its_sessions_and_gets_none_until_it_turns() -> None:
    cable = turning(2.0)
    cable.run(4.0)
    assert downs(cable.router_saw) == []
    cable.run(1.5)
    assert downs(cable.router_saw) == [f"closed by the worker: {HANG}"]
    assert downs(cable.worker_saw) == [HANG], "the loop hears of it when it turns again"
    cable.run(30.0)
    assert ups(cable) == 1, "the router dials, and is refused"
    assert cable.worker_counters.loop_hangs == 1
    assert noted(cable.notes).count(("link.loop_hangs", "warning")) == 1
    cable.worker.loop_watch.turned(cable.now)
    cable.run(3.0)
    assert ups(cable) == 2


def test_what_a_loop_says_after_its_hang_goes_nowhere_and_what_it_was_told_before_comes_first() -> None:
    cable = turning(2.0)
    before = cable.last_up(cable.worker_saw).hello.session
    cable.router_sends(Cancel("a", 1))
    cable.run(6.0)
    assert received(cable.worker_saw) == [Cancel("a", 1)]
    cable.worker.loop_watch.turned(cable.now)
    cable.run(3.0)
    assert ups(cable) == 2
    cable.worker.send(ROUTER, before, b"late", cable.now)
    cable.worker_sends(Refused("b", 1, "no_room"))
    cable.run(0.1)
    assert received(cable.router_saw) == [Refused("b", 1, "no_room")]
    assert cable.worker_counters.messages_unsent == 1


def test_a_freeze_of_the_whole_process_is_silence_and_no_hang() -> None:
    cable = turning(2.0)
    cable.run(6.0, worker_frozen=True)
    cable.worker.loop_watch.turned(cable.now)
    cable.run(3.0)
    assert ups(cable) == 2
    assert cable.worker_counters.loop_hangs == 0


def test_a_step_that_takes_long_is_no_hang_while_its_layers_are_computed() -> None:
    cable, layers = turning(2.0), 0
    cable.worker.loop_watch.work_done = lambda: layers
    for _ in range(10):
        cable.run(4.0)
        layers += 1
    cable.run(1.0)
    assert downs(cable.router_saw) == []
    cable.run(6.0)
    assert downs(cable.router_saw) == [f"closed by the worker: {HANG}"]
