"""What a seed means: the sizes of a world, its requests and what will go wrong, all drawn before it begins.

Nothing here acts. A third of the worlds have pools that overflow, a quarter are calm: there nothing is allowed to
fail, so the machinery for faults cannot hide a fault of the ordinary way.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from router.config import Policy
from shared.messages import Role
from shared.sampling_params import SamplingParams
from tests.simulation.fabric import FabricFaults
from tests.simulation.network import NetworkFaults
from tests.simulation.oracle import VOCAB_SIZE
from tests.simulation.oracle_device import Speed

CachePolicy = Literal["lru", "lfu", "fifo", "mru", "filo", "priority", "slru"]
QueuePolicy = Literal["fcfs", "lpm", "dfs-weight", "lof", "random", "priority"]

CONTEXT_LEN = 160
START_SECONDS = 0.2  # until the first request; links come up before
OVERFLOWING = 0.4  # share of worlds whose pools are too small for what comes
QUEUE_POLICIES: tuple[QueuePolicy, ...] = ("fcfs", "fcfs", "lpm", "dfs-weight", "lof", "priority", "random")
CACHE_POLICIES: tuple[CachePolicy, ...] = ("lru", "lfu", "fifo", "mru", "mru", "filo", "priority", "slru")
PREFILL_POLICIES: tuple[Policy, ...] = ("cache_aware", "cache_aware", "round_robin", "power_of_two")
DECODE_POLICIES: tuple[Policy, ...] = (
    "total_tokens",
    "total_tokens",
    "total_requests",
    "follow_bootstrap_room",
)
LINK_FAULTS = ("loss", "reconnect", "isolation")
LEAVES = ("drain prefill", "drain decode")
DRAWN_FAULTS = (
    "crash prefill",
    "crash decode",
    "crash router",
    "freeze",
    "long freeze",
    *LEAVES,
    *LINK_FAULTS,
)
ROUTER_DRAINS = ("drain router", "stop router")  # by SIGTERM; by SIGINT, or SIGTERM twice
HANG = "hang"  # a worker's loop, as in a step that does not end; its links live on
FOR_EVER = 1000.0  # seconds; all has ended by then, or nothing ends it
NONSENSE = "nonsense"  # a router sends a worker a command that is not sound
FAULTS = (*DRAWN_FAULTS, *ROUTER_DRAINS, HANG, NONSENSE)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest:
    """One request of one client, and when the client changes its mind."""

    rid: str
    at: float  # seconds
    router: int
    prompt: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""
    session: str = ""
    abort_after_seconds: float | None = None
    abort_after_tokens: int | None = None
    stop_after_tokens: int | None = None  # the text layer finds a stop string there …
    stop_delay_seconds: float = 0.0  # … and so much later


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that will happen to the world; `choice` picks the victim among those alive then."""

    at: float
    kind: str
    choice: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioSizes:
    """Of the fleet and of each of its workers."""

    routers: int = 2
    prefill_workers: int = 3
    decode_workers: int = 3
    page_size: int = 4
    prefill_pages: int = 400
    decode_pages: int = 400
    host_pages: int = 200
    prefill_slots: int = 4
    decode_slots: int = 8
    chunked_prefill_size: int = 64
    leases_max: int = 32
    lease_seconds: float = 4.0
    fetch_seconds_max: float = 3.0
    retract_steps: int = 20
    init_new_token_ratio: float = 0.7
    max_queued_requests: int = 64
    waiting_seconds_max: float = 100.0  # so patient that nothing fails in a calm world …
    ready_seconds_max: float = 100.0  # … however full it is
    request_seconds_max: float = 0.0
    losses_max: int = 3
    loss_seconds: float = 1.0
    step_seconds_max: float = 2.0  # no step takes as long
    drain_seconds: float = 30.0
    endpoint_lag_seconds: float = 0.3
    overlap: bool = True
    queue_policy: QueuePolicy = "fcfs"
    radix_eviction_policy: CachePolicy = "lru"
    prefill_policy: Policy = "cache_aware"
    decode_policy: Policy = "total_tokens"
    tenant_share_max: float = 1.0
    tenant_running_max: int = 0
    tenant_tokens_per_minute: int = 0
    tenant_weights: tuple[str, ...] = ()
    share_prefix_cache: bool = False
    overtakes_max: int = 32
    small_pages: int = 0  # pages of the first worker of each role; 0: as many as the others …
    reticent: bool = False  # … and its Hello has no limits
    odd_kv_format: bool = False  # the last decode worker has a KV format of its own

    def pages(self, role: Role, number: int) -> int:
        """KV pages of a worker."""
        if number == 0 and self.small_pages:
            return self.small_pages
        return self.prefill_pages if role == "prefill" else self.decode_pages


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationScenario:
    """Everything that a seed decides."""

    seed: int
    calm: bool
    sizes: ScenarioSizes
    speed: Speed
    network: NetworkFaults
    fabric: FabricFaults
    requests: tuple[PlannedRequest, ...]
    faults: tuple[Fault, ...]

    def random(self, purpose: str) -> random.Random:
        """A generator of its own for each purpose, so that one more draw here changes nothing there."""
        return random.Random(f"{self.seed} {purpose}")


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
        fabric=FabricFaults(page_seconds=rng.choice((0.0005, 0.004, 0.02)), leaves_out=_leaves_out(seed)),
        requests=requests,
        faults=(),
    )
    if not calm:
        scenario = _troubled(rng, scenario)
    elif rng.random() < 0.5:
        scenario = replace(scenario, faults=_faults(rng, LEAVES))
    return _with_nonsense(_with_hangs(_with_router_drains(_with_tenants(_with_patience(scenario)))))


