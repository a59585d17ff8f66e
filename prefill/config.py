"""Settings of a prefill worker, beside those of every worker that computes prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from shared.process.settings import Fraction, PositiveInt
from shared.worker.worker_config import PromptConfig


class PrefillConfig(PromptConfig):
    """Segue's prefill worker: computes prompts and leases their KV pages."""

    groups: ClassVar[Mapping[str, str]] = {
        "scheduling": "chunked_prefill_size max_prefill_tokens short_share"
    }
    defaults_on_cuda: ClassVar[dict[str, object]] = {
        **PromptConfig.defaults_on_cuda,
        "chunked_prefill_size": 8192,
    }

    chunked_prefill_size: PositiveInt = Field(
        default=128,
        description="Tokens of one EXTEND step, of one long prompt or of many short ones. A request that comes waits "
        "for the step under way: 128 take 0.1 s on two free cores with the default model. On a CPU larger steps "
        "compute less than a tenth faster. On cuda 8192 unless it is set.",
    )
    short_share: Fraction = Field(
        default=0.25,
        description="Fraction of the steps of a prompt in chunks that shorter prompts may take. They join its steps, "
        "and what they do not need the long prompt takes. It becomes slower by 1 / (1 - fraction) at most. At 0 other "
        "prompts wait until it is computed, and its steps overlap with their planning.",
    )
    max_prefill_tokens: PositiveInt = Field(
        default=16384,
        description="Uncached tokens admitted in one pass. This bounds the activations of a step.",
    )
    lease_fraction: Fraction = Field(
        default=0.5,
        description="Fraction of the pool that may be under lease before new prompts wait. Under overload they wait "
        "before they are computed.",
    )
    leases_max: PositiveInt = Field(
        default=1024, description="Leases at a time. Each takes 8 bytes of registered memory."
    )
