"""What a `CudaDevice` is made of, and for."""

from __future__ import annotations

from dataclasses import dataclass

from shared.engine.attention.protocol import StreamAttention
from shared.engine.checkpoint.kv_cache import KVCache
from shared.engine.cuda.graphs import RunModel
from shared.engine.cuda.step_kernels import StepKernels
from shared.engine.model.ops import Ops
from shared.engine.sampling.scored_runs import SCORES_A_RUN


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a device is made for."""

    slots: int
    pages_per_slot: int
    extend_tokens: int  # of one EXTEND step, at most
    vocab_size: int
    scores_a_run: int = SCORES_A_RUN  # tokens of prompts whose logits are held together


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What a device computes with. All of it works on the streams' device."""

    run_model: RunModel
    attention: StreamAttention
    kernels: StepKernels
    ops: Ops
    cache: KVCache  # with one padding page, its last
