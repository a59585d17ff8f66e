"""The scenarios of a whole fleet: 200 prefill and 400 decode pods, and what happens to fleets.

The lengths are those of a conversation service: medians of 1,020 tokens in and 129 out (Patel et al., Splitwise, ISCA
2024, section III) and the means of the trace that was published with it (AzureLLMInferenceTrace_conv, 2023), about
1,155 and 211; drawn from lognormals. Half of the requests begin with one of 50 system prompts, half give no max_tokens.
The rate changes each second by a Gamma distribution, as Wang et al. model bursts (BurstGPT, 2024).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from decode.config import DecodeConfig
from prefill.config import PrefillConfig
from shared.wire.messages import WORKER_ROLES
from tests.benchmarks.virtual_cluster.cluster import START_SECONDS, ClusterShape, VirtualCluster
from tests.benchmarks.virtual_cluster.device import StepTimes
from tests.benchmarks.virtual_cluster.figures import Figures
from tests.benchmarks.virtual_cluster.router import VirtualRouter
from tests.benchmarks.virtual_cluster.scenario import LoadScenario, ScenarioSize, broken_share, number
from tests.benchmarks.virtual_cluster.trace import (
    REST_OF_CONTEXT,
    DrawTrace,
    TracedRequest,
    bursty,
    lognormal,
)
from tests.benchmarks.virtual_cluster.worker import VirtualWorker, WorkerShape

PREFILL = PrefillConfig(chunked_prefill_size=2_048)
PREFILL_PODS, DECODE_PODS = 200, 400
SECONDS = 40.0  # 100,000 requests at 2,500 a second
SLOTS = 60  # of a decode pod's 64: the share of one tenant
POD_TOKENS_PER_SECOND = SLOTS / 0.032  # of a decode pod with all these slots taken
MEAN_OUTPUT = 211  # tokens
CAPACITY = DECODE_PODS * POD_TOKENS_PER_SECOND / MEAN_OUTPUT  # requests a second: 3,555
USUAL = 0.7  # of the capacity
TIMES = StepTimes(extend=0.005, extend_token=0.00003, decode=0.020, decode_row=0.0002)
RESTART_SECONDS = 3.0  # until a pod is back
SILENCE_SECONDS = 3.0  # until others notice that a machine is gone
UPGRADED_AT_ONCE = 0.1  # of the pods of each role


def _trace(per_second: float, seconds: float) -> DrawTrace:
    def trace(rng: random.Random) -> Iterator[TracedRequest]:
        for index, at in enumerate(bursty(rng, per_second, seconds)):
            prefix = rng.randrange(100)
            prefix_len = 512 if prefix < 50 else 0
            output_len = lognormal(rng, 129, MEAN_OUTPUT, 1, 1_500)
            yield TracedRequest(
                number=index,
                at=at,
                prompt_len=prefix_len + lognormal(rng, 1_020 - 256, 1_155 - 256, 20, 6_000),
                output_len=output_len,
                max_new_tokens=REST_OF_CONTEXT if rng.random() < 0.5 else max(512, output_len),
                prefix=prefix,
                prefix_len=prefix_len,
            )

    return trace


def _fleet(size: ScenarioSize, load: float, *, seconds: float = SECONDS) -> ClusterShape:
    seconds *= size.length
    return ClusterShape(
        prefill=WorkerShape(config=PREFILL, pool_tokens=262_144, times=TIMES, page_bytes=1_800_000),
        decode=WorkerShape(config=DecodeConfig(), pool_tokens=131_072, times=TIMES, page_bytes=1_800_000),
        prefill_workers=max(2, round(PREFILL_PODS * size.fleet)),
        decode_workers=max(4, round(DECODE_PODS * size.fleet)),
        routers=3,
        trace=_trace(load * CAPACITY * size.fleet, seconds),
        seconds=seconds,
        warmup_seconds=seconds / 4,
    )


# ---- what happens to a fleet ----


def _tenth(cluster: VirtualCluster, role: str) -> list[VirtualWorker]:
    """A tenth of the workers of a role, drawn by the cluster's seed."""
    workers = [worker for worker in cluster.workers.values() if worker.hello.role == role]
    return cluster.rng.sample(workers, max(1, len(workers) // 10))


def _a_tenth_dies(cluster: VirtualCluster) -> None:
    """A tenth of the pods of each role lose power at once, and come back later."""

    def strike() -> None:
        for role in WORKER_ROLES:
            for worker in _tenth(cluster, role):
                cluster.events[f"{role} died"] += 1
                cluster.end_worker(worker, SILENCE_SECONDS)
                cluster.timeline.after(
                    SILENCE_SECONDS + RESTART_SECONDS,
                    lambda role=role, uid=worker.hello.uid: cluster.start_worker(role, uid),  # type: ignore[misc]
                )

    cluster.timeline.at(START_SECONDS + cluster.shape.seconds / 2, strike)


def _upgrade_everything(cluster: VirtualCluster) -> None:
    """Every pod is ended and started again: of each kind a tenth at a time, and one router."""

    def begin() -> None:
        for role in WORKER_ROLES:
            uids = [worker.hello.uid for worker in cluster.workers.values() if worker.hello.role == role]
            for _ in range(max(1, round(UPGRADED_AT_ONCE * len(uids)))):
                _upgrade_next(uids, lambda uid, then: _upgrade_worker(cluster, uid, then))
        _upgrade_next(list(cluster.routers), lambda uid, then: _upgrade_router(cluster, uid, then))

    cluster.timeline.at(START_SECONDS + cluster.shape.seconds / 8, begin)


def _upgrade_next(uids: list[str], upgrade: Callable[[str, Callable[[], None]], None]) -> None:
    """Upgrade the first of `uids`, and when it is back the next one."""
    if uids:
        upgrade(uids.pop(0), lambda: _upgrade_next(uids, upgrade))


def _upgrade_worker(cluster: VirtualCluster, uid: str, then: Callable[[], None]) -> None:
    worker = cluster.workers[uid]

    def restart() -> None:
        cluster.start_worker("prefill" if worker.hello.role == "prefill" else "decode", uid)
        then()

    def ended() -> None:
        cluster.events[f"{worker.hello.role} upgraded"] += 1
        cluster.end_worker(worker)
        cluster.timeline.after(RESTART_SECONDS, restart)

    worker.sigterm(ended)


def _upgrade_router(cluster: VirtualCluster, uid: str, then: Callable[[], None]) -> None:
    """The new one serves before the old one is asked to end, which may take as long as its longest stream."""
    router: VirtualRouter = cluster.routers[uid]
    cluster.start_router(f"{uid}-new")

    def end_old() -> None:
        cluster.events["router upgraded"] += 1
        router.sigterm(lambda: cluster.end_router(router))
        then()

    cluster.timeline.after(RESTART_SECONDS, end_old)


# ---- what is compared ----


def _served(figures: Mapping[str, Figures]) -> Figures:
    """Shares of all requests, of each run."""
    return {f"{name}: {key}": value for name, run in figures.items() for key, value in _shares(run).items()}


def _shares(run: Figures) -> dict[str, float]:
    requests = number(run, "requests")
    completed = number(run, "outcomes", "stop") + number(run, "outcomes", "length")
    return {
        "completed_share": round(completed / requests, 5),
        "broken_share": broken_share(run),
    }


def _against_one(figures: Mapping[str, Figures]) -> Figures:
    """What more routers change, by the run with one; that of three has the scenario's name."""
    compared = _served(figures)
    if (one := figures.get("fleet, 1 router")) is not None:
        for name, run in figures.items():
            for key in ("goodput_tokens_per_second", "ttft_p50"):
                compared[f"{name}: {key}_by_one"] = round(number(run, key) / number(one, key), 4)
    return compared


def _overloaded(figures: Mapping[str, Figures]) -> Figures:
    twice = figures["twice"]
    capacity = number(twice, "pods", "decode") * POD_TOKENS_PER_SECOND
    share = number(twice, "goodput_tokens_per_second") / capacity
    return {"goodput_share_of_capacity": round(share, 4)} | _served(figures)


FLEET_SCENARIOS: dict[str, LoadScenario] = {
    "fleet": LoadScenario(
        about="200 prefill and 400 decode pods, three routers, a bursty trace at 70 % of what they can serve",
        runs=lambda size: {"fleet": _fleet(size, USUAL)},
        compared=_against_one,
    ),
    "fleet_deaths": LoadScenario(
        about="a tenth of the fleet's pods lose power at once, and are noticed by their silence",
        runs=lambda size: {"deaths": replace(_fleet(size, USUAL), faults=(_a_tenth_dies,))},
        compared=_served,
    ),
    "fleet_overload": LoadScenario(
        about="what the fleet can serve, and twice as much",
        runs=lambda size: {"capacity": _fleet(size, 1.0), "twice": _fleet(size, 2.0)},
        compared=_overloaded,
    ),
    "fleet_upgrade": LoadScenario(
        about="all pods of the fleet are replaced, a tenth at a time, and the routers one by one",
        runs=lambda size: {
            "upgrade": replace(_fleet(size, USUAL, seconds=2 * SECONDS), faults=(_upgrade_everything,))
        },
        compared=_served,
    ),
}
