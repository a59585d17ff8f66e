"""What a seed decides: sizes of a world, its requests and what will go wrong. `drawing` draws it."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Self

import msgspec

from router.discovery.known_pods import ROUTERS_MIN, workers_of
from router.placement_policies import LocalPrefill, PolicyName
from shared.kv.radix_cache import EvictionPolicy
from shared.scheduling.queue_policy import QueuePolicy
from shared.wire.messages import Role
from shared.wire.sampling_params import SamplingParams
from tests.simulation.oracle.device import Speed
from tests.simulation.scenarios.faults import Fault
from tests.simulation.world.fabric import FabricFaults
from tests.simulation.world.network import NetworkFaults

SettingValues = tuple[tuple[str, float], ...]  # names and values

CONTEXT_LEN = 160
START_SECONDS = 0.2  # until the first request; links come up before


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
    deadline_seconds: float = 0.0  # until its first token; 0.0: any
    by_prefill: bool = False  # a prefill worker is to compute its prompt
    group: tuple[str, ...] = ()  # the requests of all siblings, itself among them, in order
    abort_after_seconds: float | None = None
    abort_after_tokens: int | None = None
    stop_after_tokens: int | None = None  # the text layer finds a stop string there …
    stop_delay_seconds: float = 0.0  # … and so much later

    def asking(self, **params: Any) -> Self:
        """With other sampling parameters."""
        return replace(self, params=msgspec.structs.replace(self.params, **params))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioSizes:
    """Of the fleet and of each of its workers."""

    routers: int = 2
    prefill_workers: int = 3
    decode_workers: int = 3
    prefill_ranks: int = 1  # GPUs of a worker
    decode_ranks: int = 1
    page_size: int = 4
    prefill_pages: int = 400
    decode_pages: int = 400
    host_pages: int = 200
    prefill_slots: int = 4
    decode_slots: int = 8
    chunked_prefill_size: int = 64
    short_share: float = 0.25
    leases_max: int = 32
    lease_seconds: float = 4.0
    fetch_seconds_max: float = 3.0
    retract_steps: int = 20
    turn_seconds: float = 2.0
    local_tokens_max: int = 0
    itl_target_seconds: float = 0.1
    local_prefill: LocalPrefill = "fallback"
    init_new_token_ratio: float = 0.7
    max_queued_requests: int = 64
    waiting_seconds_max: float = 300.0  # so patient that nothing fails in a calm world, however full it is
    # a worker that drains in a calm world is gone for `drain_seconds` first
    worker_return_seconds: float = 170.0
    request_seconds_max: float = 0.0
    losses_max: int = 3
    loss_seconds: float = 1.0
    step_seconds_max: float = 2.0  # no step takes as long
    # In a calm world all answers end within it, also where all but one of the decode workers drain.
    drain_seconds: float = 160.0
    endpoint_lag_seconds: float = 0.3
    overlap: bool = True
    launches_cost: bool = True  # as on a CPU; not on a GPU
    queue_policy: QueuePolicy = "fcfs"
    ageing_seconds: float = 5.0
    radix_eviction_policy: EvictionPolicy = "lru"
    prefill_policy: PolicyName = "cache_aware"
    decode_policy: PolicyName = "total_tokens"
    candidates_max: int = 8
    cell_workers_max: int = 64
    tenant_share_max: float = 1.0
    tenant_running_max: int = 0
    tenant_tokens_per_minute: int = 0
    tenant_weights: tuple[str, ...] = ()
    share_prefix_cache: bool = False
    backfill_max: int = 32
    balance_steps: int = 64
    ready_seconds: float = 2.0
    ttft_target_seconds: float = 0.0
    unreachable_seconds: float = 30.0
    stall_seconds: float = 900.0
    silent_seconds: float = 30.0
    small_pages: int = 0  # pages of the first worker of each role; 0: as many as the others …
    reticent: bool = False  # … and its Hello has no limits
    odd_kv_format: bool = False  # the last decode worker has a KV format of its own
    router_bounds: SettingValues = ()  # settings of each role that differ from those above
    prefill_bounds: SettingValues = ()
    decode_bounds: SettingValues = ()

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

    def sized(self, **sizes: Any) -> Self:
        """With other sizes."""
        return replace(self, sizes=replace(self.sizes, **sizes))

    def with_faults(self, faults: Iterable[Fault]) -> Self:
        """With faults besides its own."""
        return replace(self, faults=tuple(sorted((*self.faults, *faults), key=lambda fault: fault.at)))

    def with_requests(self, requests: Iterable[PlannedRequest]) -> Self:
        """With these requests instead of its own."""
        return replace(self, requests=tuple(requests))


def dialed(sizes: ScenarioSizes) -> dict[str, frozenset[str]]:
    """The workers that each router dials, by name."""
    routers = [f"router-{number}" for number in range(sizes.routers)]
    prefill = [f"prefill-{number}" for number in range(sizes.prefill_workers)]
    decode = [f"decode-{number}" for number in range(sizes.decode_workers)]
    cells = {
        router: workers_of(router, routers, prefill, decode, sizes.cell_workers_max) for router in routers
    }
    for worker in (*prefill, *decode):
        dialing = sum(worker in workers for workers in cells.values())
        assert dialing >= min(ROUTERS_MIN, sizes.routers), f"{dialing} routers dial {worker}"
    return cells
