"""`Ops` of one of several ranks: its own arithmetic, and sums and gathers over all of them."""

from __future__ import annotations

from torch import Tensor

from shared.engine.model.ops import Ops
from shared.engine.parallel.collectives import Collectives


class RankOps:
    """See `Ops`."""

    def __init__(self, ops: Ops, collectives: Collectives) -> None:
        """`ops`: what this rank computes its share with."""
        self.share = collectives.share
        self.linear, self.narrow_linear, self.head = ops.linear, ops.narrow_linear, ops.head
        self.routing, self.experts = ops.routing, ops.experts
        self.rms_norm, self.add_rms_norm = ops.rms_norm, ops.add_rms_norm
        self.silu_and_mul, self.gelu_and_mul = ops.silu_and_mul, ops.gelu_and_mul
        self.sum, self.gather = collectives.sum, collectives.gather

    def sum_add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        """See `Ops`."""
        return self.add_rms_norm(self.sum(x), residual, weight, epsilon)
