"""What the router remembers of workers and models, and for how long."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.effects import FleetPaired
from router.core.fleet.assignments import AssignedTotals
from router.core.fleet.prefix_index import PrefixIndex
from router.core.fleet.worker import Worker
from router.core.fleet.workers import MODELS_MAX, Fleet
from router.placement_policies import LocalPrefill, Serving
from shared.batch.effects import Note
from shared.wire.messages import WORKER_ROLES, Draining, Limits, Load, Prefill, Role
from tests.doubles.novelty import Novelty
from tests.unit.router.deployment import ScriptedDeployment, hello, request


def test_a_model_is_known_before_its_first_worker_and_after_its_last() -> None:
    fleet = Fleet(PrefixIndex(16), ("named",))
    assert "named" in fleet.models
    fleet.up("p", hello("prefill", "p", model_name="announced"))
    fleet.down("p")
    assert fleet.models == ("named", "announced")


def test_names_of_gone_models_are_bounded_and_the_configured_one_stays() -> None:
    fleet = Fleet(PrefixIndex(16), ("named",))
    for number in range(2 * MODELS_MAX):
        fleet.up(f"p{number}", hello("prefill", f"p{number}", model_name=f"m{number}"))
        fleet.down(f"p{number}")
    assert len(fleet.models) <= MODELS_MAX + 1
    assert fleet.models[0] == "named"


def test_context_is_what_the_largest_worker_of_each_role_serves() -> None:
    fleet = Fleet(PrefixIndex(16))
    assert fleet.context_len("m") is None
    fleet.up("p", hello("prefill", "p", limits=Limits(4096, 16, 10, 4, 100)))
    fleet.up("d0", hello("decode", "d0", limits=Limits(4096, 16, 20, 4, 100)))
    fleet.up("d1", hello("decode", "d1", limits=Limits(4096, 16, 60, 4, 100)))
    assert fleet.context_len("m") == 960, "a decode pool must hold all of a request"
    assert fleet.prompt_len_max("m") == 160, "a prefill pool only its prompt"


def test_a_router_is_no_worker() -> None:
    assert Fleet(PrefixIndex(16)).up("r", hello("router", "r")) == "role"


def test_a_worker_cannot_be_given_the_same_request_twice() -> None:
    fleet = Fleet(PrefixIndex(16))
    fleet.up("d", hello("decode", "d"))
    (worker,) = fleet.of_role("decode")
    worker.assign("r", 1, 1)
    with pytest.raises(AssertionError, match="r"):
        worker.assign("r", 1, 1)


def test_a_worker_understands_the_protocol_and_what_its_hello_lists() -> None:
    fleet = Fleet(PrefixIndex(16))
    fleet.up("old", hello("decode", "old"))
    fleet.up("new", hello("decode", "new", understands=("Novelty",)))
    assert [worker.understands(Novelty) for worker in fleet.workers.values()] == [False, True]
    assert all(worker.understands(Draining) for worker in fleet.workers.values())


def test_a_worker_that_is_down_says_so_itself() -> None:
    fleet = Fleet(PrefixIndex(16))
    fleet.up("d", hello("decode", "d"))
    (worker,) = fleet.of_role("decode")
    assert fleet.down("d") is worker
    assert not worker.up
    assert fleet.down("d") is None


def test_the_sums_over_assignments_are_those_of_the_assignments() -> None:
    fleet = Fleet(PrefixIndex(16))
    fleet.up("d", hello("decode", "d"))
    (worker,) = fleet.of_role("decode")
    worker.assign("a", 100, 7)
    worker.report(Load(running=1, running_tokens=90, free_pages=505, slots_free=3))
    worker.assign("b", 20, 2)
    assert (worker.own, worker.unreported) == (AssignedTotals(2, 120, 9), AssignedTotals(1, 20, 2))
    worker.unassign("a")
    assert (worker.own, worker.unreported) == (AssignedTotals(1, 20, 2), AssignedTotals(1, 20, 2))
    worker.unassign("b")
    assert worker.own == worker.unreported == AssignedTotals()


def test_what_has_ended_since_a_worker_told_of_it_is_no_load_and_no_room() -> None:
    fleet = Fleet(PrefixIndex(16))
    fleet.up("d", hello("decode", "d"))
    (worker,) = fleet.of_role("decode")
    worker.assign("a", 100, 7)
    worker.assign("b", 50, 4)
    worker.report(Load(running=3, running_tokens=190, free_pages=3, slots_free=0))  # one is another router's
    worker.unassign("a")
    worker.assign("c", 20, 2)
    assert (worker.requests, worker.tokens) == (3, 110)
    assert not worker.has_room(1, "", 1.0, 0.0)
    worker.report(Load(running=3, running_tokens=115, free_pages=9, slots_free=1))
    assert (worker.requests, worker.tokens) == (3, 115)


def test_a_worker_is_empty_only_by_its_own_word() -> None:
    fleet = Fleet(PrefixIndex(16))
    fleet.up("d", hello("decode", "d"))
    (worker,) = fleet.of_role("decode")
    assert worker.pages_found("tenant", 2.0) == 512
    worker.assign("a", 100, 7)
    worker.report(Load(running=1, running_tokens=100, free_pages=9, pages_for_new=5))
    worker.unassign("a")
    assert worker.pages_found("tenant", 2.0) < 512


def test_a_prompt_goes_where_it_was_just_computed_before_the_worker_tells_that_it_is_idle() -> None:
    world = ScriptedDeployment(prefill=2, decode=1)
    prompt = tuple(range(200))
    world.submit(request("a", prompt, max_new_tokens=1))
    holder = world.placed(Prefill, "a")
    assert holder is not None
    world.loaded(holder, queued_tokens=200, running=1, running_tokens=200)
    world.prefilled(holder, "a", 7, finish="length")
    world.submit(request("b", prompt, max_new_tokens=1))
    assert world.placed(Prefill, "b") == holder


def test_a_role_without_workers_is_logged_once_and_so_is_its_return() -> None:
    world = ScriptedDeployment(prefill=0, decode=0)
    assert world.core.fleet.missing == ["prefill", "decode"]
    world.up("prefill", "p0")
    assert world.core.fleet.missing == ["decode"]
    world.up("prefill", "p1")
    world.say("p0", Draining())
    assert world.core.fleet.missing == ["decode"]
    world.down("p1")
    assert world.core.fleet.missing == ["prefill", "decode"]
    world.down("p0")
    role = {"worker_role": "prefill"}
    lines = [
        effect
        for effect in world.effects
        if isinstance(effect, Note) and effect.event.startswith("fleet.role_")
    ]
    assert lines == [Note("fleet.role_present", role), Note("fleet.role_missing", role, "warning")]


def test_workers_that_end_along_with_a_draining_router_are_not_missed() -> None:
    world = ScriptedDeployment(prefill=1, decode=1)
    world.core.start_draining()
    world.say("p0", Draining())
    world.down("d0")
    world.up("decode", "d0")
    assert world.notes("fleet.worker_draining")
    assert not world.notes("fleet.role_missing")
    assert len(world.notes("fleet.role_present")) == 2  # of the start


def test_a_worker_that_nobody_can_exchange_pages_with_is_a_warning_once_there_is_another_role() -> None:
    world = ScriptedDeployment(prefill=1, decode=0)
    world.up("decode", "d0", kv_format="another layout")
    assert [(note.fields["worker"], note.level) for note in world.notes("fleet.worker_unpaired")] == [
        ("p0", "info"),
        ("d0", "warning"),
    ]


def test_the_first_pair_that_can_serve_is_an_effect_and_later_ones_are_none() -> None:
    world = ScriptedDeployment(prefill=1, decode=0)
    world.up("decode", "d0", kv_format="another layout")
    assert FleetPaired() not in world.effects
    world.up("decode", "d1")
    world.down("d1")
    world.up("decode", "d2")
    assert world.effects.count(FleetPaired()) == 1


@given(st.lists(st.tuples(st.sampled_from(["up", "drain", "down"]), st.integers(0, 5)), max_size=40))
def test_pairs_and_missing_roles_are_those_of_the_workers_that_are_there(
    steps: list[tuple[str, int]],
) -> None:
    fleet = Fleet(PrefixIndex(1024))
    for step, number in steps:
        peer = str(number)
        role: Role = "prefill" if number % 2 else "decode"
        if step == "up" and peer not in fleet.workers:
            fleet.up(peer, hello(role, peer, model=f"weights{number // 4}"))
        elif step == "drain" and peer in fleet.workers:
            fleet.drain(fleet.workers[peer])
        elif step == "down":
            fleet.down(peer)
    workers = list(fleet.workers.values())
    for role in WORKER_ROLES:
        mine = [worker for worker in workers if worker.hello.role == role]
        assert list(fleet.of_role(role)) == mine
        assert (role in fleet.missing) == all(worker.draining for worker in mine)
    for worker in workers:
        others = [other for other in workers if other.hello.role != worker.hello.role and not other.draining]
        assert fleet.paired(worker) == any(other.hello.model == worker.hello.model for other in others)


@pytest.mark.parametrize(
    ("local_prefill", "of_prefill", "of_decode", "of_both"),
    [
        ("never", "none", "none", "disaggregated"),
        ("fallback", "none", "aggregated", "disaggregated"),
        ("short", "none", "aggregated", "conditional"),
        ("always", "none", "aggregated", "aggregated"),
    ],
)
def test_who_computes_prompts(
    local_prefill: LocalPrefill, of_prefill: Serving, of_decode: Serving, of_both: Serving
) -> None:
    def serving(*roles: Role, extend_tokens: int = 64) -> Serving:
        fleet = Fleet(PrefixIndex(16), local_prefill=local_prefill)
        limits = Limits(4096, 16, 10, 4, 100, extend_tokens=extend_tokens)
        for role in roles:
            fleet.up(role, hello(role, role, limits=limits, understands=("Serve",)))
        return fleet.serving

    assert serving() == "none"
    assert serving("prefill") == of_prefill
    assert serving("decode") == of_decode
    assert serving("prefill", "decode") == of_both
    assert serving("decode", extend_tokens=0) == "none"
    assert serving("prefill", "decode", extend_tokens=0) == "disaggregated"


def test_a_worker_that_drains_computes_no_more_prompts() -> None:
    fleet = Fleet(PrefixIndex(16), local_prefill="always")
    fleet.up("p", hello("prefill", "p"))
    limits = Limits(4096, 16, 10, 4, 100, extend_tokens=64)
    decode = fleet.up("d", hello("decode", "d", limits=limits, understands=("Serve",)))
    assert isinstance(decode, Worker)
    before = fleet.serving
    fleet.drain(decode)
    assert (before, fleet.serving) == ("aggregated", "none")


def test_a_context_that_only_draining_workers_have_is_promised_to_nobody() -> None:
    """As while a fleet is rolled to a smaller context: whoever leaves out max_tokens would wait for nobody."""
    large, small = Limits(context_len=4096), Limits(context_len=1024)
    world = ScriptedDeployment(1, 1, limits=large)
    for role in WORKER_ROLES:
        world.up(role, f"{role}-small", limits=small)
    assert world.core.fleet.context_len("m") == 4096
    world.say("d0", Draining())
    assert world.core.fleet.context_len("m") == 1024
    world.say("p0", Draining())
    for role in WORKER_ROLES:
        world.say(f"{role}-small", Draining())
    assert world.core.fleet.context_len("m") == 4096, "successors are on their way"
