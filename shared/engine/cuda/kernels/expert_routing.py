"""Routing of experts by `expert_routing.cu`: one launch a layer."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from shared.engine.checkpoint.experts_config import Routing, Scoring
from shared.engine.cuda.kernels.compiled_kernels import Launch, compiled, run_kernel
from shared.engine.model.ops import ExpertChoice
from shared.engine.model.routing import Router

SOURCE = Path(__file__).with_name("expert_routing.cu")
CHOSEN_MAX = 32  # by a token: each is written by a lane of a warp
_EXPERTS_A_LANE = (1, 2, 4, 8, 16)  # with more, numbers leave the registers
_WARP = 32
_THREADS = 128


class CudaRouter:
    """See `ExpertChoice`."""

    def __init__(self, launch: Launch, routing: Routing, correction: Tensor | None) -> None:
        """`routing`: of those that `can_route` allows; correction float32 [experts]."""
        assert can_route(routing)
        assert correction is None or (correction.is_contiguous() and correction.dtype == torch.float32)
        self._launch, self._routing, self._correction = launch, routing, correction
        each = next(each for each in _EXPERTS_A_LANE if routing.experts <= each * _WARP)
        self._kernel = f"route_experts_{each}"

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """See `ExpertChoice`."""
        routing, tokens = self._routing, len(logits)
        assert logits.is_contiguous()
        assert logits.dtype == torch.float32
        chosen = torch.empty(tokens, routing.chosen, dtype=torch.int64, device=logits.device)
        weights = logits.new_empty(tokens, routing.chosen)
        softmax = routing.scoring is Scoring.SOFTMAX
        run_kernel(
            self._launch,
            self._kernel,
            -(-tokens * _WARP // _THREADS),
            _THREADS,
            logits,
            self._correction,
            *map(ctypes.c_int, (tokens, routing.experts, routing.chosen, softmax, routing.normalized)),
            ctypes.c_float(routing.scale),
            ctypes.c_int(routing.groups),
            ctypes.c_int(routing.groups_chosen),
            chosen,
            weights,
        )
        return chosen, weights


class GpuRouting:
    """See `Ops.routing`. The kernels are made for the first layer that needs them."""

    def __init__(self, kernels: Callable[[], Launch]) -> None:
        self._kernels = kernels
        self._launch: Launch | None = None

    @classmethod
    def compiled(cls, device: torch.device) -> GpuRouting:
        """Compiled for this GPU when it is needed, which raises `StartError` if it cannot be."""
        return cls(partial(compiled, SOURCE, device, waits=True))

    def __call__(self, routing: Routing, correction: Tensor | None, device: torch.device) -> ExpertChoice:
        """See `Ops.routing`."""
        if not can_route(routing):
            return Router(routing, correction, device)
        if self._launch is None:
            self._launch = self._kernels()
        return CudaRouter(self._launch, routing, correction)


def can_route(routing: Routing) -> bool:
    """Whether the kernels have room for it."""
    return routing.experts <= _EXPERTS_A_LANE[-1] * _WARP and routing.chosen <= CHOSEN_MAX
