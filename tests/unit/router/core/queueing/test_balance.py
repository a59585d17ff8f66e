"""Streams leave a decode worker that is about to retract some, for one that has room; and do not come back."""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType

import msgspec

from router.core.queueing.balance import (
    BACK_SECONDS,
    MOVES,
    MOVES_AT_A_TIME,
    SMALLER_TRIES,
    TRIES_AT_A_TIME,
    Balance,
)
from router.core.requests.lifecycle import RequestState
from router.core.requests.live_request import VISITS_MAX
from shared.wire.messages import Decode, Draining, Limits, Load, Migrate
from tests.unit.router.deployment import ScriptedDeployment, hello, request

LIMITS = Limits(context_len=4096, page_size=16, pages=512, slots=16, vocab_size=1000)
TIGHT = 7  # pages: less than the 64 steps of two requests take


def two_streams(decode: int = 2, streams: int = 2, **settings: object) -> ScriptedDeployment:
    """Streams of a hundred tokens at d0, which has few pages left; the other decode workers have nothing."""
    settings = {"decode_policy": "total_requests", "tenant_share_max": 1.0, **settings}
    world = ScriptedDeployment(1, 1, limits=LIMITS, **settings)
    for number in range(streams):
        rid = f"r{number}"
        world.submit(request(rid, tuple(range(1, 101)), max_new_tokens=400))
        world.prefilled("p0", rid, 10)
        world.joined("d0", rid)
        world.generated("d0", rid, 1, *range(11, 11 + streams - number))  # the last has least output
    for number in range(1, decode):
        world.up("decode", f"d{number}", limits=LIMITS)
        world.loaded(f"d{number}", free_pages=LIMITS.pages, slots_free=LIMITS.slots)
    return world


def is_tight(world: ScriptedDeployment, uid: str, running: int = 2, **told: object) -> None:
    fields: dict[str, object] = {"running": running, "running_tokens": 120 * running, "free_pages": TIGHT}
    world.loaded(uid, slots_free=LIMITS.slots - running, **fields | told)


def moved_to_the_other() -> ScriptedDeployment:
    """One of two streams has left d0 for d1, and now d0 has room."""
    world = two_streams()
    is_tight(world, "d0")
    world.migrating("d0", "r1", 2)
    world.joined("d1", "r1")
    world.generated("d1", "r1", 2, 12)
    world.loaded("d0", free_pages=LIMITS.pages, slots_free=LIMITS.slots)
    return world


def moved(world: ScriptedDeployment) -> list[str]:
    return [f"{message.rid} from {peer}" for peer, message in world.sent(Migrate)]


def test_the_youngest_stream_leaves_before_any_is_retracted() -> None:
    world = two_streams()
    is_tight(world, "d0", free_pages=8)
    assert moved(world) == []
    is_tight(world, "d0")
    assert moved(world) == ["r1 from d0"]
    world.migrating("d0", "r1", 2)
    assert world.placed(Decode, "r1") == "d1"
    world.joined("d1", "r1")
    world.generated("d1", "r1", 2, 12)
    assert +world.core.counters.migrations == Counter({("migrated", "balance"): 1})


def test_a_worker_that_has_retracted_a_request_is_relieved_although_it_has_free_pages() -> None:
    world = two_streams(streams=3)
    is_tight(world, "d0", free_pages=100, accepting=False, queued=1)
    assert moved(world) == ["r2 from d0"]


def test_what_a_worker_keeps_for_other_tenants_is_not_for_streams() -> None:
    world = two_streams(tenant_share_max=0.9)  # it keeps 51 of 512 pages, and retracts before it takes them
    is_tight(world, "d0", free_pages=51 + 8)
    assert moved(world) == []
    is_tight(world, "d0", free_pages=51 + 7)
    assert moved(world) == ["r1 from d0"], "it would retract, although more pages are free than streams take"
    world = two_streams(tenant_share_max=0.9)
    is_tight(world, "d1", free_pages=51 + 25)
    is_tight(world, "d0", free_pages=0)
    assert moved(world) == [], (
        "seven pages, of half of what is left beside three streams and those that are kept"
    )
    is_tight(world, "d1", free_pages=51 + 26)
    assert moved(world) == ["r1 from d0"]


