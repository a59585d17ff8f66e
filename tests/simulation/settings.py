"""The settings of simulated processes, as a seed decides them. A setting that stands nowhere here has its default."""

from __future__ import annotations

from typing import Any

from decode.config import DecodeConfig
from prefill.config import PrefillConfig
from router.config import RouterConfig
from tests.simulation.scenario import ScenarioSizes

MODEL_NAME = "oracle"


def router_config(sizes: ScenarioSizes) -> RouterConfig:
    """Of every router of the world."""
    values: dict[str, Any] = {
        "served_model_name": MODEL_NAME,
        "prefill_policy": sizes.prefill_policy,
        "decode_policy": sizes.decode_policy,
        "max_queued_requests": sizes.max_queued_requests,
        "losses_max": sizes.losses_max,
        "loss_seconds": sizes.loss_seconds,
        "waiting_seconds_max": sizes.waiting_seconds_max,
        "ready_seconds_max": sizes.ready_seconds_max,
        "request_seconds_max": sizes.request_seconds_max,
        "renew_seconds": sizes.lease_seconds / 4,
        "cache_hit_tokens_min": 1,
        "imbalance_tokens_max": 200,
        "tenant_share_max": sizes.tenant_share_max,
        "tenant_running_max": sizes.tenant_running_max,
        "tenant_tokens_per_minute": sizes.tenant_tokens_per_minute,
        "tenant_weights": sizes.tenant_weights,
        "share_prefix_cache": sizes.share_prefix_cache,
        "overtakes_max": sizes.overtakes_max,
        "candidates_max": sizes.candidates_max,
        "ready_seconds": sizes.ready_seconds,
        "unreachable_seconds": sizes.unreachable_seconds,
        "stall_seconds": sizes.stall_seconds,
    }
    return RouterConfig(**values | dict(sizes.router_bounds))


def prefill_config(sizes: ScenarioSizes) -> PrefillConfig:
    """Of every prefill worker of the world."""
    values: dict[str, Any] = {
        "page_size": sizes.page_size,
        "max_running_requests": sizes.prefill_slots,
        "chunked_prefill_size": sizes.chunked_prefill_size,
        "short_share": sizes.short_share,
        "max_prefill_tokens": 4 * sizes.chunked_prefill_size,
        "lease_seconds": sizes.lease_seconds,
        "leases_max": sizes.leases_max,
        "queue_policy": sizes.queue_policy,
        "radix_eviction_policy": sizes.radix_eviction_policy,
        "tenant_share_max": sizes.tenant_share_max,
        "max_queued_requests": sizes.max_queued_requests,
        "shared_prefix_cached_tokens_max": sizes.page_size,
        "shared_prefix_tokens_min": sizes.page_size,
    }
    return PrefillConfig(**values | dict(sizes.prefill_bounds))


def decode_config(sizes: ScenarioSizes) -> DecodeConfig:
    """Of every decode worker of the world."""
    values: dict[str, Any] = {
        "page_size": sizes.page_size,
        "max_running_requests": sizes.decode_slots,
        "radix_eviction_policy": sizes.radix_eviction_policy,
        "tenant_share_max": sizes.tenant_share_max,
        "retract_steps": sizes.retract_steps,
        "init_new_token_ratio": sizes.init_new_token_ratio,
        "fetch_seconds_max": sizes.fetch_seconds_max,
        "lease_seconds": sizes.lease_seconds,
    }
    return DecodeConfig(**values | dict(sizes.decode_bounds))