def _with_patience(scenario: SimulationScenario) -> SimulationScenario:
    """Some troubled worlds give up a slow fetch early, so decode keeps fewer pages free of what arrives."""
    if scenario.calm:
        return scenario
    patience = scenario.random("patience").choice((0.2, 0.5, 3.0))
    return replace(scenario, sizes=replace(scenario.sizes, fetch_seconds_max=patience))


def _with_nonsense(scenario: SimulationScenario) -> SimulationScenario:
    """Half of the worlds, calm ones too: unsound commands may cost nobody anything."""
    rng = scenario.random("nonsense")
    if rng.random() > 0.5:
        return scenario
    faults = sorted((*scenario.faults, *_faults(rng, (NONSENSE,))), key=lambda fault: fault.at)
    return replace(scenario, faults=tuple(faults))


def _with_hangs(scenario: SimulationScenario) -> SimulationScenario:
    """A third of the troubled worlds have workers whose loops hang."""
    rng = scenario.random("hangs")
    if scenario.calm or rng.random() > 0.35:
        return scenario
    faults = sorted((*scenario.faults, *_faults(rng, (HANG,))), key=lambda fault: fault.at)
    return replace(scenario, faults=tuple(faults))


def _with_tenants(scenario: SimulationScenario) -> SimulationScenario:
    """Most worlds have two to four tenants, the first of them greedy. Only a troubled world refuses their tokens."""
    rng = scenario.random("tenants")
    names = [f"tenant-{number}" for number in range(rng.choice((1, 2, 3, 4)))]
    requests = [
        replace(planned, tenant=names[0] if rng.random() < 0.5 else rng.choice(names))
        for planned in scenario.requests
    ]
    sizes = replace(
        scenario.sizes,
        tenant_share_max=rng.choice((0.5, 0.8, 0.95, 1.0)),
        tenant_running_max=rng.choice((0, 0, 0, 3)),
        tenant_tokens_per_minute=0 if scenario.calm else rng.choice((0, 0, 0, 200, 2000)),
        tenant_weights=tuple(f"{name}={rng.choice((0.5, 3))}" for name in names if rng.random() < 0.3),
        share_prefix_cache=rng.random() < 0.2,
        overtakes_max=rng.choice((0, 2, 32)),
    )
    if scenario.calm:
        requests += _small_requests(rng, sizes)
    return replace(scenario, sizes=sizes, requests=tuple(requests))


