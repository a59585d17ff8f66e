"""The settings of simulated processes, as a seed decides them. A setting that stands nowhere here has its default."""

from __future__ import annotations

from typing import Any

from decode.config import DecodeConfig
from prefill.config import PrefillConfig
from router.config import RouterConfig
from shared.process.settings import Settings
from tests.simulation.scenarios.scenario import ScenarioSizes

MODEL_NAME = "oracle"


def router_config(sizes: ScenarioSizes) -> RouterConfig:
    """Of every router of the world."""
    values: dict[str, Any] = {
        "served_model_name": MODEL_NAME,
        "renew_seconds": sizes.lease_seconds / 4,
        "cache_hit_tokens_min": 1,
        "imbalance_tokens_max": 200,
    }
    return RouterConfig(**_of_the_same_name(RouterConfig, sizes) | values | dict(sizes.router_bounds))


def prefill_config(sizes: ScenarioSizes) -> PrefillConfig:
    """Of every prefill worker of the world."""
    values: dict[str, Any] = {
        "max_running_requests": sizes.prefill_slots,
        "max_prefill_tokens": 4 * sizes.chunked_prefill_size,
        "shared_prefix_cached_tokens_max": sizes.page_size,
        "shared_prefix_tokens_min": sizes.page_size,
    }
    return PrefillConfig(**_of_the_same_name(PrefillConfig, sizes) | values | dict(sizes.prefill_bounds))


def decode_config(sizes: ScenarioSizes) -> DecodeConfig:
    """Of every decode worker of the world."""
    values: dict[str, Any] = {"max_running_requests": sizes.decode_slots}
    return DecodeConfig(**_of_the_same_name(DecodeConfig, sizes) | values | dict(sizes.decode_bounds))


def _of_the_same_name(config: type[Settings], sizes: ScenarioSizes) -> dict[str, Any]:
    return {name: getattr(sizes, name) for name in config.model_fields if hasattr(sizes, name)}
