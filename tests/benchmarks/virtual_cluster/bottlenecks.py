"""Deployments with one planted bottleneck each, for `segue doctor --live`: what it is, and how it came about.

All are scraped from 10 to 20 s after their first request. Where nothing is planted, a device takes what a small model
takes on a GPU, the link brings 10 GB/s, and the load is below what the pods can do.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from decode.config import DecodeConfig
from prefill.config import PrefillConfig
from shared.local.bottleneck import Cause
from tests.benchmarks.virtual_cluster.cluster import START_SECONDS, ClusterShape
from tests.benchmarks.virtual_cluster.device import StepTimes
from tests.benchmarks.virtual_cluster.fabric import FabricSpeed
from tests.benchmarks.virtual_cluster.figures import AnswerRecord
from tests.benchmarks.virtual_cluster.trace import DrawTrace, TracedRequest, poisson
from tests.benchmarks.virtual_cluster.worker import WorkerShape

SECONDS = 25.0
TIMES = StepTimes(extend=0.004, extend_token=0.00005, decode=0.010, decode_row=0.0001)
PREFILL = WorkerShape(config=PrefillConfig(chunked_prefill_size=2_048), pool_tokens=262_144, times=TIMES)
DECODE = WorkerShape(config=DecodeConfig(max_running_requests=128), pool_tokens=262_144, times=TIMES)


@dataclass(frozen=True, slots=True)
class Planted:
    """A deployment, and what holds it back."""

    cause: Cause
    shape: ClusterShape


def load(
    per_second: float,
    prompts: tuple[int, int] = (100, 600),
    outputs: tuple[int, int] = (50, 250),
    tenants: Mapping[str, float] | None = None,
) -> DrawTrace:
    """Requests that come whatever becomes of them; `tenants`: the share of each key."""

    def trace(rng: random.Random) -> Iterator[TracedRequest]:
        names, shares = list(tenants or {"": 1.0}), list((tenants or {"": 1.0}).values())
        for number, at in enumerate(poisson(rng, per_second, SECONDS)):
            output_len = rng.randint(*outputs)
            yield TracedRequest(
                number=number,
                at=at,
                prompt_len=rng.randint(*prompts),
                output_len=output_len,
                max_new_tokens=output_len,
                tenant=rng.choices(names, shares)[0],
            )

    return trace


def streams(
    count: int, prompt_len: int = 300, output_len: int = 200
) -> tuple[DrawTrace, Callable[[AnswerRecord], TracedRequest | None]]:
    """A client that has `count` requests open, and sends the next when one has ended."""

    def request(number: int, at: float) -> TracedRequest:
        return TracedRequest(
            number=number, at=at, prompt_len=prompt_len, output_len=output_len, max_new_tokens=output_len
        )

    def trace(rng: random.Random) -> Iterator[TracedRequest]:
        return (request(number, rng.random()) for number in range(count))

    def follow_up(record: AnswerRecord) -> TracedRequest | None:
        at = record.ended_at - START_SECONDS
        return request(record.traced.number + count, at) if at < SECONDS else None

    return trace, follow_up


def pods(**parts: object) -> ClusterShape:
    """One pod of each role, with these parts instead of the usual ones."""
    usual = ClusterShape(prefill=PREFILL, decode=DECODE, trace=load(5), seconds=SECONDS)
    return replace(usual, **parts)  # type: ignore[arg-type]


def closed(count: int, **parts: object) -> ClusterShape:
    """`pods` under a client that keeps `count` requests open."""
    trace, follow_up = streams(count)
    return pods(trace=trace, follow_up=follow_up, **parts)


def slower(shape: WorkerShape, **times: float) -> WorkerShape:
    """A worker whose device has these times."""
    return replace(shape, times=replace(shape.times, **times))


PREFILL_ALONE = {"local_prefill": "never"}
FEW_SLOTS = replace(DECODE, config=DecodeConfig(max_running_requests=8))
GREEDY = {"greedy": 0.92, "modest": 0.05, "small": 0.03}

PLANTED: Mapping[str, Planted] = {
    # ---- prefill
    "long prompts": Planted("prefill", pods(trace=load(6, (3_000, 7_000)), router=PREFILL_ALONE)),
    "a slow prefill device": Planted(
        "prefill", pods(prefill=slower(PREFILL, extend_token=0.001), router=PREFILL_ALONE, trace=load(6))
    ),
    "one prefill pod for four of decode": Planted(
        "prefill",
        pods(decode_workers=4, trace=load(90, (400, 900), (20, 60)), router=PREFILL_ALONE),
    ),
    "one of two prefill pods is slow": Planted(
        "prefill",
        pods(
            prefill_workers=2,
            slowness={"prefill-1": 25.0},
            trace=load(20, (800, 1_600), (20, 60)),
            router=PREFILL_ALONE | {"prefill_policy": "total_tokens"},
        ),
    ),
    # ---- decode
    "more streams than slots": Planted("decode", pods(decode=FEW_SLOTS, trace=load(10))),
    "a small KV pool": Planted(
        "decode", pods(decode=replace(DECODE, pool_tokens=8_192), trace=load(14, (200, 600), (200, 400)))
    ),
    "slow steps": Planted("decode", closed(16, decode=slower(DECODE, decode=0.4))),
    "one of three decode pods is slow": Planted(
        "decode", closed(24, decode_workers=3, slowness={"decode-1": 8.0})
    ),
    "long outputs": Planted(
        "decode",
        pods(
            decode=replace(DECODE, config=DecodeConfig(max_running_requests=32)),
            trace=load(12, outputs=(400, 800)),
        ),
    ),
    # ---- KV link
    "a throttled link": Planted(
        "kv link", pods(fabric=FabricSpeed(bytes_per_second=60e6), router=PREFILL_ALONE)
    ),
    "a link far too slow": Planted(
        "kv link", pods(fabric=FabricSpeed(bytes_per_second=8e6), trace=load(3), router=PREFILL_ALONE)
    ),
    "long prompts over a slow link": Planted(
        "kv link",
        pods(fabric=FabricSpeed(bytes_per_second=200e6), trace=load(4, (2_000, 4_000)), router=PREFILL_ALONE),
    ),
    # ---- router
    "a router without a core": Planted("router", pods(router_event_seconds=0.02, trace=load(6))),
    "one router for many streams": Planted(
        "router", closed(200, decode_workers=4, prefill_workers=2, router_event_seconds=0.003)
    ),
    # ---- tenants
    "a greedy key at decode": Planted("tenant", pods(decode=FEW_SLOTS, trace=load(12, tenants=GREEDY))),
    "a greedy key at prefill": Planted(
        "tenant", pods(trace=load(6, (3_000, 7_000), tenants=GREEDY), router=PREFILL_ALONE)
    ),
    # ---- client
    "few requests": Planted("client", pods(trace=load(1))),
    "four streams": Planted("client", closed(4)),
    "a modest load on many pods": Planted(
        "client", pods(prefill_workers=2, decode_workers=4, routers=2, trace=load(20))
    ),
}
IDLE = pods(trace=lambda _: iter(()))
