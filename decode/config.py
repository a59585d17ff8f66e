"""Settings of a decode worker, beside those that every worker has."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from shared.process.settings import PositiveInt, Seconds, Share
from shared.process.worker_config import WorkerConfig


class DecodeConfig(WorkerConfig, frozen=True, kw_only=True):
    """Segue's decode worker: fetches KV pages and generates."""

    fetch_seconds_max: Annotated[
        Seconds,
        Meta(description="a fetch without progress for so long is abandoned and refused as unreachable"),
    ] = 10.0
    flush_seconds: Annotated[
        Seconds,
        Meta(description="tokens wait at most so long to share a message; below what a reader notices"),
    ] = 0.01
    host_share: Annotated[
        float,
        Meta(
            ge=0.0,
            le=16.0,
            description="host memory for retracted requests, in pages for each page of the pool",
        ),
    ] = 0.25
    retract_steps: Annotated[
        PositiveInt,
        Meta(description="steps that must fit after a retraction, so that it does not happen each step"),
    ] = 20
    retractions_max: Annotated[
        PositiveInt, Meta(description="after so many a request is retracted last: an order, not a veto")
    ] = 3
    readmit_share: Annotated[
        Share, Meta(description="of the pool free before new work joins after a retraction: hysteresis")
    ] = 0.1
    schedule_conservativeness: Annotated[
        float,
        Meta(
            gt=0.0, le=10.0, description="scales the new-token ratio; above 1: fewer retractions, less load"
        ),
    ] = 1.0
    init_new_token_ratio: Annotated[
        Share,
        Meta(description="share of max_new_tokens reserved at first; most requests end before their bound"),
    ] = 0.7
    min_new_token_ratio_factor: Annotated[
        Share, Meta(description="the ratio decays to this part of its start")
    ] = 0.14
    new_token_ratio_decay_steps: Annotated[PositiveInt, Meta(description="decode steps of that decay")] = 600
    clip_max_new_tokens: Annotated[
        PositiveInt,
        Meta(description="remaining tokens counted in the reserve at most, so a huge bound blocks nobody"),
    ] = 4096