def test_nobody_leaves_for_a_worker_that_would_be_as_full() -> None:
    world = two_streams()
    is_tight(world, "d1", free_pages=60)
    is_tight(world, "d0")
    assert moved(world) == ["r1 from d0"], "60 pages are enough"
    world = two_streams()
    is_tight(world, "d1", free_pages=40)
    is_tight(world, "d0")
    assert moved(world) == []


def test_where_balance_is_off_and_where_one_stream_is_alone_nobody_moves() -> None:
    world = two_streams(balance_steps=0)
    is_tight(world, "d0")
    alone = two_streams(streams=1)
    is_tight(alone, "d0", running=1, free_pages=0)
    assert moved(world) + moved(alone) == []


def test_no_more_leave_at_a_time_than_are_lacking() -> None:
    world = two_streams(streams=8)
    is_tight(world, "d0", running=8, free_pages=31)
    assert len(moved(world)) == 1, "one page is lacking"
    is_tight(world, "d0", running=8, free_pages=0)
    assert len(moved(world)) == MOVES_AT_A_TIME


def test_where_the_youngest_find_no_room_a_small_one_leaves() -> None:
    large, small = TRIES_AT_A_TIME + 3, 2
    limits = msgspec.structs.replace(LIMITS, slots=32)
    world = ScriptedDeployment(1, 1, limits=limits, decode_policy="total_requests")
    for number in range(small + large):
        rid = f"r{number}"
        world.submit(request(rid, tuple(range(1, 21 if number < small else 321)), max_new_tokens=400))
        world.prefilled("p0", rid, 10)
        world.joined("d0", rid)
        world.generated("d0", rid, 1, *range(11, 41 - number))
    for uid, free_pages, slots_free in (("d1", 45, 32), ("d2", 512, 0)):
        world.up("decode", uid, limits=limits)
        world.loaded(uid, free_pages=free_pages, slots_free=slots_free)
    world.loaded("d0", free_pages=0, running=small + large, slots_free=32 - small - large)
    assert moved(world) == ["r1 from d0", "r0 from d0"], "the large ones fit d2 alone, which has no slot"


def test_a_stream_is_not_passed_to_and_fro() -> None:
    world = two_streams(decode=4)
    at = "d0"
    for number in range(MOVES + 1):
        other = next(uid for uid in ("d1", "d2", "d3", "d0") if uid != at)
        for uid in {"d0", "d1", "d2", "d3"} - {at, other}:
            world.loaded(uid, slots_free=0)
        world.loaded(other, free_pages=LIMITS.pages, slots_free=LIMITS.slots)
        is_tight(world, at)
        of_youngest = [each for each in moved(world) if each.startswith("r1")]
        if number == MOVES:
            assert len(of_youngest) == MOVES, "it has moved often enough"
            return
        assert of_youngest[-1] == f"r1 from {at}"
        world.migrating(at, "r1", 2 + number)
        assert world.placed(Decode, "r1") == other != at
        world.joined(other, "r1")
        world.generated(other, "r1", 2 + number, 20)
        at = other


def test_a_stream_does_not_return_for_half_a_minute_unless_its_worker_drains() -> None:
    world = moved_to_the_other()
    is_tight(world, "d1")
    assert moved(world) == ["r1 from d0"]
    world.wait(BACK_SECONDS)
    world.generated("d1", "r1", 3, 13)
    is_tight(world, "d1")
    assert moved(world) == ["r1 from d0", "r1 from d1"]


def test_workers_that_pass_a_stream_on_again_and_again_make_nothing_grow() -> None:
    world = moved_to_the_other()
    live = world.core._requests.live["r1"]
    for _ in range(2 * VISITS_MAX):
        world.migrating(world.placed(Decode, "r1") or "", "r1", 3)
        world.joined(world.placed(Decode, "r1") or "", "r1")
    assert len(live.moved_from) == len(live.visits) == VISITS_MAX


def test_a_stream_goes_back_at_once_where_its_worker_drains() -> None:
    world = moved_to_the_other()
    world.say("d1", Draining())
    assert moved(world) == ["r1 from d0", "r1 from d1"]


def test_a_stream_that_was_moved_does_not_keep_the_last_workers_from_their_ends() -> None:
    world = two_streams()
    is_tight(world, "d0")
    world.loaded("d1", slots_free=0)
    world.migrating("d0", "r1", 2)
    world.loaded("d0", slots_free=0)
    assert world.state("r1") == "ready"
    world.say("d1", Draining())
    assert world.state("r1") == "ready"
    world.say("d0", Draining())
    assert world.state("r1") != "ready"
    assert world.core.counters.continuations["holder_drains"] == 1


