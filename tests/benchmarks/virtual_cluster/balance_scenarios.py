"""The scenarios of uneven decode pods: outputs whose length nobody knows fill one pod while another has room."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import replace

from decode.config import DecodeConfig
from decode.scheduler import DecodeScheduler
from prefill.config import PrefillConfig
from tests.benchmarks.virtual_cluster.cluster import START_SECONDS, ClusterShape, VirtualCluster
from tests.benchmarks.virtual_cluster.device import StepTimes
from tests.benchmarks.virtual_cluster.fabric import FabricSpeed
from tests.benchmarks.virtual_cluster.figures import Figures
from tests.benchmarks.virtual_cluster.load_scenarios import long_outputs
from tests.benchmarks.virtual_cluster.scenario import LoadScenario, ScenarioSize, number
from tests.benchmarks.virtual_cluster.trace import (
    REST_OF_CONTEXT,
    DrawTrace,
    TracedRequest,
    lognormal,
    poisson,
)
from tests.benchmarks.virtual_cluster.worker import WorkerShape

PREFILL = PrefillConfig(chunked_prefill_size=2_048)
TIMES = StepTimes(extend=0.005, extend_token=0.00003, decode=0.020, decode_row=0.0002)
PODS = 4
POOL = 24_576  # tokens of a decode pod
PAGE_BYTES = 1_840_000  # 115 kB a token
LOOK_SECONDS = 0.05  # between two looks at the pods
RATE = 9.0  # requests a second
SLOTS = 64  # of a pod in `tight_pods`
OF_RETRACTED = "beside room, of the time with something retracted"
SLOWNESS = 4.0  # times as long: steps of a slow pod
FREE_SHARE = 0.2  # of a pool: a pod with more has room for what another one has retracted


def _heavy_tailed(per_second: float, seconds: float) -> DrawTrace:
    def trace(rng: random.Random) -> Iterator[TracedRequest]:
        for index, at in enumerate(poisson(rng, per_second, seconds)):
            yield TracedRequest(
                number=index,
                at=at,
                prompt_len=rng.randint(50, 300),
                output_len=lognormal(rng, 120, 400, 1, 6_000),
                max_new_tokens=REST_OF_CONTEXT,
            )

    return trace


def watch(cluster: VirtualCluster) -> None:
    """Count how often something is retracted, and how often another pod has room then."""

    def look() -> None:
        pods = [each.scheduler for each in cluster.workers.values()]
        decodes = [each for each in pods if isinstance(each, DecodeScheduler)]
        free = {each: each.memory.available_pages / each.memory.pool.total for each in decodes}
        out = [each for each in decodes if each._retraction.active]
        cluster.events["looks"] += 1
        if out:
            cluster.events["retracted"] += 1
            others = max((share for each, share in free.items() if each not in out), default=0.0)
            cluster.events["retracted beside room"] += others > FREE_SHARE
        if cluster.timeline.now < START_SECONDS + cluster.shape.seconds:
            cluster.timeline.after(LOOK_SECONDS, look)

    cluster.timeline.at(START_SECONDS, look)


def _uneven(size: ScenarioSize) -> Mapping[str, ClusterShape]:
    seconds = 120 * size.length
    worker = WorkerShape(config=DecodeConfig(), pool_tokens=POOL, times=TIMES, page_bytes=PAGE_BYTES)
    shape = ClusterShape(
        prefill=WorkerShape(config=PREFILL, pool_tokens=262_144, times=TIMES, page_bytes=PAGE_BYTES),
        decode=worker,
        prefill_workers=2,
        decode_workers=PODS,
        fabric=FabricSpeed(bytes_per_second=10e9),
        trace=_heavy_tailed(RATE, seconds),
        seconds=seconds,
        warmup_seconds=seconds / 6,
        faults=(watch,),
    )
    return {"balanced": shape, "left": replace(shape, router={"balance_steps": 0})}


def _beside_room(figures: Mapping[str, Figures]) -> Figures:
    compared: Figures = {}
    for name, run in figures.items():
        looks = number(run, "events", "looks")
        for event in ("retracted", "retracted beside room"):
            compared[f"{name}: {event}"] = round(number(run, "events", event) / looks, 4)
        beside_room = number(run, "events", "retracted beside room")
        compared[f"{name}: {OF_RETRACTED}"] = round(
            beside_room / max(1.0, number(run, "events", "retracted")), 4
        )
        for key in ("pause_max", "long_pause_share", "second_token_gap_p99", "goodput_tokens_per_second"):
            compared[f"{name}: {key}"] = run[key]
    return compared


def _tight_pods(size: ScenarioSize) -> Mapping[str, ClusterShape]:
    demanded = SLOTS * (250 + 500)  # tokens of a pod: every slot with a request at its end
    seconds, per_second = 12 * size.length, 120

    def pods(pool_tokens: int) -> ClusterShape:
        pod = long_outputs(SLOTS, pool_tokens, seconds, per_second)
        return replace(pod, prefill_workers=2, decode_workers=PODS)

    return {"tight": pods(int(0.6 * demanded)), "ample": pods(4 * demanded)}


def _shares_of_ample(figures: Mapping[str, Figures]) -> Figures:
    goodput = {name: number(run, "goodput_tokens_per_second") for name, run in figures.items()}
    return {
        name: round(tokens / goodput[name.replace("tight", "ample")], 4)
        for name, tokens in goodput.items()
        if name.startswith("tight")
    }


def _slow_pods(size: ScenarioSize) -> Mapping[str, ClusterShape]:
    """Of four pods of a role one takes four times as long, so three and a quarter are there; and none does."""

    def trace(rng: random.Random) -> Iterator[TracedRequest]:
        for index, at in enumerate(poisson(rng, 40.0, seconds)):
            yield TracedRequest(
                number=index,
                at=at,
                prompt_len=rng.randint(500, 3_500),
                output_len=rng.randint(50, 250),
                max_new_tokens=256,
            )

    seconds = 30 * size.length
    worker = WorkerShape(config=DecodeConfig(), pool_tokens=262_144, times=TIMES, page_bytes=PAGE_BYTES)
    shape = ClusterShape(
        prefill=replace(worker, config=PREFILL),
        decode=worker,
        prefill_workers=PODS,
        decode_workers=PODS,
        fabric=FabricSpeed(bytes_per_second=40e9),
        trace=trace,
        seconds=seconds,
        warmup_seconds=seconds / 6,
    )
    slow = replace(shape, slowness={"prefill-0": SLOWNESS, "decode-0": SLOWNESS})
    return {
        "even": shape,
        "slow": slow,
        "slow, fallback": replace(slow, router={"local_prefill": "fallback"}),
    }


def _given(figures: Mapping[str, Figures]) -> Figures:
    """How much more a fast pod computed than the slow one, and how long clients waited."""
    return {
        f"{name}: {key}": figures[name][key]
        for name in figures
        for key in ("computed_most_by_least", "rows_most_by_least", "ttft_p50", "ttft_p99", "itl_p99")
    }


BALANCE_SCENARIOS: dict[str, LoadScenario] = {
    "balance": LoadScenario(
        about="four decode pods and heavy-tailed outputs without max_tokens: a full pod beside one with room",
        runs=_uneven,
        compared=_beside_room,
    ),
    "tight_pods": LoadScenario(
        about="four decode pods of 64 slots, a backlog, and 60 % of the KV that they demand; and ample ones",
        runs=_tight_pods,
        compared=_shares_of_ample,
    ),
    "slow_pods": LoadScenario(
        about="one of four prefill pods and one of four decode pods take four times as long",
        runs=_slow_pods,
        compared=_given,
    ),
}
