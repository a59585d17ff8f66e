"""The scenarios of prefix caches: what several pods and routers make of prompts that begin alike.

Pages have 115 kB a token, as an 8B model's in bfloat16, unless a scenario says otherwise.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import replace

from decode.config import DecodeConfig
from prefill.config import PrefillConfig
from tests.benchmarks.virtual_cluster.cluster import ClusterShape
from tests.benchmarks.virtual_cluster.device import StepTimes
from tests.benchmarks.virtual_cluster.figures import Figures
from tests.benchmarks.virtual_cluster.scenario import LoadScenario, ScenarioSize, number
from tests.benchmarks.virtual_cluster.trace import DrawTrace, TracedRequest, poisson
from tests.benchmarks.virtual_cluster.worker import WorkerShape

PREFILL = PrefillConfig(chunked_prefill_size=2_048)
PAGE_BYTES = 16 * 115_000
AT_PREFILL: dict[str, object] = {
    "local_prefill": "fallback"
}  # policies of prefill and of decode are compared


# ---- prefixes that many share ----


def _prefixes(count: int, per_second: float, seconds: float) -> DrawTrace:
    def trace(rng: random.Random) -> Iterator[TracedRequest]:
        for index, at in enumerate(poisson(rng, per_second, seconds)):
            own = rng.randint(50, 250)
            yield TracedRequest(
                number=index,
                at=at,
                prompt_len=3_000 + own,
                output_len=10,
                max_new_tokens=10,
                prefix=rng.randrange(count),
                prefix_len=3_000,
            )

    return trace


def _affinity(size: ScenarioSize) -> Mapping[str, ClusterShape]:
    seconds = 30 * size.length
    shape = ClusterShape(
        prefill=WorkerShape(config=PREFILL, pool_tokens=60_000, page_bytes=100_000),
        decode=WorkerShape(config=DecodeConfig(), pool_tokens=400_000, page_bytes=100_000),
        prefill_workers=3,
        decode_workers=2,
        trace=_prefixes(40, 40, seconds),
        seconds=seconds,
        router=AT_PREFILL,
    )
    by_turns = AT_PREFILL | {"prefill_policy": "round_robin"}
    return {"cache_aware": shape, "round_robin": replace(shape, router=by_turns)}


def _hits(figures: Mapping[str, Figures]) -> Figures:
    aware, turns = (number(figures[name], "prefix_hit_share") for name in ("cache_aware", "round_robin"))
    return {
        "prefix_hit_share": aware,
        "by_that_of_round_robin": round(aware / turns, 3),
        "ttft_p50": figures["cache_aware"]["ttft_p50"],
    } | _by_routers(figures, "cache_aware")


def _shared_prefixes(size: ScenarioSize) -> Mapping[str, ClusterShape]:
    seconds = 30 * size.length
    shape = ClusterShape(
        prefill=WorkerShape(config=PREFILL, pool_tokens=60_000, page_bytes=PAGE_BYTES),
        decode=WorkerShape(config=DecodeConfig(), pool_tokens=400_000, page_bytes=PAGE_BYTES),
        prefill_workers=4,
        decode_workers=4,
        trace=_prefixes(40, 30, seconds),
        seconds=seconds,
        router=AT_PREFILL,
    )
    return {
        "forty": shape,
        "short": replace(shape, router={"local_prefill": "short"}),
        "aggregated": replace(shape, prefill_workers=0, decode=replace(shape.decode, pool_tokens=80_000)),
        "one": replace(shape, trace=_prefixes(1, 30, seconds)),
    }


def _by_routers(figures: Mapping[str, Figures], name: str) -> Figures:
    """Hits of a run with each number of routers."""
    runs = {run: each for run, each in figures.items() if run == name or run.startswith(f"{name}, ")}
    return {
        f"prefix_hit_share_of_{int(number(run, 'pods', 'routers'))}": run["prefix_hit_share"]
        for run in runs.values()
    }


def _scattered(figures: Mapping[str, Figures]) -> Figures:
    forty = {run: each for run, each in figures.items() if run.startswith("forty")}
    one = {run: each for run, each in figures.items() if run.startswith("one")}
    others = {
        f"{run}_{name}": hits
        for run in ("short", "aggregated")
        for name, hits in _by_routers(figures, run).items()
    }
    return (
        _by_routers(figures, "forty")
        | others
        | {
            "computed_most_by_least": max(number(run, "computed_most_by_least") for run in forty.values()),
            "one_prefix_computed_most_by_mean": max(
                number(run, "computed_most_by_mean") for run in one.values()
            ),
        }
    )


# ---- conversations ----


def _turns(per_second: float, seconds: float) -> DrawTrace:
    """Conversations of four to eight turns; each turn brings all that was said before, and 100 to 300 tokens more."""

    def trace(rng: random.Random) -> Iterator[TracedRequest]:
        turns: list[tuple[float, int, int]] = []  # when, of which conversation, which turn
        for talk, begun in enumerate(poisson(rng, per_second / 6, seconds)):
            at = begun
            for turn in range(rng.randint(4, 8)):
                turns.append((at, talk, turn))
                at += rng.uniform(8, 18)  # reading and writing, once the answer is there
        last: dict[int, TracedRequest] = {}
        for index, (at, talk, _) in enumerate(sorted(turns)):
            if at >= seconds:
                return
            before = last.get(talk)
            output_len = rng.randint(100, 300)
            last[talk] = TracedRequest(
                number=index,
                at=at,
                prompt_len=(before.prompt_len + before.output_len if before else 0) + rng.randint(100, 300),
                output_len=output_len,
                max_new_tokens=output_len,
                follows=before,
            )
            yield last[talk]

    return trace


def _conversations(size: ScenarioSize) -> Mapping[str, ClusterShape]:
    seconds = 90 * size.length
    times = StepTimes(decode=0.015, decode_row=0.0001)
    shape = ClusterShape(
        prefill=WorkerShape(config=PREFILL, pool_tokens=262_144, times=times, page_bytes=PAGE_BYTES),
        decode=WorkerShape(config=DecodeConfig(), pool_tokens=131_072, times=times, page_bytes=PAGE_BYTES),
        prefill_workers=4,
        decode_workers=4,
        trace=_turns(20, seconds),
        seconds=seconds,
        warmup_seconds=seconds / 3,
        router=AT_PREFILL,
    )
    by_tokens = AT_PREFILL | {"decode_policy": "total_tokens"}
    return {
        "turns": shape,
        "total_tokens": replace(shape, router=by_tokens),
        "short": replace(shape, router={"local_prefill": "short"}),
    }


def _fetched(figures: Mapping[str, Figures]) -> Figures:
    """By those of the policy that does not look into caches, with as many routers; and what `short` computes and sends.

    The latter by the same requests where prefill workers compute all prompts.
    """
    compared: Figures = {
        f"short_{key}_by_that_of_turns": round(
            number(figures["short"], key) / number(figures["turns"], key), 3
        )
        for key in ("computed_tokens_a_request", "fetched_mb_a_request", "ttft_p50", "itl_p99")
    }
    for run, each in figures.items():
        if run.startswith("turns"):
            other = figures[run.replace("turns", "total_tokens")]
            compared |= {
                f"{key}_of_{int(number(each, 'pods', 'routers'))}": round(
                    number(each, key) / number(other, key), 3
                )
                for key in ("fetched_mb_a_request", "rows_most_by_least", "ttft_p99", "itl_p99")
            }
    return compared


CACHE_SCENARIOS: dict[str, LoadScenario] = {
    "affinity": LoadScenario(
        about="40 prefixes of 3,000 tokens, 40 requests/s, three prefill pods that hold 60,000 tokens each",
        runs=_affinity,
        compared=_hits,
    ),
    "shared_prefixes": LoadScenario(
        about="40 prefixes of 3,000 tokens, and one, 30 requests/s, four prefill pods that hold 60,000 tokens each",
        runs=_shared_prefixes,
        compared=_scattered,
    ),
    "conversations": LoadScenario(
        about="conversations of four to eight turns, 20 turns/s, four prefill and four decode pods",
        runs=_conversations,
        compared=_fetched,
    ),
}
