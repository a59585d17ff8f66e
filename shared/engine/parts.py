"""What is given to whoever builds an engine, and what a worker gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from shared.engine.checkpoint.kv_cache import KVCache
from shared.engine.checkpoint.model_config import ModelConfig
from shared.engine.checkpoint.transformers_config import FallbackConfig
from shared.engine.config import EngineConfig
from shared.engine.model.weights import OnProgress
from shared.engine.parallel.orders import Orders
from shared.engine.sampling.grammars import Grammars
from shared.scheduling.device import Device
from shared.wire.messages import Limits
from shared.wire.sampling_params import FEATURES

OnLogits = Callable[[int, tuple[int, ...], Tensor], None]  # step, slots of the rows, logits [rows, vocab]


@dataclass(frozen=True)
class Followers:
    """The other ranks of a worker, which are being started, as rank 0 knows them."""

    ranks: int  # of the worker, rank 0 among them
    meeting: Path  # a file of their own
    orders: Orders


@dataclass(frozen=True)
class LoadJob:
    """A model that is to be loaded: the same for whoever builds the engine."""

    folder: Path
    config: EngineConfig
    shape: ModelConfig | FallbackConfig  # of the model, at the context that was asked for
    on_progress: OnProgress
    on_logits: OnLogits | None  # is shown the logits of each step, for tests
    followers: Followers | None = None  # the other ranks of the worker; None: it is one rank


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
    dtype: str  # of the weights as they are computed with
    determinism: str
    eos_token_ids: frozenset[int]
    host_pages: int
    memory: Mapping[str, int]  # bytes set apart, by kind
    description: str  # device, dtype, pages and context, and the reason for each
    grammars: Grammars | None = None  # what compiles them; None: it serves none
    features: frozenset[str] = frozenset()  # the sampling parameters it serves, see `SamplingParams.features`


def features_with(grammars: Grammars | None) -> frozenset[str]:
    """The sampling parameters that both engines serve, see `SamplingParams.features`."""
    return frozenset(FEATURES if grammars else FEATURES.keys() - {"grammar"})
