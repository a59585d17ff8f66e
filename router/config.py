"""Settings of a router: where it listens, whom it dials, its bounds.

The core and the HTTP side are given this struct as it is: nothing else holds a default.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from shared.process.settings import Count, Port, PositiveInt, ProcessConfig, Seconds

Policy = Literal[
    "round_robin", "total_requests", "total_tokens", "cache_aware", "follow_bootstrap_room", "power_of_two"
]


class RouterConfig(ProcessConfig, frozen=True, kw_only=True):
    """Segue's router: OpenAI's HTTP API in front of prefill and decode workers."""

    model: Annotated[
        str, Meta(description="folder with tokenizer, chat template and config; the router reads no weights")
    ] = ""
    served_model_name: Annotated[
        str, Meta(description="what clients call the model; empty: the name of its folder")
    ] = ""
    port: Annotated[Port, Meta(description="OpenAI's API, probes and metrics")] = 8000
    discovery: Annotated[
        Literal["static", "kubernetes"],
        Meta(description="where workers are found: in --workers, or among the pods of a namespace"),
    ] = "static"
    workers: Annotated[
        tuple[str, ...],
        Meta(description="static discovery: prefill=HOST:PORT and decode=HOST:PORT, their links ports"),
    ] = ()
    namespace: Annotated[
        str, Meta(description="where the workers' pods are; empty: the namespace of this pod")
    ] = ""
    pod_selector: Annotated[
        str,
        Meta(description="labels of this release's pods, name=value,…: other releases live beside it"),
    ] = ""
    relist_seconds: Annotated[
        Seconds, Meta(description="between two full lists of pods: whatever a watch missed is mended then")
    ] = 30.0
    watch_read_seconds: Annotated[
        Seconds,
        Meta(description="a watch lasts so long at most: the API server may have gone without a word"),
    ] = 10.0
    tokenizer_threads: Annotated[
        PositiveInt, Meta(description="threads that tokenize, off the event loop; tokenizers release the GIL")
    ] = 2
    max_body_bytes: Annotated[
        PositiveInt,
        Meta(description="a larger request body is a 413; a prompt of a million tokens is smaller"),
    ] = 4 << 20
    bodies_bytes_max: Annotated[
        PositiveInt, Meta(description="bodies being read at one time; above it 429, before memory runs out")
    ] = 256 << 20
    body_seconds_max: Annotated[
        Seconds, Meta(description="until a body has arrived: a slow sender must not hold memory for long")
    ] = 30.0
    prompts_max: Annotated[
        PositiveInt, Meta(description="prompts in one request: each is a request to the fleet")
    ] = 64
    tokenizing_max: Annotated[
        Count, Meta(description="requests waiting for the tokenizer's threads; above it 429")
    ] = 256
    stream_backlog_bytes: Annotated[
        PositiveInt,
        Meta(description="unread output after which a client is cut: it reads slower than it types"),
    ] = 1 << 20
    keepalive_seconds: Annotated[
        Seconds, Meta(description="a stream silent for so long gets a comment line: proxies cut at 60 s")
    ] = 10.0
    queue_max: Annotated[
        PositiveInt,
        Meta(description="waiting requests; above it 429: a later answer would come too late anyway"),
    ] = 1024
    ready_max: Annotated[
        PositiveInt, Meta(description="requests in prefill or ready: each ties up pages of a prefill worker")
    ] = 512
    prefill_policy: Annotated[
        Policy, Meta(description="placement of prefill; a computed prefix is the cheapest one")
    ] = "cache_aware"
    decode_policy: Annotated[
        Policy, Meta(description="placement of decode; KV held is what slows a step and fills a pool")
    ] = "total_tokens"
    losses_max: Annotated[
        PositiveInt,
        Meta(description="lost attempts of one request, so that one that kills workers cannot kill all"),
    ] = 3
    waiting_seconds_max: Annotated[
        Seconds, Meta(description="until a worker takes a new request; then 503")
    ] = 30.0
    ready_seconds_max: Annotated[
        Seconds, Meta(description="from the first token until a decode worker has room; then 503")
    ] = 30.0
    worker_return_seconds: Annotated[
        Seconds, Meta(description="a broken-off stream waits so long for a worker: one restarts within it")
    ] = 60.0
    request_seconds_max: Annotated[
        float,
        Meta(ge=0.0, description="the whole request, then 504; 0: no limit, long outputs are legitimate"),
    ] = 0.0
    renew_seconds: Annotated[
        Seconds, Meta(description="between renewals of a lease; several fit into the worker's leaseSeconds")
    ] = 1.0
    endpoint_lag_seconds: Annotated[
        Seconds,
        Meta(
            description="after SIGTERM requests are still taken: until every proxy knows that this pod leaves"
        ),
    ] = 5.0
    drain_seconds: Annotated[
        Seconds,
        Meta(
            description="after that, for open streams to end; then they are cut. A second SIGTERM cuts them"
        ),
    ] = 300.0
    retry_after_seconds: Annotated[Seconds, Meta(description="told to clients with 429 and 503")] = 1.0
    no_room_seconds: Annotated[
        Seconds,
        Meta(description="a worker that refused is left alone so long: as often as it tells its load"),
    ] = 0.1
    prefilling_per_slot: Annotated[
        float,
        Meta(gt=0.0, description="outstanding requests a prefill slot: one computes, one stands behind it"),
    ] = 2.0
    cache_hit_tokens_min: Annotated[
        Count, Meta(description="a shorter expected hit saves too little to unbalance the fleet")
    ] = 128
    imbalance_tokens_max: Annotated[
        Count, Meta(description="above this gap in queued tokens a hit no longer attracts")
    ] = 8192
    imbalance_ratio_max: Annotated[
        float, Meta(ge=1.0, description="… if the fullest also has so many times the tokens of the emptiest")
    ] = 1.5
    prefix_blocks_max: Annotated[
        PositiveInt, Meta(description="remembered prefix blocks a worker: about a million tokens of prompts")
    ] = 16384
    ended_requests_max: Annotated[
        PositiveInt, Meta(description="ended requests kept for /debug/requests")
    ] = 1000

    @property
    def model_name(self) -> str:
        """What clients call the model."""
        return self.served_model_name or Path(self.model).name
