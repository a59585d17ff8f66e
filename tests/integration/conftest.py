"""Deployments of the small model for all tests here that share their flags; and a stack to close things.

A test may kill and drain workers, if it waits for their return; it leaves nothing held, and compares counters with what
they were before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.integration.deployments.deployment import LocalDeployment, deployment

# Room for two deployments on a small machine, of which one may have four workers.
SMALL = {"prefill": {"kvPages": 1200}, "decode": {"kvPages": 1200}}
SMALLER = {"prefill": {"kvPages": 400}, "decode": {"kvPages": 400}}


@pytest.fixture(scope="package")
def one_each() -> Iterator[LocalDeployment]:
    """One prefill and one decode worker; tools are called as Hermes writes it."""
    with deployment(config={**SMALL, "router": {"toolCallParser": "hermes"}}) as running:
        yield running


@pytest.fixture(scope="package")
def two_each() -> Iterator[LocalDeployment]:
    """Two prefill and two decode workers; requests wait for them for longer than any test lasts."""
    config = {**SMALLER, "router": {"waitingSecondsMax": 300}}
    with deployment("--prefill", "2", "--decode", "2", config=config) as running:
        yield running


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Closed after the test."""
    with ExitStack() as stack:
        yield stack
