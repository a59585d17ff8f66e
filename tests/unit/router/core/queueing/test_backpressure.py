"""What may stand in front of decode, and who is refused at once: by rates, and never so that a fleet is shut."""

from __future__ import annotations

import pytest

from router.core.effects import RequestFailed
from router.core.queueing.backpressure import RATES_MAX
from shared.wire.messages import Decode, Limits, Prefill
from tests.unit.router.deployment import ScriptedDeployment, request

ROOMY = Limits(context_len=4096, page_size=16, pages=4096, slots=1000, vocab_size=1000)


class Overload(ScriptedDeployment):
    """Prefill computes at once, decode takes one request each `seconds`, and more come than that."""

    def __init__(self, decode: int = 1, **settings: object):
        super().__init__(1, decode, limits=ROOMY, **({"waiting_seconds_max": 10.0} | settings))
        self.numbers = iter(range(10_000))
        self.decodes = decode
        for number in range(decode):
            self.loaded(f"d{number}", slots_free=0)
        self.loaded("p0", slots_free=1000, free_pages=4096)

    def come(self, count: int, tenant: str = "") -> list[str]:
        rids = [f"r{next(self.numbers)}" for _ in range(count)]
        for rid in rids:
            self.submit(request(rid, tenant=tenant))
        self.compute()
        return rids

    def compute(self) -> None:
        """Prefill answers whatever it has."""
        while assigned := list(self.core.fleet.workers["p0"].assigned):
            for rid in assigned:
                self.prefilled("p0", rid, 10)

    def serve(self, seconds: float, *, per_second: int, arrivals: int = 0, tenant: str = "") -> None:
        """Decode takes so many a second, and `arrivals` come meanwhile for each that is taken."""
        for _ in range(round(seconds * per_second)):
            self.wait(1 / per_second)
            self.come(arrivals, tenant)
            self.loaded("d0", slots_free=1, free_pages=4096)
            self.compute()

    def take_nothing(self, seconds: float) -> None:
        self.wait(seconds)
        self.loaded("d0", slots_free=0)

    @property
    def before_decode(self) -> int:
        states = self.core.requests_by_state
        return states["prefilling"] + states["ready"]

    def refusal(self, rid: str) -> RequestFailed | None:
        outcome = self.outcome(rid)
        return outcome if isinstance(outcome, RequestFailed) else None


def test_one_that_fills_the_lane_before_decode_keeps_no_other_tenant_out() -> None:
    world = Overload(ready_seconds=0.5, waiting_seconds_max=100.0)
    world.come(40, "greedy")
    world.serve(20.0, per_second=1, arrivals=1, tenant="greedy")
    (more,) = world.come(1, "greedy")
    (newcomer,) = world.come(1, "newcomer")
    assert (world.state(more), world.state(newcomer)) == ("waiting", "ready")
    (second,) = world.come(1, "newcomer")
    assert world.state(second) == "waiting", "the kv_group is full for one that has something there"


def test_no_more_is_computed_than_decode_takes_in_ready_seconds() -> None:
    world = Overload(ready_seconds=2.0)
    world.come(10)
    world.serve(10.0, per_second=10, arrivals=2)
    assert world.core.requests_by_state["waiting"] > 50
    assert 14 <= world.before_decode <= 16, "three quarters of it: the rest is for when decode takes less"


def test_decode_that_takes_nothing_leaves_some_in_front_of_it_and_goes_on_when_it_takes_again() -> None:
    world = Overload(decode=3, ready_seconds=0.5, waiting_seconds_max=100.0)
    world.come(3)
    world.take_nothing(5.0)
    more = world.come(20)
    assert world.before_decode == 3
    world.loaded("d0", slots_free=1000, free_pages=4096)
    world.compute()
    assert all(world.placed(Decode, rid) for rid in more)


def test_a_burst_is_computed_whole_while_no_rate_is_known() -> None:
    world = Overload()
    burst = world.come(100)
    assert all(world.placed(Prefill, rid) for rid in burst)


def test_a_new_request_that_would_wait_too_long_is_refused_at_once_with_429() -> None:
    world = Overload()
    world.come(10)
    world.serve(30.0, per_second=10, arrivals=2)
    late = world.come(10)[-1]
    refused = world.refusal(late)
    assert refused is not None
    assert (refused.status, refused.code) == (429, "wait_too_long")
    assert refused.retry_after_seconds is not None
    assert refused.retry_after_seconds >= 1.0
    assert not world.core.counters.requests["503"]


def test_a_tenant_whose_turn_is_next_is_not_refused_for_the_line_of_another() -> None:
    world = Overload()
    world.come(10, tenant="greedy")
    world.serve(30.0, per_second=10, arrivals=2, tenant="greedy")
    late, (modest,) = world.come(10, "greedy")[-1], world.come(1, "modest")
    assert world.refusal(late) is not None
    assert world.refusal(modest) is None


def test_a_fleet_whose_rate_was_nothing_still_lets_some_wait() -> None:
    world = Overload(ready_seconds=0.5, waiting_seconds_max=10.0)
    world.come(5)
    world.take_nothing(11.0)
    world.serve(2.0, per_second=1)
    rids = world.come(6)
    assert [world.refusal(rid) is None for rid in rids[:3]] == [True] * 3


def test_without_a_worker_nobody_is_refused_by_a_rate_of_before() -> None:
    world = Overload()
    world.come(10)
    world.serve(30.0, per_second=10, arrivals=2)
    world.down("d0")
    (late,) = world.come(1)
    assert world.refusal(late) is None


