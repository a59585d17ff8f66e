"""The shapes of deployments of tests: prompts are computed by prefill workers, or all by decode workers.

    SEGUE_TEST_AGGREGATED=1 python -m pytest tests/abuse        or `make aggregated`, which names the folders

Tests ask for workers of both roles. Where they say nothing of `localPrefill`, prefill workers compute all prompts, so
that pages travel: by default (`short`) an idle decode worker would compute most of them. In the second shape `segue up`
starts no prefill worker, and `deployment()` requires of metrics at its end that decode workers computed prompts. A test
of something that only prefill workers do is skipped there, and says why.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.integration.deployments.deployment import RoleConfigs

AGGREGATED = os.environ.get("SEGUE_TEST_AGGREGATED", "") not in ("", "0")
PROMPT_ROLE = "decode" if AGGREGATED else "prefill"  # whose workers compute prompts


def needs_prefill(why: str) -> pytest.MarkDecorator:
    """Skips a test in the shape without prefill workers."""
    return pytest.mark.skipif(AGGREGATED, reason=f"without a prefill worker {why}")


def flags_of_shape(flags: tuple[str, ...]) -> tuple[str, ...]:
    """The flags of `segue up`, with no prefill worker in that shape."""
    if not AGGREGATED:
        return flags
    given = list(flags)
    if "--prefill" in given:
        at = given.index("--prefill")
        del given[at : at + 2]
    return (*given, "--prefill", "0")


def at_prefill(config: RoleConfigs | None) -> RoleConfigs:
    """The settings of roles, with prompts computed by prefill workers while some are up, unless they say otherwise."""
    return {**(config or {}), "router": {"localPrefill": "fallback", **(config or {}).get("router", {})}}


def config_of_shape(config: RoleConfigs | None) -> RoleConfigs | None:
    """The settings of roles; what prefill workers are told of chunks is told decode workers in that shape."""
    if not AGGREGATED or not config:
        return config
    chunk = config.get("prefill", {}).get("chunkedPrefillSize")
    return {**config, "decode": {**config.get("decode", {}), **({"localTokensMax": chunk} if chunk else {})}}
