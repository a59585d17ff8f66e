"""One deployment for the whole suite, and the order of its groups."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.abuse.target import AbusedDeployment
from tests.integration.deployments.deployment import deployment

CONFIG = {
    "router": {"bodySecondsMax": 5, "idleSecondsMax": 10},
    "prefill": {"kvPages": 600},
    "decode": {"kvPages": 600},
}


@pytest.fixture(scope="package")
def target() -> Iterator[AbusedDeployment]:
    """Two prefill and two decode workers, logging everything."""
    flags = ("--prefill", "2", "--decode", "2", "--log-level", "debug", "--log-format", "json")
    with deployment(*flags, config=CONFIG, environment={"MALLOC_ARENA_MAX": "2"}) as running:
        target = AbusedDeployment(running)
        try:
            yield target
        finally:
            target.others.close()
