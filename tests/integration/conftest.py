"""One deployment of the small model for all tests of a module that share its flags."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.deployment import LocalDeployment, deployment

SMALL = ("--set", "prefill.pages=1200,decode.pages=1200")  # room for two deployments on a small machine
SMALLER = ("--set", "prefill.pages=400,decode.pages=400")  # … one of which has four workers


@pytest.fixture(scope="module")
def one_each() -> Iterator[LocalDeployment]:
    """One prefill and one decode worker."""
    with deployment(*SMALL) as running:
        yield running


@pytest.fixture(scope="module")
def two_each() -> Iterator[LocalDeployment]:
    """Two prefill and two decode workers."""
    with deployment("--prefill", "2", "--decode", "2", *SMALLER) as running:
        yield running
