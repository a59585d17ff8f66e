"""What tests read from `/metrics`, of processes and of pods alike."""

from __future__ import annotations

import re

HELD = re.compile(
    r"segue_pages\{state=(owned|arriving|copying|quarantined)\}|segue_requests_running\{.*|segue_leases|segue_slots_used"
)
_LABEL = re.compile(r'(\w+)="([^"\\]*)"')  # no label of ours has anything to escape
_SAMPLE = re.compile(rf"(\w+)(?:\{{((?:{_LABEL.pattern},?)*)\}})? (\S+)")


def samples_of(page: str) -> dict[str, float]:
    """All samples of a Prometheus page, as `name{label=value,…}` without the role.

    The client library's parser takes 4 ms of CPU time for a page, and tests look at five pages many times a second.
    """
    samples = {}
    for line in page.split("\n"):
        if line and not line.startswith("#"):
            found = _SAMPLE.fullmatch(line)
            assert found, line
            name, within, *_, value = found.groups()
            pairs = sorted(_LABEL.findall(within or ""))
            labels = ",".join(f"{label}={given}" for label, given in pairs if label != "role")
            samples[f"{name}{{{labels}}}" if labels else name] = float(value)
    return samples


def held_in(samples: dict[str, float]) -> dict[str, float]:
    """What requests still hold; empty when all is as before the first request."""
    return {name: value for name, value in samples.items() if value and HELD.fullmatch(name)}
