"""What a worker asks of an engine, and what it gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from shared.engine.checkpoint.fallback_config import FallbackConfig
from shared.engine.checkpoint.kv_cache import KVCache
from shared.engine.checkpoint.memory_plan import UNBOUNDED, Budget
from shared.engine.checkpoint.model_config import ModelConfig
from shared.engine.sampling.grammars import Grammars
from shared.scheduling.device import Device
from shared.wire.messages import Limits


@dataclass(frozen=True)
class Sizes:
    """How much a worker holds. None: chosen by what memory allows, and explained in `Engine.description`."""

    pages: int | None
    page_size: int  # tokens
    slots: int
    max_total_tokens: int = 0  # what pages are chosen for; 0: no bound
    host_fraction: float = 0.0  # pages in host memory for each page of the pool
    context_len: int | None = None  # tokens
    extend_tokens: int = 8192  # of one EXTEND step at most
    budget: Budget = UNBOUNDED
    device_memory_share: float = 0.9  # of the GPU's memory


class EngineDevice(Device, Protocol):
    """`Device`, with what its process does beside stepping."""

    @property
    def work_done(self) -> int:
        """A number that changes while steps are computed: it stands still when the device hangs. From any thread."""

    @property
    def counters(self) -> object | None:
        """A class of counters to publish, see `shared.primitives.metric_fields`; None: it counts nothing."""

    @property
    def launches_cost(self) -> bool:
        """Whether a launch takes time from the step that is computed, see `EventLoop`."""

    def close(self) -> None:
        """Finish what was launched, and end."""


@dataclass(frozen=True)
class Engine:
    """A loaded model, ready for steps."""

    device: EngineDevice
    cache: KVCache
    config: ModelConfig | FallbackConfig
    limits: Limits
    model_fingerprint: str
    kv_format: str
    determinism: str
    eos_token_ids: frozenset[int]
    host_pages: int
    memory: Mapping[str, int]  # bytes set apart, by kind
    description: str  # device, dtype, pages and context, and the reason for each
    grammars: Grammars | None = None  # what compiles them; None: it serves none
    features: frozenset[str] = frozenset()  # the sampling parameters it serves, see `SamplingParams.features`


def features_with(grammars: Grammars | None) -> frozenset[str]:
    """The sampling parameters that both engines serve, see `SamplingParams.features`."""
    asked = {"logprobs", "prompt_logprobs", "allowed_token_ids", "bad_words"}
    return frozenset(asked | ({"grammar"} if grammars else set()))
