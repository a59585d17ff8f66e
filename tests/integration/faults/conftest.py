"""What streams are asked for that something happens to, and what they say when nothing does."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.deployments.deployment import LocalDeployment
from tests.integration.deployments.ranked import RANKED
from tests.integration.deployments.streams import StreamedAnswer, crowd

SAMPLED: dict[str, Any] = {
    "temperature": 1.0,
    "seed": 7,
    # Seconds, also on a fast machine: long enough to be caught in the middle. Ranks take as long for half as many.
    "max_tokens": 300 if RANKED else 600,
    "extra_body": {"ignore_eos": True},
}
PROMPT = "The expedition left the harbour at dawn. Nobody aboard had expected that"
PROMPTS = [f"Chapter {number}. The expedition left the harbour at dawn, and" for number in range(8)]


@pytest.fixture(scope="package")
def undisturbed(two_each: LocalDeployment) -> str:
    """What PROMPT is answered, alone."""
    return crowd(two_each.url, [PROMPT], 1, **SAMPLED)[0].text


@pytest.fixture(scope="package")
def undisturbed_crowd(two_each: LocalDeployment) -> list[StreamedAnswer]:
    """What PROMPTS are answered, all at once: they fit on one worker without retraction."""
    return crowd(two_each.url, PROMPTS, len(PROMPTS), **SAMPLED)
