"""The oracle for tenants: each is charged for exactly what it had, and reads no other's cache.

It looks at what routers charged and at what clients were told. It knows neither queues nor workers; whose
turn it is, and what is kept for whom, `fairness` judges.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import takewhile

from router.core.dispatch import RouterCore
from router.core.effects import RequestCompleted, RequestFailed
from router.core.requests.request_queue import VirtualTime
from router.core.worker_events.worker_faults import FAILED
from tests.simulation.scenarios.scenario import ScenarioSizes
from tests.simulation.world.clients import SimulatedClient

TOKENS_ROUNDING = 1e-6


class RecordingClock(VirtualTime):
    """Also sums up what each tenant was charged and given back."""

    def __init__(self) -> None:
        super().__init__()
        self.charged: Counter[str] = Counter()

    def start(self, tenant: str, cost: float) -> float:
        """As a `VirtualTime`."""
        self.charged[tenant] += cost  # type: ignore[assignment]
        return super().start(tenant, cost)

    def give_back(self, tenant: str, cost: float) -> None:
        """As a `VirtualTime`."""
        self.charged[tenant] -= cost  # type: ignore[assignment]
        super().give_back(tenant, cost)


class TenantWitness:
    """Stands beside a router's core and records what its queues charge."""

    def __init__(self, core: RouterCore):
        self._core = core
        self.prompts = core._requests.reservations.waiting.clock = RecordingClock()
        self.outputs = core._requests.reservations.ready.clock = RecordingClock()

    def prove_charges(self, clients: Iterable[SimulatedClient], weights: Sequence[str]) -> None:
        """Each tenant paid for the prompts that a worker got and for the output that came: once, and no more.

        What a struck request paid for its output depends on where its last step broke off.
        """
        assert not self._core._requests.tenants, "tenants without requests are not forgotten"
        weight = {name: float(text) for name, text in (entry.split("=") for entry in weights)}
        prompts: Counter[str] = Counter()
        outputs: Counter[str] = Counter()
        struck: Counter[str] = Counter()
        groups: dict[tuple[str, ...], list[bool]] = {}  # whether each sibling was charged for the prompt
        for client in clients:
            planned, shown = client.planned, self._core.debug(client.planned.rid)
            if shown is None:
                continue  # it was refused
            tenant, stages = planned.tenant, shown["stage_milliseconds"]
            charged = shown["charged_tokens"]
            assert charged == len(planned.prompt) or (planned.group and not charged), (
                f"{planned.rid}: {charged}"
            )
            if planned.group:
                groups.setdefault(planned.group, []).append(bool(charged))
            if shown["workers"]:
                prompts[tenant] += charged / weight.get(tenant, 1.0)  # type: ignore
            if isinstance(client.outcome, RequestFailed) and client.outcome.code == FAILED.code:
                struck[tenant] += planned.params.max_new_tokens / weight.get(tenant, 1.0)  # type: ignore
            elif isinstance(stages, dict) and stages.keys() & {"ready", "extending"}:
                outputs[tenant] += shown["completion_tokens"] / weight.get(tenant, 1.0)  # type: ignore
        for rids, charged_each in groups.items():
            if len(charged_each) == len(rids):  # no other pays for one that was refused
                assert charged_each.count(True) == 1, f"{rids[0]}: its prompt is charged {charged_each}"
        _same(self.prompts.charged, prompts, "prompt", Counter())
        _same(self.outputs.charged, outputs, "output", struck)


def prove_caches_are_apart(clients: Sequence[SimulatedClient], sizes: ScenarioSizes) -> None:
    """What a client is told of the cache is explained by requests that share its tenant and its salt."""
    for client in clients:
        if isinstance(client.outcome, RequestCompleted) and client.attempts == 1 and not client.deceived:
            own = _sharers(client, clients, sizes)
            longest = max((_shared_len(client.planned.prompt, _tokens(other)) for other in own), default=0)
            told = client.outcome.usage.cached_tokens
            assert told <= longest, f"{client.planned.rid}: {told} cached tokens, of its own tenant {longest}"


def _same(charged: Counter[str], used: Counter[str], what: str, struck: Counter[str]) -> None:
    for tenant in charged.keys() | used.keys():
        more = charged[tenant] - used[tenant]
        assert -TOKENS_ROUNDING < more < struck[tenant] + TOKENS_ROUNDING, (
            f"{tenant} paid for {charged[tenant]} {what} tokens and had {used[tenant]}"
        )


def _sharers(
    client: SimulatedClient, clients: Iterable[SimulatedClient], sizes: ScenarioSizes
) -> list[SimulatedClient]:
    mine = client.planned
    return [
        other
        for other in clients
        if other is not client
        and other.planned.cache_salt == mine.cache_salt
        and (sizes.share_prefix_cache or other.planned.tenant == mine.tenant)
    ]


def _tokens(client: SimulatedClient) -> tuple[int, ...]:
    return client.planned.prompt + client.answer[0]


def _shared_len(one: Sequence[int], other: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
