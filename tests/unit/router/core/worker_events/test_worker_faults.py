"""An error at any place of the core, while one worker's message is taken, costs that worker its session alone.

`broken_off_at` raises at the n-th line that the core executes for a message, for each n: whatever that line has left
half done, the router lives, its books agree, and the requests of others go on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from router.core.effects import EndSession, RequestCompleted, RequestFailed
from router.core.fleet.prefix_index import BLOCK_TOKENS
from router.core.worker_events import books
from router.core.worker_events.worker_replies import WorkerReplies
from shared.primitives.errors import InvariantError
from shared.wire.messages import Draining, Generated, Joined, Prefilled, Row, Serve
from tests.doubles.breaking import broken_off_at
from tests.unit.router.deployment import LIMITS, ScriptedDeployment, request

LINES_MAX = 2000


def prefilling() -> ScriptedDeployment:
    """`r` and `other` at p0, `third` waits."""
    world = ScriptedDeployment(1, 2, prefilling_per_slot=0.5)
    for rid in ("r", "other", "third"):
        world.submit(request(rid))
    return world


def decoding() -> ScriptedDeployment:
    """`r` and `other` at d0 or d1; `third` still computes."""
    world = prefilling()
    for number, rid in enumerate(("r", "other")):
        world.prefilled("p0", rid, 10)
        world.joined(f"d{number}", rid)
        world.generated(f"d{number}", rid, 1, 11)
    assert world.state("r") == world.state("other") == "decoding"
    return world


def migrating() -> ScriptedDeployment:
    """… and d0 drains, so that `r` is to migrate to d1."""
    world = decoding()
    world.say("d0", Draining())
    return world


def computing() -> ScriptedDeployment:
    """d0 and d1 compute prompts; the output of `r` at d0 fills a block of the prefix index."""
    limits = msgspec.structs.replace(LIMITS, extend_tokens=64)
    world = ScriptedDeployment(0, 0)
    for worker in ("d0", "d1"):
        world.up("decode", worker, limits=limits, understands=("Serve",))
    for rid, worker in (("r", "d0"), ("other", "d1"), ("third", "d0")):
        world.submit(request(rid, (ord(rid[0]),) * (BLOCK_TOKENS - 1)))
        assert world.placed(Serve, rid) == worker
        world.say(worker, Prefilled(rid, 1, 0, (10,), None, None, cached_tokens=0))
    world.generated("d0", "r", 1, 11)
    return world


def knowing() -> ScriptedDeployment:
    """p0 is expected to have the prompt of `r` in its cache."""
    world = ScriptedDeployment(1, 2)
    for rid in ("first", "r", "other", "third"):
        world.submit(request(rid, (1,) * 8 * BLOCK_TOKENS))
        if rid == "first":
            world.prefilled("p0", rid, 10, finish="stop")
    return world


SAID: dict[str, tuple[Callable[[], ScriptedDeployment], str, Callable[[ScriptedDeployment], None]]] = {
    "Prefilled": (prefilling, "p0", lambda world: world.prefilled("p0", "r", 10)),
    "Prefilled, the last": (prefilling, "p0", lambda world: world.prefilled("p0", "r", 10, finish="stop")),
    "Prefilled with a gap": (prefilling, "p0", lambda world: world.prefilled("p0", "r", 10, index=3)),
    "Refused in prefill": (prefilling, "p0", lambda world: world.refused("p0", "r", "no_room")),
    "Joined": (prefilling, "d0", lambda world: world.joined("d0", "r")),
    "Generated": (decoding, "d0", lambda world: world.generated("d0", "r", 2, 12, 13)),
    "Generated with a gap": (decoding, "d0", lambda world: world.generated("d0", "r", 5, 12)),
    "Prefilled with less of a cache": (knowing, "p0", lambda world: world.prefilled("p0", "r", 10)),
    "Finished with a block more": (computing, "d0", lambda world: world.finished("d0", "r", 2)),
    "Finished": (decoding, "d0", lambda world: world.finished("d0", "r", 2)),
    "Refused in decode": (decoding, "d0", lambda world: world.refused("d0", "r", "no_room")),
    "Migrating": (migrating, "d0", lambda world: world.migrating("d0", "r", 2)),
}


@pytest.mark.parametrize("said", SAID)
def test_a_step_that_breaks_off_anywhere_costs_one_worker(said: str) -> None:
    make, peer, say = SAID[said]
    for line in range(1, LINES_MAX):
        world = make()
        if said == "Joined":
            world.prefilled("p0", "r", 10)
        happened = broken_off_at(line, lambda: say(world))  # noqa: B023
        books.check(world.core._requests, world.core.fleet)
        if not happened:
            break
        assert world.core.counters.worker_faults.total() == 1
        assert [each.peer for each in world.effects if isinstance(each, EndSession)] == [peer]
        assert peer not in world.core.fleet.workers
        outcome = world.outcome("r")
        assert outcome is None or isinstance(outcome, RequestCompleted | RequestFailed), line
        assert world.outcome("other") is None
        assert world.outcome("third") is None
        for rid in ("r", "other", "third"):
            world.cancel(rid)
        world.assert_nothing_left()
        _assert_no_prefix_is_left(world)
    else:
        pytest.fail("it never ended by itself")
    assert line > 20, "nothing was broken off"


def _assert_no_prefix_is_left(world: ScriptedDeployment) -> None:
    """When the workers are gone nothing is known of what any had."""
    for worker in list(world.core.fleet.workers):
        world.down(worker)
    prefixes = world.core.fleet.prefixes
    assert (prefixes._workers, prefixes._peers, prefixes._holders) == ({}, {}, {})


def test_only_the_request_of_the_message_ends_and_all_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two streams at one worker: the message is about the second of its rows."""
    world = ScriptedDeployment(1, 1)
    for rid in ("r", "s"):
        world.submit(request(rid))
        world.prefilled("p0", rid, 10)
        world.joined("d0", rid)
    generate = WorkerReplies._generated

    def fail_at_s(self: WorkerReplies, live: Any, *rest: Any) -> None:
        generate(self, live, *rest)
        if live.rid == "s":
            raise OverflowError("a number that nobody has bounded")

    monkeypatch.setattr(WorkerReplies, "_generated", fail_at_s)
    world.say("d0", Generated((Row("r", 1, 1, (11,)), Row("s", 1, 1, (11,)))))
    monkeypatch.undo()
    failed = world.outcome("s")
    assert isinstance(failed, RequestFailed)
    assert (failed.status, failed.code) == (500, "worker_failed")
    assert world.output("r") == [10, 11]
    (note,) = world.notes("fleet.worker_failed")
    assert note.fields["message"] == "Generated"
    assert "OverflowError at test_worker_faults.py" in str(note.fields["reason"])
    world.up("decode", "d1")
    world.prefilled("p0", "r", 12, attempt=2, index=2)
    world.joined("d1", "r", 2)
    world.finished("d1", "r", 3, 2)
    assert isinstance(world.outcome("r"), RequestCompleted)
    world.assert_nothing_left()


def test_what_a_dropped_worker_still_says_is_passed_over() -> None:
    world = decoding()
    broken_off_at(20, lambda: world.generated("d0", "r", 2, 12))
    world.generated("d0", "r", 3, 13)
    assert world.core.counters.dropped_messages["unknown_worker"] == 1


def test_books_that_still_disagree_end_the_process() -> None:
    world = decoding()
    world.core._requests.live["other"].worker = None
    with pytest.raises(InvariantError, match="other is decoding"):
        broken_off_at(20, lambda: world.generated("d0", "r", 2, 12))


@pytest.mark.parametrize("speed", [math.inf, math.nan])
def test_an_infinite_number_that_came_past_the_links_ends_no_router(speed: float) -> None:
    world = ScriptedDeployment()
    world.submit(request("r"))
    world.prefilled("p0", "r", 10)
    world.say("d0", Joined("r", 1, 64, 0, 0.01, "tcp/eth0", speed))
    world.finished("d0", "r", 1)
    assert isinstance(world.outcome("r"), RequestFailed)
    assert "d0" not in world.core.fleet.workers
    world.assert_nothing_left()
