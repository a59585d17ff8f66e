"""Settings that most worlds leave as they are and some make small: bounds, ratios and how often something is sent.

Each is drawn from a generator of its own, so one line more changes no other draw. What shapes a whole world, such as
sizes and policies, is drawn in `drawing` and `variations`.
"""

from __future__ import annotations

from collections.abc import Mapping

from tests.simulation.scenarios.scenario import SettingValues, SimulationScenario

Choices = Mapping[str, tuple[float, ...]]  # setting → what it may be instead of its default
DIFFERENT = 0.35  # share of the worlds in which some settings differ
DRAWN = 0.35  # … and of these settings

ROUTER: Choices = {
    "ready_max": (1, 3, 8),
    "prefilling_per_slot": (0.1, 0.2),
    "no_room_seconds": (0.001, 0.02, 1.0),
    "cache_hit_tokens_min": (0, 64, 128),
    "imbalance_tokens_max": (0, 40, 8192),
    "imbalance_ratio_max": (1.0, 4.0),
    "cache_miss_weight": (1.0, 4.0),
    "prefix_blocks_max": (1, 4, 16),
}
PREFILL: Choices = {
    "max_prefill_tokens": (8, 24, 16384),
    "lease_fraction": (0.0, 0.1, 1.0),
    "prefix_aware_queue_max": (1, 3),
    "shared_prefix_cached_tokens_max": (0, 40),
    "shared_prefix_tokens_min": (1, 32),
    "load_seconds": (0.005, 0.5),
}
DECODE: Choices = {
    "flush_seconds": (0.0005, 0.1),
    "retractions_max": (1, 2),
    "schedule_conservativeness": (0.3, 3.0),
    "min_new_token_ratio_factor": (0.0, 1.0),
    "new_token_ratio_decay_steps": (1, 20),
    "clip_max_new_tokens": (1, 16),
    "load_seconds": (0.005, 0.5),
}
# A request may fail by these, so calm worlds keep their defaults.
ROUTER_TROUBLES: Choices = {"tenant_waiting_max": (1, 5), "worker_return_seconds": (0.2, 2.0)}


def bounds(scenario: SimulationScenario) -> SimulationScenario:
    """A third of the worlds differ, each in a third of these settings. The rest keep what rare faults need."""
    if scenario.random("bounds").random() > DIFFERENT:
        return scenario
    troubles: Choices = {} if scenario.calm else ROUTER_TROUBLES
    return scenario.sized(
        router_bounds=_drawn(scenario, "router", {**ROUTER, **troubles}),
        prefill_bounds=_drawn(scenario, "prefill", PREFILL),
        decode_bounds=_drawn(scenario, "decode", DECODE),
    )


def _drawn(scenario: SimulationScenario, role: str, choices: Choices) -> SettingValues:
    drawn = []
    for name, values in choices.items():
        rng = scenario.random(f"{name} of {role}")
        if rng.random() < DRAWN:
            drawn.append((name, rng.choice(values)))
    return tuple(drawn)