def test_a_lane_that_is_stuck_does_not_hold_up_the_workers_of_another() -> None:
    world = Overload()
    world.come(30)
    world.take_nothing(5.0)
    world.up("prefill", "p1", limits=ROOMY, model="newer")
    world.up("decode", "d1", limits=ROOMY, model="newer")
    (late,) = world.come(1)
    assert world.placed(Prefill, late) == "p1"


def test_the_rates_that_are_kept_are_bounded() -> None:
    world = Overload()
    for number in range(RATES_MAX + 5):
        model = f"model-{number}"
        world.up("prefill", f"p-{number}", model_name=model, model=model)
        world.up("decode", f"d-{number}", model_name=model, model=model)
        world.loaded(f"p-{number}", accepting=False)
        world.submit(request(f"stuck-{number}", model=model))
    assert len(world.core._backpressure._model_queues) == RATES_MAX


def test_a_lull_of_decode_makes_no_stream_late_and_does_not_shut_the_lane() -> None:
    """With all that decode takes in `ready_seconds` in front of it, each lull would shut the lane until all went."""
    world = Overload(ready_seconds=2.0, waiting_seconds_max=100.0)
    world.come(60)
    world.serve(10.0, per_second=10, arrivals=1)
    waiting = world.core.requests_by_state["waiting"]
    world.take_nothing(0.4)
    assert not world.core._backpressure.late_lanes(world.now)
    world.serve(3.0, per_second=10)
    assert world.core.requests_by_state["waiting"] == pytest.approx(waiting - 30, abs=4)


# ---- while a stream is late ----


def full_decode(*rids: str, decode: int = 1) -> ScriptedDeployment:
    """Decode has no slot free, and these streams wait for one, each with its first token."""
    world = ScriptedDeployment(1, decode, limits=ROOMY, ready_seconds=2.0)
    for number in range(decode):
        world.loaded(f"d{number}", slots_free=0)
    for rid in rids:
        world.submit(request(rid))
        world.prefilled(str(world.placed(Prefill, rid)), rid, 10)
    return world


def test_while_a_stream_is_late_nothing_new_is_begun() -> None:
    world = full_decode("late")
    world.wait(1.9)
    world.submit(request("soon"))
    world.wait(0.2)
    world.submit(request("new"))
    assert [world.state(rid) for rid in ("late", "soon", "new")] == ["ready", "prefilling", "waiting"]
    world.loaded("d0", slots_free=1)
    assert [world.state(rid) for rid in ("late", "soon", "new")] == ["decoding", "prefilling", "prefilling"]


def test_a_stream_is_late_although_a_worker_has_refused_it_meanwhile() -> None:
    world = full_decode("late")
    for _ in range(3):
        world.loaded("d0", slots_free=1)
        world.loaded("d0", slots_free=0)
        world.refused("d0", "late", "no_room")
        world.wait(0.9)
    world.submit(request("new"))
    assert (world.state("late"), world.state("new")) == ("ready", "waiting")


def test_a_late_stream_holds_up_neither_another_tenant_nor_a_stream_that_was_cut() -> None:
    world = full_decode("late", "cut")
    world.loaded("d0", slots_free=1)
    cut, late = sorted(("cut", "late"), key=lambda rid: world.state(rid) == "ready")
    world.joined("d0", cut)
    world.loaded("d0", slots_free=0)
    world.wait(2.1)
    world.submit(request("newcomer", tenant="another"))
    world.refused("d0", cut, "stale")  # it was returned for lack of memory
    assert world.state(late) == "ready"
    assert (world.state("newcomer"), world.state(cut)) == ("prefilling", "prefilling")
    world.submit(request("second", tenant="another"))
    assert world.state("second") == "waiting"


def test_a_late_stream_holds_up_its_own_kv_group_alone() -> None:
    world = full_decode("late")
    world.wait(2.1)
    world.up("prefill", "p2", limits=ROOMY, model="newer")
    world.up("decode", "d1", limits=ROOMY, model="newer")
    world.submit(request("new"))
    assert world.placed(Prefill, "new") == "p2"


def test_a_late_stream_bars_no_tenant_for_what_it_has_begun_of_another_model() -> None:
    world = full_decode("late")
    world.wait(2.1)
    world.up("prefill", "p2", limits=ROOMY, model_name="other", model="newer")
    world.up("decode", "d1", limits=ROOMY, model_name="other", model="newer")
    for rid, model in (("elsewhere", "other"), ("here", "m"), ("second", "m")):
        world.submit(request(rid, model=model, tenant="another"))
    assert [world.state(rid) for rid in ("elsewhere", "here", "second")] == [
        "prefilling",
        "prefilling",
        "waiting",
    ]


def test_a_stream_that_decode_cannot_fetch_holds_nobody_up() -> None:
    world = full_decode("unread", decode=2)
    world.loaded("d0", slots_free=1)
    world.refused("d0", "unread", "unreachable")
    world.wait(2.1)
    world.submit(request("new"))
    assert (world.state("unread"), world.state("new")) == ("ready", "prefilling")


def test_what_has_waited_for_a_late_stream_is_not_begun_all_at_once() -> None:
    world = Overload(ready_seconds=2.0, waiting_seconds_max=100.0)
    world.come(10)
    world.serve(10.0, per_second=4, arrivals=1)
    assert 4 <= world.before_decode <= 10
    world.take_nothing(4.0)
    rids = world.come(50)
    world.loaded("d0", slots_free=world.before_decode, free_pages=4096)  # all that stand there go on
    begun = sum(world.placed(Prefill, rid) is not None for rid in rids)
    assert 0 < begun <= 10
    world.compute()
    world.wait(8.1)
    world.loaded("d0", slots_free=1000, free_pages=4096)
    world.compute()
    assert all(world.placed(Prefill, rid) for rid in rids)
