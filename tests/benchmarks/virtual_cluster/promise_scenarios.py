"""The scenarios of promises in seconds: what is begun has its second token soon, and what cannot is refused at once.

Four prefill and four decode pods, 115 kB a token.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import replace

from decode.config import DecodeConfig
from prefill.config import PrefillConfig
from tests.benchmarks.virtual_cluster.cluster import ClusterShape
from tests.benchmarks.virtual_cluster.device import StepTimes
from tests.benchmarks.virtual_cluster.fabric import FabricSpeed
from tests.benchmarks.virtual_cluster.figures import TARGET_SECONDS, Figures
from tests.benchmarks.virtual_cluster.load_scenarios import CAPACITY, overload
from tests.benchmarks.virtual_cluster.scenario import LoadScenario, ScenarioSize, broken_share, number
from tests.benchmarks.virtual_cluster.trace import DrawTrace, TracedRequest, poisson
from tests.benchmarks.virtual_cluster.worker import WorkerShape

PREFILL = PrefillConfig(chunked_prefill_size=2_048)
PODS = 4
PAGE_BYTES = 1_840_000  # 115 kB a token
SLOW_LINK = 1e9  # bytes a second of each decode pod
TIMES = StepTimes(extend=0.005, extend_token=0.00003, decode=0.020, decode_row=0.0002)
SMALL_POOL = 12_288  # tokens: what `segue up` takes


def _prompts(per_second: float, seconds: float, least: int, most: int) -> DrawTrace:
    def trace(rng: random.Random) -> Iterator[TracedRequest]:
        for index, at in enumerate(poisson(rng, per_second, seconds)):
            yield TracedRequest(
                number=index, at=at, prompt_len=rng.randint(least, most), output_len=150, max_new_tokens=150
            )

    return trace


# ---- links that bring less than is computed ----


def _slow_link(size: ScenarioSize) -> Mapping[str, ClusterShape]:
    def shape(link: float, least: int, most: int, share: float) -> ClusterShape:
        mean_bytes = (least + most) / 2 / 16 * PAGE_BYTES
        return ClusterShape(
            prefill=WorkerShape(config=PREFILL, pool_tokens=131_072, times=TIMES, page_bytes=PAGE_BYTES),
            decode=WorkerShape(
                config=DecodeConfig(), pool_tokens=131_072, times=TIMES, page_bytes=PAGE_BYTES
            ),
            prefill_workers=PODS,
            decode_workers=PODS,
            fabric=FabricSpeed(bytes_per_second=link),
            trace=_prompts(share * PODS * link / mean_bytes, seconds, least, most),
            seconds=seconds,
            warmup_seconds=seconds / 6,
        )

    seconds = 90 * size.length
    return {
        "4,000 at 112 %": shape(SLOW_LINK, 4_000, 4_000, 1.12),
        "4,000 at 45 %": shape(SLOW_LINK, 4_000, 4_000, 0.45),
    }


def _small_pools(size: ScenarioSize) -> Mapping[str, ClusterShape]:
    seconds = 120 * size.length
    worker = WorkerShape(config=DecodeConfig(), pool_tokens=SMALL_POOL, times=TIMES, page_bytes=PAGE_BYTES)
    shape = ClusterShape(
        prefill=WorkerShape(config=PREFILL, pool_tokens=65_536, times=TIMES, page_bytes=PAGE_BYTES),
        decode=worker,
        prefill_workers=PODS,
        decode_workers=PODS,
        trace=_prompts(PODS, seconds, 100, 5_500),
        seconds=seconds,
        warmup_seconds=seconds / 6,
    )
    return {"prompts": shape}


def _promises(figures: Mapping[str, Figures]) -> Figures:
    compared: Figures = {}
    for name, run in figures.items():
        for key in ("second_token_gap_p50", "second_token_gap_p99", "long_pause_share"):
            compared[f"{name}: {key}"] = run[key]
        served = number(run, "goodput_requests_per_second")
        compared[f"{name}: goodput_requests_per_second"] = served
        compared[f"{name}: goodput_share_of_link"] = round(
            served * 4_000 / 16 * PAGE_BYTES / PODS / SLOW_LINK, 4
        )
        refused = number(run, "no_room_refusals") / number(run, "requests")
        compared[f"{name}: no_room_refusals_a_request"] = round(refused, 3)
        compared[f"{name}: broken_share"] = broken_share(run)
    return compared


# ---- a first token within two seconds ----


def _targets(size: ScenarioSize) -> Mapping[str, ClusterShape]:
    shape = overload(1.5, size)
    return {"none": shape, "2 s": replace(shape, router={"ttft_target_seconds": TARGET_SECONDS})}


def _flood(size: ScenarioSize) -> Mapping[str, ClusterShape]:
    """One tenant sends 1.6 times what decode can do, nine others 0.5 a second each."""

    def trace(rng: random.Random) -> Iterator[TracedRequest]:
        arrivals = [(at, "flood") for at in poisson(rng, 1.6 * CAPACITY, seconds)]
        arrivals += [(at, f"{n}") for n in range(9) for at in poisson(rng, 0.5, seconds)]
        for index, (at, tenant) in enumerate(sorted(arrivals)):
            yield TracedRequest(
                number=index,
                at=at,
                prompt_len=rng.randint(50, 300),
                output_len=rng.randint(100, 200),
                max_new_tokens=512,
                tenant=tenant,
                kind="flood" if tenant == "flood" else "others",
            )

    seconds = 120 * size.length
    return {"flood": replace(overload(1.0, size), trace=trace)}


def _kept(figures: Mapping[str, Figures]) -> Figures:
    compared: Figures = {}
    for name, run in figures.items():
        compared[f"{name}: within_target_per_second"] = run["within_target_per_second"]
        compared[f"{name}: goodput_share_of_capacity"] = round(
            number(run, "goodput_requests_per_second") / CAPACITY, 4
        )
        compared[f"{name}: answers_503"] = number(run, "outcomes", "503")
        for key, count in (
            ("answers_503", number(run, "outcomes", "503")),
            ("no_room_refusals", number(run, "no_room_refusals")),
        ):
            compared[f"{name}: {key}_a_request"] = round(count / number(run, "requests"), 4)
        compared[f"{name}: foreseen_error_p50"] = run["foreseen_error_p50"]
        if "others" in run:
            compared[f"{name}: others_ttft_p99"] = number(run, "others", "ttft_p99")
    return compared


PROMISE_SCENARIOS: dict[str, LoadScenario] = {
    "slow_link": LoadScenario(
        about="prompts of 4,000 tokens at 112 and 45 % of what links of 1 GB/s bring",
        runs=_slow_link,
        compared=_promises,
    ),
    "targets": LoadScenario(
        about="1.5 times what one decode pod can serve, where a first token is wanted within 2 s",
        runs=_targets,
        compared=_kept,
    ),
    "flood": LoadScenario(
        about="one tenant sends 1.6 times what one decode pod can serve, nine others 0.5/s each",
        runs=_flood,
        compared=_kept,
    ),
    "small_pools": LoadScenario(
        about="prompts of up to 5,500 tokens, 1/s for each decode pool of 12,288 tokens",
        runs=_small_pools,
        compared=_promises,
    ),
}
