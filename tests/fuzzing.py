"""How long hypothesis searches for bytes that break something.

In CI the inputs are few and always the same. `FUZZ_EXAMPLES=50000` takes so many new ones in each test.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

EXAMPLES_IN_CI = 150
BY_HAND = os.environ.get("FUZZ_EXAMPLES")

fuzzed = settings(
    max_examples=int(BY_HAND or EXAMPLES_IN_CI),
    deadline=None,
    derandomize=BY_HAND is None,
    suppress_health_check=list(HealthCheck),
)
