"""Deployments of the small model for all tests of a module that share their flags; and a stack to close things."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.integration.deployments.deployment import LocalDeployment, deployment

# Room for two deployments on a small machine, of which one may have four workers.
SMALL = {"prefill": {"kvPages": 1200}, "decode": {"kvPages": 1200}}
SMALLER = {"prefill": {"kvPages": 400}, "decode": {"kvPages": 400}}


@pytest.fixture(scope="module")
def one_each() -> Iterator[LocalDeployment]:
    """One prefill and one decode worker."""
    with deployment(config=SMALL) as running:
        yield running


@pytest.fixture(scope="module")
def two_each() -> Iterator[LocalDeployment]:
    """Two prefill and two decode workers."""
    with deployment("--prefill", "2", "--decode", "2", config=SMALLER) as running:
        yield running


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Closed after the test."""
    with ExitStack() as stack:
        yield stack