def test_a_stream_that_moves_waits_for_no_worker_that_drains() -> None:
    world = two_streams()
    is_tight(world, "d0")
    world.loaded("d1", slots_free=0)
    world.migrating("d0", "r1", 2)
    assert world.state("r1") == "ready"
    world.say("d1", Draining())
    assert world.state("r1") == "decoding", "its pages are at d0"
    assert not world.core.counters.continuations.total()


def test_the_loss_of_a_worker_to_which_a_stream_went_back_is_one_loss() -> None:
    for losses_max, state, losses in ((1, "failed", 1), (2, "waiting", 1)):
        world = two_streams(losses_max=losses_max)
        is_tight(world, "d0")
        world.loaded("d1", slots_free=0)
        world.migrating("d0", "r1", 2)
        world.say("d1", Draining())
        live = world.core._requests.live["r1"]
        assert live.worker is live.holder is world.core.fleet.workers["d0"], "it reads its own pages"
        world.down("d0")
        assert (live.state.value, live.losses) == (state, losses)
        assert not world.core.counters.worker_faults.total()


def test_a_stream_returns_at_once_for_another_cause_than_balance() -> None:
    world = moved_to_the_other()
    world.up("decode", "d2", limits=LIMITS)
    world.loaded("d2", slots_free=0)
    world.say("d1", Draining())
    world.migrating("d1", "r1", 3)
    assert world.placed(Decode, "r1") == "d0", "and does not wait for d2"


STREAMS, WORKERS = 256, 64
CALLS_PER_STREAM = 9  # of Python functions, in a pass over all of them


class PassAtItsWorst:
    """One pass over 64 pressed workers full of streams, and 64 others."""

    calls = 0  # of functions
    tries = 0  # of streams to find a place for

    def __init__(self, room: int, slots: int = STREAMS, *, alike: bool = True) -> None:
        limits = Limits(context_len=4096, page_size=16, pages=4096, slots=STREAMS, vocab_size=1000)
        core = ScriptedDeployment(0, 0, limits=limits).core
        for number in range(2 * WORKERS):
            worker = core.fleet.up(f"d{number}", hello("decode", f"d{number}", limits=limits))
            assert not isinstance(worker, str)
            if number >= WORKERS:
                worker.report(Load(free_pages=room, slots_free=slots, running=1, running_tokens=16))
                continue
            for stream in range(STREAMS):
                rid, tokens = f"r{number}.{stream}", 100 if alike else 100 + 16 * (STREAMS - stream)
                each = core._requests.admit(request(rid, tuple(range(tokens)), 400), 0.0)
                core._reservations.dequeue(each)
                each.state, each.joined, each.worker = RequestState.DECODING, True, worker
                each.output.extend(range(stream % 50))
                worker.assign(rid, tokens, 7)
            worker.report(Load(free_pages=0, running=STREAMS, running_tokens=100 * STREAMS))
        sys.setprofile(self._count)
        try:
            core._migrations.rebalance(0.0)
        finally:
            sys.setprofile(None)
        self.asked = sum(each.target is not None for each in core._requests.live.values())

    def _count(self, frame: FrameType, event: str, _argument: object) -> None:
        self.calls += event == "call"
        self.tries += event == "call" and frame.f_code is Balance.place.__code__


def test_a_pass_at_its_worst_costs_a_few_calls_a_stream() -> None:
    worst = PassAtItsWorst(room=5)
    assert worst.asked == 0
    assert worst.calls < STREAMS * WORKERS, "nobody has room for any"
    worst = PassAtItsWorst(room=4096)
    assert worst.asked == MOVES_AT_A_TIME * WORKERS
    assert worst.calls < CALLS_PER_STREAM * STREAMS * WORKERS


def test_where_nobody_has_a_slot_few_streams_are_tried() -> None:
    for alike, tries in ((True, TRIES_AT_A_TIME), (False, TRIES_AT_A_TIME + SMALLER_TRIES)):
        worst = PassAtItsWorst(room=4096, slots=0, alike=alike)
        assert (worst.asked, worst.tries) == (0, tries * WORKERS)
