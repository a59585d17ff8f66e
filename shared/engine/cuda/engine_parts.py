"""What a `CudaDevice` is made of, and for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from shared.engine.attention.protocol import PlannedAttention, StreamAttention
from shared.engine.checkpoint.kv_cache import KVCache
from shared.engine.cuda.kernels.step_kernels import StepKernels
from shared.engine.model.ops import Ops
from shared.engine.sampling.logprobs import SCORES_A_RUN
from shared.engine.streams import Stream


class StreamModel(Protocol):
    """Token ids to logits, without a look at a value; see `DecoderModel`."""

    def run(
        self,
        token_ids: Tensor,
        attention: PlannedAttention,
        sampled_rows: Tensor | None,
        logits: Tensor | None = None,
    ) -> Tensor:
        """`hidden`, then `head`."""

    def hidden(
        self, token_ids: Tensor, attention: PlannedAttention, rows: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """All layers, for the rows that are asked for."""

    def head(self, x: Tensor, residual: Tensor, logits: Tensor) -> Tensor:
        """Logits of what `hidden` gave."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a device is made for."""

    slots: int
    pages_per_slot: int
    extend_tokens: int  # of one EXTEND step, at most
    vocab_size: int
    scores_a_run: int = SCORES_A_RUN  # tokens of prompts whose logits are held together
    graph_tokens: int = 0  # of an EXTEND step that a graph takes, at most
    staging_buffers: int = 8  # a MIXED step takes two, or more if it scores


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What a device computes with. All of it works on the streams' device."""

    forward: Stream  # of steps
    copies: Stream  # between pages of the device and of the host
    model: StreamModel
    attention: StreamAttention
    kernels: StepKernels
    ops: Ops
    cache: KVCache  # with one padding page, its last
