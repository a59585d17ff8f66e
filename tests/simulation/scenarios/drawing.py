"""Draws a scenario from a seed, before its world begins.

A third of the worlds have pools that overflow, a quarter are calm: there nothing is allowed to fail, so the machinery
for faults cannot hide a fault of the ordinary way.
"""

from __future__ import annotations

import random
from dataclasses import replace

from router.placement_policies import PolicyName
from shared.kv.radix_cache import EvictionPolicy
from shared.scheduling.queue_policy import QueuePolicy
from shared.wire.sampling_params import SamplingParams
from tests.simulation.oracle.device import Speed
from tests.simulation.oracle.model import VOCAB_SIZE
from tests.simulation.scenarios.faults import DRAWN_FAULTS, LEAVES, drawn_faults
from tests.simulation.scenarios.scenario import (
    CONTEXT_LEN,
    START_SECONDS,
    PlannedRequest,
    ScenarioSizes,
    SimulationScenario,
)
from tests.simulation.scenarios.variations import VARIATIONS
from tests.simulation.world.fabric import FabricFaults
from tests.simulation.world.network import NetworkFaults

OVERFLOWING = 0.4  # share of worlds whose pools are too small for what comes
QUEUE_POLICIES: tuple[QueuePolicy, ...] = (
    "fcfs",
    "routing-key",
    "lpm",
    "dfs-weight",
    "lof",
    "priority",
    "random",
)
CACHE_POLICIES: tuple[EvictionPolicy, ...] = ("lru", "lfu", "fifo", "mru", "mru", "filo", "priority", "slru")
PREFILL_POLICIES: tuple[PolicyName, ...] = ("cache_aware", "cache_aware", "round_robin", "power_of_two")
DECODE_POLICIES: tuple[PolicyName, ...] = (
    "cache_aware",
    "total_tokens",
    "total_requests",
    "follow_bootstrap_room",
)


def draw(seed: int) -> SimulationScenario:
    """The scenario of a seed."""
    rng = random.Random(f"{seed} scenario")
    calm = rng.random() < 0.25
    overflowing = rng.random() < OVERFLOWING
    sizes = _sizes(rng, overflowing)
    requests = _requests(rng, sizes, calm, overflowing)
    scenario = SimulationScenario(
        seed=seed,
        calm=calm,
        sizes=sizes,
        speed=Speed(
            step=rng.choice((0.01, 0.03) if overflowing else (0.002, 0.01, 0.03)),
            copied_page=rng.choice((0.0005, 0.004, 0.02)),
        ),
        network=NetworkFaults(latency=rng.choice((0.0002, 0.002, 0.02))),
        fabric=FabricFaults(page_seconds=rng.choice((0.0005, 0.004, 0.02)), tls=_over_tls(seed), renewal=0.2),
        requests=requests,
        faults=(),
    )
    if not calm:
        scenario = _troubled(rng, scenario)
    elif rng.random() < 0.5:
        scenario = replace(scenario, faults=drawn_faults(rng, LEAVES))
    for vary in VARIATIONS:
        scenario = vary(scenario)
    return scenario


