"""Who is compared for a request in a large fleet: a handful, and everybody where the handful has no room."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from router.config import RouterConfig
from router.core.fleet.placement import (
    decode_rounds,
    decode_workers,
    place_decode,
    place_prefill,
    prefill_rounds,
    prefill_workers,
)
from router.core.fleet.prefix_index import BLOCK_TOKENS, PrefixIndex
from router.core.fleet.worker import Worker
from router.core.fleet.workers import Fleet
from router.placement_policies import Need
from shared.wire.messages import WORKER_ROLES, Limits, Load, Prefill
from shared.wire.sampling_params import SamplingParams
from tests.unit.router.deployment import ScriptedDeployment, hello, named, request

SETTINGS = RouterConfig()
HANDFUL = SETTINGS.candidates_max
NEED = Need(rid="r", model_name="m", tokens=100, tokens_max=200)
HANDED = replace(NEED, model="weights", kv_format="kv")
FULL = Load(slots_free=0, free_pages=0)
FREE = Load(slots_free=4, free_pages=1000)


def fleet_of(prefill: int, decode: int) -> Fleet:
    fleet = Fleet(PrefixIndex(100_000), prefilling_per_slot=SETTINGS.prefilling_per_slot)
    for number in range(prefill):
        fleet.up(f"p{number}", hello("prefill", f"p{number}"))
    for number in range(decode):
        fleet.up(f"d{number}", hello("decode", f"d{number}"))
        fleet.workers[f"d{number}"].report(FREE)
    return fleet


def chosen(need: Need, fleet: Fleet) -> Worker | None:
    for workers in decode_rounds(need, fleet, SETTINGS):
        choice = place_decode(need, workers, fleet.prefixes, SETTINGS, 0.0)
        if choice is not None:
            fleet.mark_chosen(choice.worker)
            return choice.worker
    return None


def test_a_fleet_no_larger_than_the_handful_is_compared_whole() -> None:
    fleet = fleet_of(HANDFUL, HANDFUL)
    assert list(decode_rounds(HANDED, fleet, SETTINGS)) == [decode_workers(HANDED, fleet)]
    assert list(prefill_rounds(NEED, fleet, SETTINGS)) == [prefill_workers(NEED, fleet)]


def test_in_a_large_fleet_a_handful_comes_first_and_then_everybody() -> None:
    fleet = fleet_of(40, 60)
    first, second = decode_rounds(HANDED, fleet, SETTINGS)
    assert 1 <= len(first) <= HANDFUL
    assert set(second) == set(decode_workers(HANDED, fleet))


def test_the_only_worker_with_room_is_found_among_many() -> None:
    fleet = fleet_of(1, 60)
    for number in range(60):
        fleet.workers[f"d{number}"].report(FULL if number != 37 else FREE)
        fleet.workers[f"d{number}"].report(Load(slots_free=4, free_pages=1) if number != 37 else FREE)
    for number in range(20):
        found = chosen(replace(HANDED, rid=f"r{number}"), fleet)
        assert found is fleet.workers["d37"]


def test_a_request_that_fits_somewhere_is_told_from_one_that_fits_nowhere() -> None:
    fleet = fleet_of(1, 60)
    for worker in fleet.of_role("decode"):
        worker.report(FULL)
    assert list(decode_rounds(HANDED, fleet, SETTINGS))[-1], "it waits for room"
    stranger = replace(HANDED, kv_format="another")
    assert not list(decode_rounds(stranger, fleet, SETTINGS))[-1], "no room would help"


def test_routers_that_know_the_same_loads_do_not_all_choose_the_emptiest() -> None:
    fleet = fleet_of(1, 60)
    for number in range(1, 60):
        fleet.workers[f"d{number}"].report(Load(running_tokens=1000, slots_free=4, free_pages=500))
    choices = Counter(chosen(replace(HANDED, rid=f"r{number}"), fleet) for number in range(100))
    assert choices[fleet.workers["d0"]] < 40
    assert len(choices) > 30


def test_the_worker_that_has_the_prefix_is_compared_however_large_the_fleet_is() -> None:
    fleet = fleet_of(60, 1)
    names = named(range(1, 40))
    fleet.prefixes.insert("p41", names)
    tokens = len(names) * BLOCK_TOKENS
    for number in range(20):
        need = replace(NEED, rid=f"r{number}", blocks=names, tokens=tokens, tokens_max=tokens + 1)
        workers = next(prefill_rounds(need, fleet, SETTINGS))
        choice = place_prefill(need, workers, fleet.prefixes, SETTINGS, 0.0)
        assert choice is not None
        assert choice.worker is fleet.workers["p41"]


def test_the_own_worker_of_a_prefix_is_compared_however_large_the_fleet_is() -> None:
    fleet = fleet_of(60, 1)
    names = named(range(1, 40))
    tokens = len(names) * BLOCK_TOKENS
    chosen_for = set()
    for number in range(20):
        need = replace(NEED, rid=f"r{number}", blocks=names, tokens=tokens, tokens_max=tokens + 1)
        workers = next(prefill_rounds(need, fleet, SETTINGS))
        choice = place_prefill(need, workers, fleet.prefixes, SETTINGS, 0.0)
        assert choice is not None
        chosen_for.add(choice.worker)
    (own,) = chosen_for
    fleet.drain(own)
    assert all(own not in workers for workers in prefill_rounds(need, fleet, SETTINGS))


def test_workers_of_the_other_role_that_have_more_of_it_leave_it_its_place() -> None:
    fleet = fleet_of(60, 60)
    prompt, output = named(range(1, 40)), named(range(100, 104))
    fleet.prefixes.insert("p41", prompt)
    for number in range(8):
        fleet.prefixes.insert(f"d{number}", prompt + output)
    tokens = len(prompt + output) * BLOCK_TOKENS
    need = replace(NEED, blocks=prompt + output, tokens=tokens, tokens_max=tokens + 1)
    assert fleet.workers["p41"] in next(prefill_rounds(need, fleet, SETTINGS))


LIMITS = Limits(context_len=100, page_size=10, pages=100, slots=2)
LOADS = {
    "full": FULL,
    "free": FREE,
    "refuses": Load(slots_free=4, free_pages=1000, accepting=False),
}
ACTIONS = st.lists(
    st.tuples(st.sampled_from(["assign", "unassign", "drain", "down", *LOADS]), st.integers(0, 3)),
    max_size=40,
)


@given(ACTIONS)
def test_exactly_those_workers_are_open_that_could_take_something(actions: list[tuple[str, int]]) -> None:
    """Whatever happened, in whatever order; and a load that opens a worker says that it brings room."""
    fleet = Fleet(PrefixIndex(16))
    for number in range(2):
        fleet.up(f"p{number}", hello("prefill", f"p{number}", limits=LIMITS))
        fleet.up(f"d{number}", hello("decode", f"d{number}", limits=LIMITS))
    workers = list(fleet.workers.values())
    for serial, (action, number) in enumerate(actions):
        act(fleet, workers[number], action, f"r{serial}")
        for role in WORKER_ROLES:
            takers = fleet.open_to(role).all
            assert len(takers) == len(set(takers))
            assert set(takers) == {each for each in fleet.of_role(role) if each.is_open}
        assert not [each for each in fleet.workers.values() if not each.is_open and takes_something(each)]


def act(fleet: Fleet, worker: Worker, action: str, rid: str) -> None:
    if action == "assign":
        worker.assign(rid, tokens=10, pages=1)
    elif action == "unassign" and worker.assigned:
        worker.unassign(next(iter(worker.assigned)))
    elif action in LOADS:
        was_open = worker.is_open
        brings_room = worker.report(LOADS[action])
        assert brings_room or was_open or not worker.is_open
    elif action == "drain":
        fleet.drain(worker)
    elif action == "down":
        fleet.down(worker.peer)


def takes_something(worker: Worker) -> bool:
    if worker.hello.role == "prefill":
        return worker.takes_prefill(1.0, "tenant", 0.0)
    return worker.has_room(1, "tenant", 1.0, 0.0)


def test_a_prompt_is_computed_only_where_some_decode_worker_of_the_same_pages_can_hold_its_output() -> None:
    """As while a fleet is rolled to larger contexts. In front of the smaller ones its stream would wait, and break."""
    small = Limits(context_len=1024, page_size=16, pages=512, slots=4)
    deployment = ScriptedDeployment(0, 0)
    for role in WORKER_ROLES:
        deployment.up(role, f"{role}-small", kv_format="small", limits=small)
    deployment.submit(request("before", max_new_tokens=500))
    assert deployment.placed(Prefill, "before") == "prefill-small"
    for role in WORKER_ROLES:
        deployment.up(role, f"{role}-large", kv_format="large")
    for number in range(4):
        deployment.submit(request(f"r{number}", max_new_tokens=2000))
        assert deployment.placed(Prefill, f"r{number}") == "prefill-large"


def test_a_prompt_is_computed_only_where_some_decode_worker_of_the_same_pages_knows_its_sampling() -> None:
    params = SamplingParams(max_new_tokens=8, seed=0, bad_words=((7,),))
    deployment = ScriptedDeployment(0, 0)
    for layout, known in (("old", ()), ("new", ("bad_words",))):
        deployment.up("prefill", f"prefill-{layout}", kv_format=layout, features=("bad_words",))
        deployment.up("decode", f"decode-{layout}", kv_format=layout, features=known)
    for number in range(4):
        deployment.submit(request(f"r{number}", params=params))
        assert deployment.placed(Prefill, f"r{number}") == "prefill-new"
