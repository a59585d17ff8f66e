"""Settings of a decode worker, beside those that every worker has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from shared.process.settings import Count, Fraction, PositiveInt, Seconds
from shared.worker.worker_config import WorkerConfig


class DecodeConfig(WorkerConfig):
    """Segue's decode worker: fetches KV pages and generates."""

    groups: ClassVar[Mapping[str, str]] = {"device and memory": "host_fraction"}
    defaults_on_cuda: ClassVar[dict[str, object]] = {
        **WorkerConfig.defaults_on_cuda,
        "local_tokens_max": 2048,
        "itl_target_seconds": 0.04,
    }

    fetch_seconds_max: Seconds = Field(
        default=10.0,
        description="Seconds that a fetch may make no progress. Then it is abandoned, and the request is refused as "
        "unreachable. As many seconds of decode steps, the largest running request keeps pages free of arriving ones.",
    )
    flush_seconds: Seconds = Field(
        default=0.01,
        description="Seconds that a token may wait to share a message with others. A reader does not notice 10 ms.",
    )
    host_fraction: float = Field(
        default=0.25,
        ge=0.0,
        le=16.0,
        description="Pages in host memory for each page of the pool. Retracted requests are kept there.",
    )
    local_tokens_max: Count = Field(
        default=512,
        description="Tokens that one step may compute again of retracted requests for which host memory had no room; "
        "at least a page. "
        "0: none, and a prefill worker computes them again. On cuda 2048 unless it is set.",
    )
    itl_target_seconds: Seconds = Field(
        default=0.1,
        description="Seconds within which streams get their next token while others are computed again beside them. "
        "On cuda 0.04 unless it is set.",
    )
    retract_steps: PositiveInt = Field(
        default=10,
        description="Decode steps that must fit after a retraction, so that the next step does not retract again.",
    )
    retractions_max: PositiveInt = Field(
        default=3,
        description="Retractions after which a request is retracted last. It can still be retracted, and one whose "
        "turn is over goes first.",
    )
    turn_seconds: Seconds = Field(
        default=2.0,
        description="Seconds that a request runs before it leaves for a retracted one that does not fit beside it. "
        "Shorter while many wait, so that each has had a turn within four times as long; never less than 20 copies "
        "of its pages to host memory and back. Up to ten times as long where host memory is full and requests are "
        "computed again, so that about a third of the device's time goes there.",
    )
    schedule_conservativeness: float = Field(
        default=1.0,
        gt=0.0,
        le=10.0,
        description="Factor of the new-token ratio. Above 1 there are fewer retractions and fewer requests at a time.",
    )
    init_new_token_ratio: Fraction = Field(
        default=0.7,
        description="Fraction of max_new_tokens that is reserved until the lengths of outputs are known.",
    )
    min_new_token_ratio_factor: Fraction = Field(
        default=0.14, description="Fraction of its first value to which the new-token ratio falls."
    )
    new_token_ratio_decay_steps: PositiveInt = Field(
        default=600, description="Decode steps in which the new-token ratio falls that far."
    )
    clip_max_new_tokens: PositiveInt = Field(
        default=512,
        description="Remaining tokens of one request that the reserve counts at most while the lengths of outputs are "
        "not known. A chat without max_tokens has the rest of its context for a bound, and uses little of it.",
    )