def _small_requests(rng: random.Random, sizes: ScenarioSizes) -> list[PlannedRequest]:
    """Another tenant comes in the middle of it all, with a few tokens."""
    return [
        PlannedRequest(
            rid=f"small-{number}",
            at=START_SECONDS + rng.uniform(0.2, 0.8),
            router=rng.randrange(sizes.routers),
            prompt=tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 6))),
            params=SamplingParams(max_new_tokens=rng.randint(1, 4), seed=rng.getrandbits(32)),
            tenant="small",
        )
        for number in range(rng.randint(1, 3))
    ]


def _leaves_out(seed: int) -> bool:
    """Half of the worlds read by the sealed transport."""
    return random.Random(f"{seed} transport").random() < 0.5


def _with_router_drains(scenario: SimulationScenario) -> SimulationScenario:
    """A third of the worlds drain a router; only a troubled world cuts its answers by stopping it."""
    rng = scenario.random("router drains")
    if rng.random() > 0.35:
        return scenario
    drains = _faults(rng, ROUTER_DRAINS[:1] if scenario.calm else ROUTER_DRAINS)
    faults = sorted((*scenario.faults, *drains), key=lambda fault: fault.at)
    return replace(scenario, faults=tuple(faults))


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
    )


def _troubled(rng: random.Random, scenario: SimulationScenario) -> SimulationScenario:
    faults = _faults(rng, [kind for kind in DRAWN_FAULTS if rng.random() < 0.35])
    troubled = replace(
        scenario,
        sizes=replace(
            scenario.sizes,
            lease_seconds=rng.choice((0.5, 2.0, 4.0)),
            max_queued_requests=rng.choice((6, 64, 64)),
            waiting_seconds_max=rng.choice((0.3, 30.0, 30.0)),
            ready_seconds_max=rng.choice((0.1, 30.0, 30.0)),
            request_seconds_max=rng.choice((0.0,) * 8 + (0.3, 1.0)),
            losses_max=rng.choice((1, 2, 3, 6)),
            drain_seconds=rng.choice((0.2, 1.0, 5.0)),
            reticent=rng.random() < 0.3,
        ),
        network=replace(scenario.network, spike=rng.choice((0.0, 0.01, 0.05))),
        fabric=replace(
            scenario.fabric,
            slow=rng.choice((0.0, 0.1, 0.5)),
            late_word=rng.choice((0.0, 0.2)),
            error=rng.choice((0.0, 0.0, 0.1, 0.3)),
            endless=rng.choice((0.0, 0.0, 0.1)),
        ),
        faults=faults,
    )
    return replace(troubled, sizes=replace(troubled.sizes, loss_seconds=rng.choice((0.05, 0.3, 1.0))))


def _faults(rng: random.Random, kinds: Sequence[str]) -> tuple[Fault, ...]:
    faults = [
        Fault(rng.uniform(0.1, 2.5), kind, rng.randrange(1000), _seconds(rng, kind))
        for kind in kinds
        for _ in range(rng.randint(2, 10) if kind in LINK_FAULTS else rng.randint(1, 4))
    ]
    return tuple(sorted(faults, key=lambda fault: fault.at))


def _seconds(rng: random.Random, kind: str) -> float:
    """How long it lasts: a freeze or a hang, or the time until a crashed process is back."""
    if kind == HANG:
        return rng.choice((rng.uniform(0.05, 1.0), rng.uniform(2.5, 6.0), FOR_EVER))
    return rng.uniform(2.5, 6.0) if kind == "long freeze" else rng.choice((0.02, rng.uniform(0.05, 1.0)))
