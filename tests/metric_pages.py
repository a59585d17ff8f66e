"""What tests read from `/metrics`, of processes and of pods alike."""

from __future__ import annotations

import re

from prometheus_client.parser import text_string_to_metric_families

HELD = re.compile(
    r"segue_pages\{state=(owned|arriving|copying|quarantined)\}|segue_requests_running\{.*|segue_leases|segue_slots_used"
)


def samples_of(page: str) -> dict[str, float]:
    """All samples of a Prometheus page, as `name{label=value,…}` without the role."""
    samples = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()) if k != "role")
            samples[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return samples


def held_in(samples: dict[str, float]) -> dict[str, float]:
    """What requests still hold; empty when all is as before the first request."""
    return {name: value for name, value in samples.items() if value and HELD.fullmatch(name)}