def _sizes(rng: random.Random, overflowing: bool) -> ScenarioSizes:
    page_size = rng.choice((2, 4, 8))
    alone = CONTEXT_LEN // page_size  # pages of the largest request
    sizes = ScenarioSizes(
        page_size=page_size,
        prefill_pages=int(alone * rng.choice((2, 10))),
        decode_pages=10 * alone,
        host_pages=5 * alone,
        prefill_slots=rng.randint(1, 5),
        decode_slots=rng.randint(2, 10),
        chunked_prefill_size=rng.choice((8, 16, 40, 200)),
        retract_steps=rng.choice((3, 8, 20)),
        init_new_token_ratio=rng.choice((0.0, 0.2, 0.7)),
        overlap=rng.random() < 0.75,
        queue_policy=rng.choice(QUEUE_POLICIES),
        radix_eviction_policy=rng.choice(CACHE_POLICIES),
        prefill_policy=rng.choice(PREFILL_POLICIES),
        decode_policy=rng.choice(DECODE_POLICIES),
        odd_kv_format=rng.random() < 0.2,
    )
    if not overflowing:
        return sizes
    return replace(
        sizes,
        prefill_pages=int(alone * rng.uniform(1, 1.6)),
        decode_pages=int(alone * rng.uniform(1, 1.6)),
        host_pages=rng.choice((0, alone // 2, 3 * alone)),
        decode_slots=rng.randint(8, 16),
        init_new_token_ratio=rng.choice((0.0, 0.0, 0.2)),
        leases_max=rng.choice((2, 4, 32)),
        small_pages=rng.choice((0, alone // 2)),
    )


def _requests(
    rng: random.Random, sizes: ScenarioSizes, calm: bool, overflowing: bool
) -> tuple[PlannedRequest, ...]:
    families = [[rng.randrange(VOCAB_SIZE) for _ in range(CONTEXT_LEN)] for _ in range(3)]
    within_seconds = rng.choice((0.1, 0.6) if overflowing else (0.6, 1.5))
    output = (10, 30, 60, 80) if overflowing else (1, 2, 10, 30, 50)
    aborts = 0.0 if calm else rng.choice((0.0, 0.1, 0.5))
    prompts: list[tuple[int, ...]] = []
    requests = []
    for number in range(rng.randint(30, 40)):
        prompts.append(_prompt(rng, sizes, families, prompts))
        params = _params(rng, min(CONTEXT_LEN - len(prompts[-1]), rng.choice(output)))
        request = PlannedRequest(
            rid=f"r{number}",
            at=START_SECONDS + rng.uniform(0, within_seconds),
            router=rng.randrange(sizes.routers),
            prompt=prompts[-1],
            params=params,
            priority=rng.choice((0, 0, 0, 5, 20)),
            cache_salt=rng.choice(("", "", "", "salt")),
            session=rng.choice(("", "a", "b")),
        )
        requests.append(_change_of_mind(rng, request, aborts))
    return tuple(requests)


def _change_of_mind(rng: random.Random, request: PlannedRequest, aborts: float) -> PlannedRequest:
    some_token = rng.choice((1, rng.randint(1, request.params.max_new_tokens)))
    if rng.random() < aborts:
        if rng.random() < 0.5:
            return replace(request, abort_after_seconds=rng.expovariate(5))
        return replace(request, abort_after_tokens=some_token)
    if rng.random() < 0.2:
        delay = rng.choice((0.0, rng.uniform(0, 1.0)))
        return replace(request, stop_after_tokens=some_token, stop_delay_seconds=delay)
    return request


def _prompt(
    rng: random.Random, sizes: ScenarioSizes, families: list[list[int]], earlier: list[tuple[int, ...]]
) -> tuple[int, ...]:
    kind = rng.random()
    if kind < 0.25 and earlier:
        return rng.choice(earlier)
    length = rng.choice((rng.randint(1, 12), rng.randint(1, 40), rng.randint(30, 100)))
    if kind < 0.5:
        length = max(1, length // sizes.page_size) * sizes.page_size + rng.choice((0, 0, 1, -1))
        length = max(1, length)
    shared = rng.choice((0, length // 2, length - 1, length))
    return tuple(rng.choice(families)[:shared] + [rng.randrange(VOCAB_SIZE) for _ in range(length - shared)])


def _params(rng: random.Random, most: int) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=most,
        seed=rng.getrandbits(32),
        temperature=rng.choice((0.0, 1.0)),
        frequency_penalty=rng.choice((0.0, 0.0, 0.5)),
        min_new_tokens=rng.choice((0, 0, most // 2)),
        stop_token_ids=rng.choice(((), (7,), (11, 13))),
        ignore_eos=rng.random() < 0.2,
        logprobs=rng.choice((-1, -1, 0, 2)),
    )


def _troubled(rng: random.Random, scenario: SimulationScenario) -> SimulationScenario:
    faults = drawn_faults(rng, [kind for kind in DRAWN_FAULTS if rng.random() < 0.35])
    troubled = scenario.sized(
        lease_seconds=rng.choice((0.5, 2.0, 4.0)),
        max_queued_requests=rng.choice((6, 64, 64)),
        waiting_seconds_max=rng.choice((0.3, 30.0, 30.0)),
        request_seconds_max=rng.choice((0.0,) * 8 + (0.3, 1.0)),
        losses_max=rng.choice((1, 2, 3, 6)),
        drain_seconds=rng.choice((0.2, 1.0, 5.0)),
        reticent=rng.random() < 0.3,
    )
    network = replace(scenario.network, spike=rng.choice((0.0, 0.01, 0.05)))
    fabric = replace(
        scenario.fabric,
        slow=rng.choice((0.0, 0.1, 0.5)),
        late_word=rng.choice((0.0, 0.2)),
        error=rng.choice((0.0, 0.0, 0.1, 0.3)),
        endless=rng.choice((0.0, 0.0, 0.1)),
    )
    troubled = replace(troubled, network=network, fabric=fabric, faults=faults)
    troubled = troubled.sized(loss_seconds=rng.choice((0.05, 0.3, 1.0)), worker_return_seconds=60.0)
    if fabric.endless:  # what no longer fits beside pages that never come back is ended by its deadline alone
        troubled = troubled.sized(request_seconds_max=troubled.sizes.request_seconds_max or 100.0)
    return troubled


def _over_tls(seed: int) -> bool:
    """Half of the worlds read by the TLS transport."""
    return random.Random(f"{seed} transport").random() < 0.5
