"""The MLP of a layer: a gate decides how much of each inner number goes on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shared.engine.checkpoint.experts_config import ClampedGate
from shared.engine.checkpoint.families import Activation
from shared.engine.model.ops import Gated, Linear, Ops


def gated(activation: Activation, ops: Ops) -> Gated:
    """The function of the gate, times what it gates."""
    return ops.gelu_and_mul if activation is Activation.GELU else ops.silu_and_mul


def clamped(gate: ClampedGate) -> Gated:
    """See `ClampedGate`; computed in float32."""

    def product(gate_up: Tensor) -> Tensor:
        gates, ups = gate_up.chunk(2, dim=-1)
        gates = gates.float().clamp(max=gate.limit)
        gates /= torch.exp(-gate.slope * gates).add_(1.0)
        gates *= ups.float().clamp(-gate.limit, gate.limit).add_(1.0)
        return gates.to(gate_up.dtype)

    return product


@dataclass(frozen=True)
class GatedMLP:
    """See `FeedForward`."""

    gate_up: Linear
    gated: Gated
    down: Linear

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] → [tokens, hidden]."""
        return self.down(self.gated(self.gate_up(x)))
