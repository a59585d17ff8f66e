"""The scenarios of a few pods under load: each shows one way in which service can falter.

The sizes of the fleets are fixed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import replace

from decode.config import DecodeConfig
from prefill.config import PrefillConfig
from tests.benchmarks.virtual_cluster.cluster import START_SECONDS, ClusterShape, VirtualCluster
from tests.benchmarks.virtual_cluster.device import StepTimes
from tests.benchmarks.virtual_cluster.fabric import FabricSpeed
from tests.benchmarks.virtual_cluster.figures import Figures
from tests.benchmarks.virtual_cluster.scenario import LoadScenario, ScenarioSize, broken_share, number
from tests.benchmarks.virtual_cluster.trace import REST_OF_CONTEXT, DrawTrace, TracedRequest, poisson
from tests.benchmarks.virtual_cluster.worker import WorkerShape

PREFILL = PrefillConfig(chunked_prefill_size=2_048)  # a device for which small steps are dear
SMALL_POOL = 12_288  # tokens: what `segue up` takes
MEDIUM = StepTimes(extend=0.005, extend_token=0.0002, decode=0.017, decode_row=0.0002)
# Computed for Qwen3-14B in bfloat16 on an H200, not measured
LARGE_MODEL = StepTimes(extend=0.004, extend_token=0.0000624, decode=0.0081, decode_row=0.000046)
SLOW = replace(MEDIUM, decode=0.020)


# ---- chats without max_tokens ----


def _no_max_tokens(size: ScenarioSize) -> Mapping[str, ClusterShape]:
    def draw(share: float) -> DrawTrace:
        def trace(rng: random.Random) -> Iterator[TracedRequest]:
            for index, at in enumerate(poisson(rng, 8, seconds)):
                most = REST_OF_CONTEXT if rng.random() < share else 150
                yield TracedRequest(
                    number=index,
                    at=at,
                    prompt_len=rng.randint(50, 300),
                    output_len=150,
                    max_new_tokens=most,
                    kind="without" if most == REST_OF_CONTEXT else "with",
                )

        return trace

    seconds = 60 * size.length
    shape = ClusterShape(
        prefill=WorkerShape(config=PREFILL, pool_tokens=65_536, times=MEDIUM),
        decode=WorkerShape(config=DecodeConfig(), pool_tokens=SMALL_POOL, times=MEDIUM),
        trace=draw(0.5),
        seconds=seconds,
    )
    return {"half": shape, "none": replace(shape, trace=draw(0.0))}


def _without_and_with(figures: Mapping[str, Figures]) -> Figures:
    half, none = (number(figures[name], "second_token_gap_p99") for name in ("half", "none"))
    return {
        "second_token_gap_p99": half,
        "by_that_with_max_tokens": round(half / none, 3),
        "broken_share": broken_share(figures["half"]),
    }


# ---- long prompts on a small pool ----


def _long_prompts(size: ScenarioSize) -> Mapping[str, ClusterShape]:
    def trace(rng: random.Random) -> Iterator[TracedRequest]:
        for index, at in enumerate(poisson(rng, 1.2, seconds)):
            most = REST_OF_CONTEXT if rng.random() < 0.5 else 150
            yield TracedRequest(
                number=index,
                at=at,
                prompt_len=rng.randint(100, 5_500),
                output_len=150,
                max_new_tokens=most,
            )

    seconds = 120 * size.length
    shape = ClusterShape(
        prefill=WorkerShape(config=PREFILL, pool_tokens=65_536, times=SLOW),
        decode=WorkerShape(config=DecodeConfig(), pool_tokens=SMALL_POOL, times=SLOW),
        trace=trace,
        seconds=seconds,
    )
    return {"prompts": shape}


def _first_token(figures: Mapping[str, Figures]) -> Figures:
    prompts = figures["prompts"]
    return {
        "ttft_p50": prompts["ttft_p50"],
        "second_token_gap_p99": prompts["second_token_gap_p99"],
        "broken_share": broken_share(prompts),
    }


# ---- chats that outgrow the pool, and prompts beside them ----


def _outgrown_pool(size: ScenarioSize) -> Mapping[str, ClusterShape]:
    """Twelve chats grow until only four of them fit; six prompts of 4,400 tokens come meanwhile.

    Once with host memory for all that is retracted, and once with as much as is the default.
    """

    def trace(rng: random.Random) -> Iterator[TracedRequest]:
        chats = [(0.05 * number, "chat", rng.randint(50, 300)) for number in range(12)]
        prompts = [(20.0 + 4 * number, "prompt", 4_400) for number in range(6)]
        for index, (at, kind, tokens) in enumerate(chats + prompts):
            is_chat = kind == "chat"
            yield TracedRequest(
                number=index,
                at=at,
                prompt_len=tokens,
                output_len=int(2_700 * size.length) if is_chat else 150,
                max_new_tokens=REST_OF_CONTEXT if is_chat else 150,
                kind=kind,
            )

    worker = WorkerShape(
        config=DecodeConfig(), pool_tokens=SMALL_POOL, times=MEDIUM, page_bytes=370_000, host_share=4.0
    )
    shape = ClusterShape(
        prefill=WorkerShape(config=PREFILL, pool_tokens=SMALL_POOL, times=MEDIUM, page_bytes=370_000),
        decode=worker,
        trace=trace,
        seconds=40,
    )
    return {"outgrown": shape, "recomputed": replace(shape, decode=replace(worker, host_share=0.25))}


def _pauses(figures: Mapping[str, Figures]) -> Figures:
    outgrown, recomputed = figures["outgrown"], figures["recomputed"]
    return {
        "pause_max": outgrown["pause_max"],
        "pause_max_recomputed": recomputed["pause_max"],
        "seconds_by_those_copied": round(
            number(recomputed, "virtual_seconds") / number(outgrown, "virtual_seconds"), 2
        ),
        "broken_share": broken_share(outgrown) + broken_share(recomputed),
    }


# ---- more than decode can do ----

CAPACITY = 12.8  # requests a second of the decode pod in the overload scenarios
OVERLOADED_DECODE = StepTimes(decode=0.020, decode_row=0.0001875)  # 60 rows, 31.25 ms, 150 tokens


def overload(factor: float, size: ScenarioSize) -> ClusterShape:
    """One decode pod, and so many times what it can serve."""

    def trace(rng: random.Random) -> Iterator[TracedRequest]:
        for index, at in enumerate(poisson(rng, factor * CAPACITY, seconds)):
            yield TracedRequest(
                number=index,
                at=at,
                prompt_len=rng.randint(50, 300),
                output_len=rng.randint(100, 200),
                max_new_tokens=512,
            )

    seconds = 120 * size.length
    return ClusterShape(
        prefill=WorkerShape(config=PREFILL, pool_tokens=131_072),
        decode=WorkerShape(config=DecodeConfig(), pool_tokens=65_536, times=OVERLOADED_DECODE),
        trace=trace,
        seconds=seconds,
        warmup_seconds=seconds / 6,
    )


def _share_of_capacity(figures: Mapping[str, Figures]) -> Figures:
    overload = figures["overload"]
    served = number(overload, "goodput_requests_per_second")
    return {
        "goodput_share_of_capacity": round(served / CAPACITY, 4),
        "broken_share": broken_share(overload),
        "second_token_gap_p99": overload["second_token_gap_p99"],
    }


# ---- short prompts behind long ones ----


def _short_behind_long(size: ScenarioSize) -> Mapping[str, ClusterShape]:
    def draw(kinds: str) -> DrawTrace:
        def trace(rng: random.Random) -> Iterator[TracedRequest]:
            short = [(at, "short", rng.randint(30, 80)) for at in poisson(rng, 2, seconds)]
            long = [(8.0 * n + 4, "long", 6_000) for n in range(int(seconds / 8))]
            for index, (at, kind, tokens) in enumerate(sorted(short + long)):
                if kind in kinds:
                    yield TracedRequest(
                        number=index,
                        at=at,
                        prompt_len=tokens,
                        output_len=30,
                        max_new_tokens=30,
                        kind=kind,
                    )

        return trace

    seconds = 80 * size.length
    times = StepTimes(extend=0.004, extend_token=0.0005)  # 2,000 tokens/s, 0.26 s a chunk
    shape = ClusterShape(
        prefill=WorkerShape(
            config=PrefillConfig(chunked_prefill_size=512),
            pool_tokens=65_536,
            times=times,
            page_bytes=100_000,
        ),
        decode=WorkerShape(config=DecodeConfig(), pool_tokens=65_536, page_bytes=100_000),
        trace=draw("short long"),
        seconds=seconds,
    )
    return {
        "together": shape,
        "short alone": replace(shape, trace=draw("short")),
        "long alone": replace(shape, trace=draw("long")),
    }


def _short_and_long(figures: Mapping[str, Figures]) -> Figures:
    together = figures["together"]
    slower = number(together, "long", "ttft_p50") / number(figures["long alone"], "ttft_p50")
    return {
        "short_ttft_p90": number(together, "short", "ttft_p90"),
        "short_ttft_p90_alone": number(figures["short alone"], "ttft_p90"),
        "long_slowdown": round(slower, 3),
    }


# ---- a pod leaves while all slots are taken ----


def _drain_one(cluster: VirtualCluster) -> None:
    def drain() -> None:
        worker = cluster.workers["decode-0"]
        cluster.events["running_at_sigterm"] += len(worker.scheduler.requests)
        worker.sigterm(lambda: cluster.end_worker(worker))

    cluster.timeline.at(START_SECONDS + cluster.shape.seconds / 2, drain)


def _drain_at_saturation(size: ScenarioSize) -> Mapping[str, ClusterShape]:
    def trace(rng: random.Random) -> Iterator[TracedRequest]:
        for index, at in enumerate(poisson(rng, 1.6, seconds)):  # three pods of 16 slots serve 1.0
            yield TracedRequest(
                number=index,
                at=at,
                prompt_len=rng.randint(50, 300),
                output_len=rng.randint(1_500, 2_500),
                max_new_tokens=2_500,
            )

    seconds = 120 * size.length
    shape = ClusterShape(
        prefill=WorkerShape(config=PREFILL, pool_tokens=131_072),
        decode=WorkerShape(
            config=DecodeConfig(max_running_requests=16),
            pool_tokens=65_536,
            times=StepTimes(decode=0.020, decode_row=0.0001),
        ),
        decode_workers=3,
        trace=trace,
        seconds=seconds,
        faults=(_drain_one,),
    )
    return {"drain": shape}


def _migrated_share(figures: Mapping[str, Figures]) -> Figures:
    drain = figures["drain"]
    migrated = number(drain, "migrations", "migrated drain")
    recomputed = number(drain, "migrations", "recomputed drain") + number(
        drain, "continuations", "lost_decode"
    )
    return {
        "migrated": migrated,
        "recomputed": recomputed,
        "migrated_share": round(migrated / max(1, migrated + recomputed), 4),
    }


# ---- pages that are short, and pages that a cache holds ----

FAST_LINKS = FabricSpeed(bytes_per_second=10e9)
STEPS_OF_5_MS = StepTimes(
    extend=0.001, extend_token=0.000002, decode=0.005, decode_row=0.0, copied_page=0.00018
)


def long_outputs(slots: int, pool_tokens: int, seconds: float, per_second: float) -> ClusterShape:
    """One pod of each role; `per_second` outputs of 200 to 800 tokens come, and a step takes 5 ms whatever it has."""

    def trace(rng: random.Random) -> Iterator[TracedRequest]:
        for index, at in enumerate(poisson(rng, per_second, seconds)):
            yield TracedRequest(
                number=index,
                at=at,
                prompt_len=rng.randint(100, 400),
                output_len=rng.randint(200, 800),
                max_new_tokens=2_048,
            )

    return ClusterShape(
        prefill=WorkerShape(config=PREFILL, pool_tokens=262_144, times=STEPS_OF_5_MS),
        decode=WorkerShape(
            config=DecodeConfig(max_running_requests=slots, tenant_share_max=1.0),
            pool_tokens=pool_tokens,
            times=STEPS_OF_5_MS,
        ),
        router={"tenant_share_max": 1.0},
        fabric=FAST_LINKS,
        trace=trace,
        seconds=seconds,
        warmup_seconds=seconds / 3,
    )


def _tight_pool(size: ScenarioSize) -> Mapping[str, ClusterShape]:
    demanded = 256 * (250 + 500)  # tokens: every slot with a request at its end
    seconds, per_second = 12 * size.length, 120
    return {
        "tight": long_outputs(256, int(0.6 * demanded), seconds, per_second),
        "ample": long_outputs(256, 4 * demanded, seconds, per_second),
    }


def _share_of_ample(figures: Mapping[str, Figures]) -> Figures:
    tight, ample = (number(figures[name], "goodput_tokens_per_second") for name in ("tight", "ample"))
    refused = number(figures["tight"], "no_room_refusals") / number(figures["tight"], "requests")
    return {
        "share_of_ample": round(tight / ample, 4),
        "no_room_refusals_a_request": round(refused, 3),
    }


def _satout(size: ScenarioSize) -> Mapping[str, ClusterShape]:
    return {"warm tree": long_outputs(128, 200_000, 12 * size.length, 60)}


# ---- a queue policy that would starve long prompts ----


def _ageing(size: ScenarioSize) -> Mapping[str, ClusterShape]:
    """A flood of short prompts with a cached prefix, a little more than can be computed, and some long ones."""

    def trace(rng: random.Random) -> Iterator[TracedRequest]:
        arrivals = [(at, "short") for at in poisson(rng, 31, seconds)]
        arrivals += [(8.0 * turn + 4, "long") for turn in range(int(seconds / 8))]
        for index, (at, kind) in enumerate(sorted(arrivals)):
            is_short = kind == "short"
            yield TracedRequest(
                number=index,
                at=at,
                prompt_len=512 + rng.randint(100, 200) if is_short else 4_000,
                output_len=20 if is_short else 2,
                max_new_tokens=20 if is_short else 2,
                prefix=0 if is_short else -1,
                prefix_len=512 if is_short else 0,
                kind=kind,
            )

    def shape(ageing_seconds: float) -> ClusterShape:
        config = PREFILL.model_copy(update={"queue_policy": "lpm", "ageing_seconds": ageing_seconds})
        return ClusterShape(
            prefill=WorkerShape(config=config, pool_tokens=262_144, times=MEDIUM),
            decode=WorkerShape(config=DecodeConfig(), pool_tokens=262_144, times=LARGE_MODEL),
            router={"ready_max": 4_096, "local_prefill": "fallback"},
            trace=trace,
            seconds=seconds,
        )

    seconds = 120 * size.length
    return {"never": shape(86_400.0), "5 s": shape(PREFILL.ageing_seconds)}


def _longest_waits(figures: Mapping[str, Figures]) -> Figures:
    longest = {name: number(run, "long", "ttft_p99") for name, run in figures.items()}
    compared: Figures = {f"{name}: long ttft_max": seconds for name, seconds in longest.items()}
    compared |= {f"{name}: short ttft_p50": number(run, "short", "ttft_p50") for name, run in figures.items()}
    return compared | {"long_by_that_without": round(longest["5 s"] / longest["never"], 3)}


# ---- two GPUs: one for each role, or both for both ----


def _both_roles(size: ScenarioSize) -> Mapping[str, ClusterShape]:
    def trace(rng: random.Random) -> Iterator[TracedRequest]:
        for index, at in enumerate(poisson(rng, 14.0, seconds)):
            yield TracedRequest(
                number=index,
                at=at,
                prompt_len=rng.randint(200, 1_848),
                output_len=rng.randint(56, 456),
                max_new_tokens=512,
            )

    seconds = 60 * size.length
    decode = DecodeConfig(local_tokens_max=2_048, itl_target_seconds=0.04, max_running_requests=256)
    apart = ClusterShape(
        prefill=WorkerShape(config=PREFILL, pool_tokens=500_000, times=LARGE_MODEL),
        decode=WorkerShape(config=decode, pool_tokens=500_000, times=LARGE_MODEL),
        fabric=FAST_LINKS,
        trace=trace,
        seconds=seconds,
        warmup_seconds=seconds / 3,
    )
    return {
        "1 + 1": replace(apart, router={"local_prefill": "never"}),
        "0 + 2": replace(
            apart, prefill_workers=0, decode_workers=2, router={"local_prefill": "fallback"}
        ),  # with `short` streams make room for prompts there, too
        "short": apart,
    }


def _whole_and_apart(figures: Mapping[str, Figures]) -> Figures:
    apart, whole = figures["1 + 1"], figures["0 + 2"]
    by_apart = {
        f"{name}_by_that_of_1_1": round(number(whole, name) / number(apart, name), 3)
        for name in ("ttft_p50", "ttft_p99", "goodput_tokens_per_second")
    }
    by_better = min(apart, whole, key=lambda run: number(run, "ttft_p99"))
    by_apart |= {
        f"short_{name}_by_the_better": round(number(figures["short"], name) / number(by_better, name), 3)
        for name in ("ttft_p99", "goodput_tokens_per_second")
    }
    return {**by_apart, "ttft_p50": whole["ttft_p50"], "itl_p99": whole["itl_p99"]}


LOAD_SCENARIOS: dict[str, LoadScenario] = {
    "no_max_tokens": LoadScenario(
        about="8 requests/s on a decode pool of 12,288 tokens, half of them without max_tokens",
        runs=_no_max_tokens,
        compared=_without_and_with,
    ),
    "long_prompts": LoadScenario(
        about="prompts of up to 5,500 tokens, 1.2/s, on a decode pool of 12,288 tokens",
        runs=_long_prompts,
        compared=_first_token,
    ),
    "outgrown_pool": LoadScenario(
        about="twelve chats that grow until four fit into a pool of 12,288 tokens, and six prompts of 4,400 tokens",
        runs=_outgrown_pool,
        compared=_pauses,
    ),
    "both_roles": LoadScenario(
        about="14 requests/s of 1,024 and 256 tokens on two GPUs with the step times of a 14B model",
        runs=_both_roles,
        compared=_whole_and_apart,
    ),
    "overload_1.5": LoadScenario(
        about="1.5 times what one decode pod can serve",
        runs=lambda size: {"overload": overload(1.5, size)},
        compared=_share_of_capacity,
    ),
    "overload_2": LoadScenario(
        about="twice what one decode pod can serve",
        runs=lambda size: {"overload": overload(2.0, size)},
        compared=_share_of_capacity,
    ),
    "short_behind_long": LoadScenario(
        about="prompts of 30-80 tokens beside one of 6,000 each 8 s, at 2,000 tokens/s",
        runs=_short_behind_long,
        compared=_short_and_long,
    ),
    "drain_at_saturation": LoadScenario(
        about="one of three decode pods drains while every slot is wanted",
        runs=_drain_at_saturation,
        compared=_migrated_share,
    ),
    "tight_pool": LoadScenario(
        about="256 slots and a backlog on a pool of 60 % of the KV that they demand, and on an ample one",
        runs=_tight_pool,
        compared=_share_of_ample,
    ),
    "ageing": LoadScenario(
        about="a flood of short prompts that lpm prefers, and a long prompt each eight seconds",
        runs=_ageing,
        compared=_longest_waits,
    ),
    "satout": LoadScenario(
        about="rows that miss a step although pages could be evicted: an ample pool whose tree is warm",
        runs=_satout,
        compared=lambda figures: {"rows_without_page": figures["warm tree"]["rows_without_page"]},
    ),
}
