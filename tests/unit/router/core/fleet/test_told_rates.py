"""What a router believes of the rates that workers tell, and what follows for prompts."""

from __future__ import annotations

from router.core.fleet.told_rates import FASTEST
from shared.links.events import PeerUp
from shared.wire.messages import Prefill, Serve
from tests.unit.router.core.queueing.test_local_prompts import LONG, WHOLE, begun, deployment
from tests.unit.router.deployment import hello, request


def test_a_rate_counts_from_the_load_that_tells_it() -> None:
    world = deployment(prefill=1, decode=2, local_prefill="short")
    world.loaded("p0", extend_rate=10.0)
    world.loaded("d0", extend_rate=1000.0, slots_free=0)  # it can have no prompt, so it is never compared
    world.submit(request("r"))
    assert world.placed(Serve, "r") == "d1", "as fast as the other of its role"


def test_half_of_the_workers_being_slow_does_not_make_the_others_slow() -> None:
    world = deployment(prefill=2, local_prefill="short")
    world.loaded("p0", extend_rate=10_000.0)
    world.loaded("p1", extend_rate=10.0, accepting=False)
    world.loaded("d0", extend_rate=1_000.0)
    world.submit(request("r", tuple(range(1_500))))
    assert world.placed(Prefill, "r") == "p0", "0.3 s, not the 18.8 of 160 tokens a second"


def test_of_two_workers_one_counts_as_a_multiple_of_the_other_at_most() -> None:
    world = deployment(decode=3)
    world.loaded("d0", extend_rate=1_000.0)
    workers, most = world.core.fleet.workers, FASTEST**2 * 1_000.0
    for told, counts in ((1e12, most), (200_000.0, 200_000.0)):
        world.loaded("d1", extend_rate=told)
        rates = [each.rates.rate(each.hello, each.load).tokens_per_second for each in workers.values()]
        assert rates == [1_000.0, counts, counts], (
            "one that has told nothing is as fast as those in the middle"
        )


def test_a_worker_that_comes_again_and_again_counts_once_and_not_once_it_is_gone() -> None:
    world = deployment(decode=3)
    honest = {"extend_rate": 1_000.0, "pages_for_new": 500}
    for number in range(3):
        world.loaded(f"d{number}", **honest)
    for uid in ("liar", "liar", "liar", "liar", "fifth", "sixth", "seventh", "eighth"):
        peer = f"{uid}/{len(world.effects)}"
        said = hello("decode", uid, limits=WHOLE, understands=("Serve",))
        world.link(PeerUp(peer, said))
        world.loaded(peer, extend_rate=1e8, queued_tokens=100)
        world.submit(request(f"to {peer}"))
        chosen = world.placed(Serve, f"to {peer}") or ""
        assert chosen != peer, "at most 16 times as fast, it has computed what waits there later"
        begun(world, f"to {peer}", peer=chosen, finish="length")
        world.loaded(chosen, **honest)
        if uid != "eighth":
            world.down(peer)


def test_a_session_that_ends_after_the_next_has_begun_takes_nothing_along() -> None:
    world = deployment(prefill=1, decode=1, local_prefill="short")
    world.loaded("p0", extend_rate=10.0)
    for epoch in ("old", "new"):
        world.link(PeerUp(f"w/{epoch}", hello("decode", "w", limits=WHOLE, understands=("Serve",))))
        world.loaded(f"w/{epoch}", extend_rate=1_000.0, slots_free=0)
    world.down("w/old")
    world.submit(request("r"))
    assert world.placed(Serve, "r") == "d0", "as fast as the other"
    world.down("w/new")
    world.submit(request("s"))
    assert world.placed(Prefill, "s") == "p0", "nothing is known of any that decodes"


def test_what_one_worker_tells_of_positions_keeps_no_prompt_from_those_that_told_nothing() -> None:
    world = deployment(prefill=1, decode=3, local_prefill="short")
    world.loaded("p0", extend_rate=10.0)
    world.loaded("d0", extend_rate=1_000.0, position_seconds=100.0)
    world.submit(request("r", LONG))
    assert world.placed(Serve, "r") in ("d1", "d2"), "32 s at prefill, and not 1.3 million here"
