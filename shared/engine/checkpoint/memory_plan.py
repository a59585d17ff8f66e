"""How long a context and how many KV pages a worker holds, each with a reason that a person can check.

Weights and a reserve for activations come first. Pages get the rest, but never more than all slots can fill, and never
more than were asked for. Where the budget comes from, this file does not know (see `shared.process.resources`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shared.engine.config import Budget
from shared.kv.page_pool import pages_for_tokens
from shared.primitives.errors import ConfigError, ModelError
from shared.wire.bounds import NUMBERS_MAX

if TYPE_CHECKING:
    from shared.engine.checkpoint.model_config import ModelConfig
    from shared.engine.checkpoint.transformers_config import FallbackConfig

RESERVE_BYTES = 2**30  # the interpreter, torch, activations


@dataclass(frozen=True)
class Demand:
    """What a worker wants to hold."""

    weights_bytes: int
    page_bytes: int
    page_size: int  # tokens
    host_fraction: float  # pages in host memory for each page of the pool
    slots: int
    context_len: int  # tokens
    max_total_tokens: int = 0  # upper bound on the pool, but at least one full context; 0: unbounded
    reserve_bytes: int = RESERVE_BYTES
    reserve: str = "reserve"  # what it is for


def choose_pages(demand: Demand, budget: Budget, pages: int | None) -> tuple[int, str]:
    """The number of pages, and why. An explicit number of `pages` wins.

    Raises ConfigError if explicit pages do not fit, ModelError if the model leaves no room for one full request.
    """
    page_bytes = round(demand.page_bytes * (1 + demand.host_fraction))
    rest = budget.memory_bytes - demand.weights_bytes - demand.reserve_bytes
    figures = (
        f"{gib(budget.memory_bytes)} ({budget.origin}) less {gib(demand.weights_bytes)} of weights and "
        f"{gib(demand.reserve_bytes)} of {demand.reserve} leaves {gib(max(rest, 0))} for KV"
        + (f" and {demand.host_fraction:.0%} of it again in host pages" if demand.host_fraction else "")
    )
    if pages is not None:
        if pages * page_bytes > rest:
            raise ConfigError(f"{pages} pages need {gib(pages * page_bytes)}; {figures}: ask for fewer")
        return pages, "as configured"
    needed = pages_for_tokens(demand.context_len, demand.page_size)
    if rest < needed * page_bytes:
        raise ModelError(
            f"too little memory: {figures}, one request of {demand.context_len} tokens needs "
            f"{gib(needed * page_bytes)}: give more memory, or a shorter context"
        )
    most, reason = demand.slots * needed, f"enough for {demand.slots} requests of {demand.context_len} tokens"
    if demand.max_total_tokens:
        wanted = max(needed, pages_for_tokens(demand.max_total_tokens, demand.page_size))
        if wanted < most:
            why = "as configured" if wanted > needed else "one whole context, the least there is"
            most, reason = wanted, f"for {wanted * demand.page_size} tokens, {why}"
    if rest // page_bytes >= most:
        return most, reason
    return rest // page_bytes, figures


def context_bound(
    config: ModelConfig | FallbackConfig, context_len: int | None, setting: str = "context_len"
) -> tuple[int, str]:
    """The longest request in tokens, before memory is looked at, and why; `ConfigError` if more is asked for.

    `setting`: what the error calls it.
    """
    if config.context_len <= NUMBERS_MAX:
        most, whose, why = config.context_len, "the model's", "all the model was made for"
    else:
        most, whose, why = NUMBERS_MAX, "a message's", "all that a message carries"
    if context_len is None:
        return most, why
    if not 1 <= context_len <= most:
        raise ConfigError(f"{setting} must be between 1 and {whose} {most}, got {context_len}")
    return context_len, "as configured"


def gib(size: int) -> str:
    """Bytes for a reader."""
    return f"{size / 2**30:.2f} GiB"
