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
        gates, ups = gate_up.float().chunk(2, dim=-1)
        gates, ups = gates.clamp(max=gate.limit), ups.clamp(-gate.limit, gate.limit)
        return ((ups + 1.0) * (gates / (1.0 + torch.exp(-gate.slope * gates)))).to(gate_up.dtype)

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
